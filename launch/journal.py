"""What a run says while it trains: lines in its folder and in W&B, reasons in the terminal, sampled
traces."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from common.output import only_shows
from engine.checkpoint.layout import replace_text
from engine.executor import ForkEngine
from engine.optimizer.bad_steps import BadStep
from engine.step_metrics import StepMetrics
from launch.loss_weights import HeldOutFigures, LossWeights
from launch.run.folder import RunFolder
from launch.run.queries import FILE as QUERIES
from launch.run.queries import Answers, queries_record
from launch.run.trace_file import TraceFile, is_sampled
from launch.setup.first_screen import print_screen
from launch.terminal.tables import REPORT, retrieval_report, show
from launch.tracking.alerts import Alarms
from launch.tracking.tracker import Tracker

PAGE_SHARE = 0.02  # of the time of a run, at most, goes into its page
# A page is the last one of a run that was killed where none follows within three times what lay
# between the last two, and these seconds; of the first page that is not known.
NEXT_PAGE_S, SECOND_PAGE_S = 600, 3 * 3600
UNTRACKED = "tracking ends, metrics.jsonl goes on"


class Journal:
    """On the first rank; on the others it does nothing, but for what all ranks gather together."""

    def __init__(self, folder: RunFolder, trace_every: int, alarms: Alarms | None = None):
        self.folder, self.trace_every = folder, trace_every
        self.alarms = alarms or Alarms()
        self.tracker: Tracker | None = None  # on the first rank, once the run is decided
        self.trace = TraceFile(folder.path / "trace.json")
        self._evaluations: dict[int, dict[str, float]] = {}
        # on the clock time.monotonic: the next page is not before, and the newest was begun
        self._page_due_s = self._page_begun_s = -math.inf

    def track(self, start: Callable[[], Tracker]) -> None:
        """From here on in the trackers that are asked for, too."""
        if self.folder.first_rank:
            with only_shows(UNTRACKED):
                self.tracker = start()
                self.say(self.tracker.notice)

    def _track(self, tell: Callable[[Tracker], None]) -> None:
        """`tell` the trackers something. A failure that they do not catch ends them, not the
        run."""
        tracker, self.tracker = self.tracker, None
        if tracker is not None:
            with only_shows(UNTRACKED):
                tell(tracker)
                self.tracker = tracker

    def say(self, *things: object) -> None:
        """In the terminal, above the progress bar, each on its own lines; empty ones, and another
        one that is equal, are left out."""
        for thing in dict.fromkeys(filter(None, things)) if self.folder.first_rank else ():
            with only_shows("a message is not shown"):
                show(thing)

    def begin(self, screen: Sequence[tuple[str, str]]) -> None:
        """The first screen of the run."""
        if self.folder.first_rank:
            with only_shows("the first screen is not shown"):
                print_screen(screen)

    def step(self, line: Mapping[str, Any], metrics: StepMetrics, samples: int) -> None:
        """metrics.jsonl, and the trackers; alerts.jsonl and the terminal where something is wrong.
        `samples`: of all steps so far."""
        self.folder.append(self.folder.metrics, line)
        self._track(lambda tracker: tracker.step(line, metrics, samples))
        if not self.folder.first_rank:
            return
        with only_shows("an alert is not told"):
            for alert in self.alarms.after_step(line, metrics.bad_step is not None):
                self.folder.append(self.folder.alerts, {"step": line["step"], **alert._asdict()})
                self.say(f"step {line['step']}: {alert.title}. {alert.text}")
                self._track(partial(Tracker.alert, alert=alert, step=line["step"]))

    def measurement(self, step: int, seen: Mapping[str, Any] | None) -> None:
        """balance.jsonl, and the reasons of what was moved. None: there was no measurement."""
        if seen is None:
            return
        self.folder.append(self.folder.balance, seen)
        for reason in filter(None, (seen["reason"], seen.get("mix", {}).get("reason"))):
            self._decision(step, reason)

    def loss_weights(self, step: int, reason: str | None, now: LossWeights) -> None:
        """loss_weights.jsonl, where there is a reason for other weights."""
        if reason:
            self.folder.append_loss_weights({"step": step, **now.weights(), "reason": reason})
            self._decision(step, reason)

    def _decision(self, step: int, reason: str) -> None:
        """In the terminal, and beside the charts."""
        self.say(f"step {step}: {reason}")
        self._track(lambda tracker: tracker.decision(step, reason))

    def bad_step(
        self, step: int, loss: float, bad: BadStep, identity: Callable[[int], str]
    ) -> None:
        """bad_steps.jsonl: the samples of a step that was skipped. `identity`: of a sample, by its
        index."""
        record = {
            "step": step,
            "loss": loss,
            "not_finite": {b: list(map(identity, own)) for b, own in bad.not_finite.items()},
            "samples": list(map(identity, bad.samples)),
        }
        self.folder.append(self.folder.bad_steps, record)

    def evaluation(
        self,
        step: int,
        epoch: float,
        found: HeldOutFigures,
        answers: Mapping[str, Sequence[Answers]],
    ) -> None:
        """A line of metrics.jsonl for each held-out set, queries.json with what was found for some
        samples, the same for the trackers, and report.html as of now."""
        self._evaluations[step] = {}
        for name, values in found.items():
            self._evaluations[step] |= {f"{name}/{key}": value for key, value in values.items()}
            line = {"step": step, "epoch": epoch, "held_out": name, **values}
            self.folder.append(self.folder.metrics, line)
            self._track(partial(Tracker.evaluation, step=step, held_out=name, values=values))
        if self.folder.first_rank and any(answers.values()):
            with only_shows(f"{QUERIES} was not written; training goes on"):
                record = queries_record(step, answers)
                self._track(lambda tracker: tracker.queries(record))
                text = json.dumps(record, ensure_ascii=False) + "\n"
                replace_text(self.folder.path / QUERIES, text)
        if time.monotonic() >= self._page_due_s:
            self._write_page(goes_on=True)

    def sampled_trace(self, step: int, engine: ForkEngine) -> None:
        """trace.json, in the steps that are traced. All ranks call it together."""
        if is_sampled(step, self.trace_every):
            ranks = engine.gather_trace()
            if ranks is not None:  # on the first rank
                with only_shows("trace.json is not written"):
                    self.trace.add(step, engine.recorder.started_at_s, ranks)
                self._track(lambda tracker: tracker.timeline(step, ranks))

    def finish(self, exit_code: int) -> None:
        """Nothing more will be tracked."""
        self._track(lambda tracker: tracker.finish(exit_code))

    def report(self) -> None:
        """report.html of the run that has ended, and where it is."""
        if self._write_page(goes_on=False):
            self.say(f"report {self.folder.path / REPORT}")

    def _write_page(self, goes_on: bool) -> bool:
        """Was report.html written? A failure is one warning."""
        if not self.folder.first_rank:
            return False
        self._page_due_s = math.inf
        with only_shows(f"{REPORT} is not written"):
            # imports plotly, which no step needs; once, so it is no time that a page takes
            from launch.reporting.page import write_report

            began_s = time.monotonic()
            between_s, self._page_begun_s = began_s - self._page_begun_s, began_s
            next_s = max(NEXT_PAGE_S, 3 * between_s) if between_s < math.inf else SECOND_PAGE_S
            page = self.folder.path / REPORT
            write_report([self.folder.path], page, next_s if goes_on else None)
            # evaluations may follow one another quickly, and the other ranks wait for the page
            self._page_due_s = began_s + (time.monotonic() - began_s) / PAGE_SHARE
            return True
        return False

    def retrieval(self, num_samples: Mapping[str, int]) -> None:
        """The table of the first and the last evaluation of this process, if there was one."""
        if self._evaluations:
            ends = sorted({min(self._evaluations), max(self._evaluations)})
            title = "Zero-shot retrieval of held-out samples"
            with only_shows("the table of retrieval is not shown"):
                found = [self._evaluations[step] for step in ends]
                self.say(retrieval_report(title, found, num_samples))
