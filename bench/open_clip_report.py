"""What bench/open_clip.py makes of its runs: one record per run, read from the logs of either
program, tables and a plot."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from bench.common import spread
from launch.terminal.tables import DIRECTIONS

RECALL_AT = (10, 1)
TARGET = 0.6  # of R@10, mean of both directions

# A line that OpenCLIP writes per step, for example:
# Train Epoch: 0 [ 256/3550 (8%)] Data (t): 0.412 Batch (t): 2.310, 110.8/s, 55.4/s/gpu LR: 0.000025
# Logit Scale: 14.286 … Loss: 5.5452 (5.5452)
STEP_LINE = re.compile(
    r"Train Epoch: \d+ .*? Data \(t\): (\S+) Batch \(t\): \S+, (\S+)/s, .* Loss: (\S+) \("
)


@dataclass(frozen=True)
class Evaluation:
    """Retrieval among the held-out samples after `step` steps. Keys of `recalls` are such as
    image_to_text_R@10; values from 0 to 1."""

    step: int
    recalls: Mapping[str, float]

    @property
    def mean_r10(self) -> float:
        return statistics.mean(self.recalls[f"{direction}_R@10"] for direction in DIRECTIONS)


@dataclass(frozen=True)
class Record:
    """A finished run. The first three lists have an entry per step, `peak_bytes` has one per rank:
    its largest resident size.

    `step_s` is the whole of a step, its waiting for data (`data_wait_s`) included; evaluations and
    the start are in neither.
    """

    losses: list[float]
    step_s: list[float]
    data_wait_s: list[float]
    peak_bytes: list[int]
    evaluations: list[Evaluation]

    def samples_per_s(self, batch_size: int, skip: int = 0) -> float:
        """Of all steps but the first `skip`."""
        return batch_size * len(self.step_s[skip:]) / sum(self.step_s[skip:])

    def seconds_at(self) -> list[float]:
        """Of training until each evaluation."""
        until = list(accumulate(self.step_s))
        return [until[evaluation.step - 1] for evaluation in self.evaluations]

    def seconds_to(self, target: float) -> float | None:
        """Of training until R@10 first reaches `target`, on straight lines between evaluations;
        None where it does not.

        Before training R@10 is taken to be 0: that point matters only to a run that passes the
        target before its first evaluation.
        """
        before_s, before = 0.0, 0.0
        for seconds, evaluation in zip(self.seconds_at(), self.evaluations):
            after = evaluation.mean_r10
            if after >= target:
                return before_s + (seconds - before_s) * (target - before) / (after - before)
            before_s, before = seconds, after
        return None


def save_record(file: Path, record: Record) -> None:
    """The file appears whole, or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
    partial.replace(file)


def load_record(file: Path) -> Record:
    read = json.loads(file.read_text(encoding="utf-8"))
    return Record(
        **{**read, "evaluations": [Evaluation(**evaluation) for evaluation in read["evaluations"]]}
    )


def read_open_clip(folder: Path, batch_size: int, peak_bytes: Sequence[int]) -> Record:
    """The record of a run of OpenCLIP's trainer. Its loss is the first rank's mean over that rank's
    share of the batch."""
    found = STEP_LINE.findall((folder / "out.log").read_text(encoding="utf-8"))
    if not found:
        raise ValueError(
            f"{folder / 'out.log'}: no line of a training step is as OpenCLIP 3.3 writes it; this "
            "version may write another"
        )
    data_wait_s, samples_per_s, losses = (
        [float(value) for value in column] for column in zip(*found)
    )
    results = folder / "checkpoints" / "results.jsonl"
    evaluations = (
        [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        if results.is_file()
        else []
    )
    epochs = max((evaluation["epoch"] for evaluation in evaluations), default=1)
    return Record(
        losses,
        [
            batch_size / rate for rate in samples_per_s
        ],  # six digits, where the seconds beside it are rounded to a thousandth
        data_wait_s,
        list(peak_bytes),
        [
            Evaluation(evaluation["epoch"] * len(losses) // epochs, _recalls(evaluation))
            for evaluation in evaluations
        ],
    )


def read_own(folder: Path, peak_bytes: Sequence[int]) -> Record:
    """The record of a run of train.py. Its evaluation before the first step is left out: OpenCLIP
    has none.

    Raises ValueError for a run that is not done. DeepSpeed's launcher ends with status 0 even where
    a signal ended it.
    """
    if not (folder / "done").is_file():
        raise ValueError(
            f"{folder}: the run ended before all of its steps were done; start the same command "
            "again"
        )
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = [line for line in lines if "loss" in line]
    return Record(
        [line["loss"] for line in steps],
        [line["step_s"] for line in steps],
        [
            max(value for key, value in line.items() if key.startswith("data_wait_s/"))
            for line in steps
        ],
        list(peak_bytes),
        [
            Evaluation(line["step"], _recalls(line))
            for line in lines
            if "held_out" in line and line["step"] > 0
        ],
    )


def _recalls(values: Mapping[str, float]) -> dict[str, float]:
    return {
        name: values[name]
        for direction in DIRECTIONS
        for k in RECALL_AT
        if (name := f"{direction}_R@{k}") in values
    }


# -- tables

Records = Mapping[str, Sequence[Record]]  # of each variant, a record per seed


def by_step(records: Records) -> str:
    """Markdown: the loss of a step, and retrieval after it. Variants stand below one another for
    each number of steps."""
    recalls = {
        f"{direction}_R@{k}": f"R@{k} {words} %"
        for k in RECALL_AT
        for direction, words in DIRECTIONS.items()
    }
    rows = [
        f"| steps | variant | loss | {' | '.join(recalls.values())} |",
        "|---|---|---|" + "---|" * len(recalls),
    ]
    for step in sorted(
        {
            evaluation.step
            for runs in records.values()
            for run in runs
            for evaluation in run.evaluations
        }
    ):
        for name, runs in records.items():
            found = [
                evaluation
                for run in runs
                for evaluation in run.evaluations
                if evaluation.step == step
            ]
            if len(found) == len(runs):
                cells = [spread([run.losses[step - 1] for run in runs], ".2f")]
                cells += [
                    spread([100 * evaluation.recalls[key] for evaluation in found], ".1f")
                    for key in recalls
                ]
                rows.append(f"| {step} | {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def by_second(records: Records, batch_size: int) -> str:
    """Markdown: how long training takes to the target, also as a ratio to the first variant's seed
    by seed, how fast it is, what it waits for, and how much memory each rank takes."""
    (first, base), *_ = records.items()
    ranks = len(base[0].peak_bytes)
    reference = [run.seconds_to(TARGET) for run in base]
    columns = [
        f"seconds to R@10 {TARGET:.0%}",
        f"÷ {first}",
        "samples/s",
        "waiting for data, s a step",
        *(f"peak MiB, rank {rank}" for rank in range(ranks)),
    ]
    rows = [f"| variant | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name, runs in records.items():
        seconds = [run.seconds_to(TARGET) for run in runs]
        ratios = [own / other for own, other in zip(seconds, reference) if own and other]
        cells = [
            _seconds_cell(seconds),
            spread(ratios, ".2f") if ratios else "–",
            spread([run.samples_per_s(batch_size) for run in runs], ".1f"),
            *_common_cells(runs, ranks),
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def speed(records: Records, batch_size: int, skip: int) -> str:
    """Markdown: samples/s of all steps but the first `skip`, and its ratio to the first variant's,
    round by round."""
    (first, base), *_ = records.items()
    ranks = len(base[0].peak_bytes)
    columns = [
        "samples/s",
        f"÷ {first}",
        "waiting for data, s a step",
        *(f"peak MiB, rank {rank}" for rank in range(ranks)),
    ]
    rows = [f"| variant | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    reference = [run.samples_per_s(batch_size, skip) for run in base]
    for name, runs in records.items():
        rates = [run.samples_per_s(batch_size, skip) for run in runs]
        ratios = [own / other for own, other in zip(rates, reference)]
        median = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} – {max(ratios):.2f})"
        cells = [spread(rates, ".1f"), median, *_common_cells(runs, ranks)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _seconds_cell(seconds: Sequence[float | None]) -> str:
    reached = [value for value in seconds if value is not None]
    if not reached:
        return "not reached"
    return spread(reached, ".0f") + (
        f", in {len(reached)} of {len(seconds)} runs" if len(reached) < len(seconds) else ""
    )


def _common_cells(runs: Sequence[Record], ranks: int) -> list[str]:
    waiting = spread([statistics.mean(run.data_wait_s) for run in runs], ".2f")
    return [
        waiting,
        *(spread([run.peak_bytes[rank] / 2**20 for run in runs], ",.0f") for rank in range(ranks)),
    ]


# -- the plot


def draw(records: Records, title: str, path: Path) -> None:
    """R@10 (mean of both directions) by step and by second of training: a line per variant, a band
    from the least seed to the most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for i, (name, runs) in enumerate(records.items()):
        recalls = [[100 * evaluation.mean_r10 for evaluation in run.evaluations] for run in runs]
        steps = [evaluation.step for evaluation in runs[0].evaluations]
        seconds = _across([run.seconds_at() for run in runs], statistics.mean)
        for axes, places in ((left, steps), (right, seconds)):
            axes.plot(
                places,
                _across(recalls, statistics.mean),
                "o-",
                color=f"C{i}",
                markersize=3,
                label=name,
            )
            axes.fill_between(
                places,
                _across(recalls, min),
                _across(recalls, max),
                color=f"C{i}",
                alpha=0.15,
                linewidth=0,
            )
    for axes, label in ((left, "steps"), (right, "seconds of training, mean of the seeds")):
        axes.axhline(100 * TARGET, color="0.7", linewidth=0.8, zorder=0)
        axes.set(xlabel=label, xlim=(0, None), ylim=(0, 100))
    left.set(ylabel="R@10 of the held-out samples, %")
    left.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _across(runs: Sequence[Sequence[float]], of: Callable[[Iterable[float]], float]) -> list[float]:
    """`of` the runs' values, place by place."""
    return [of(values) for values in zip(*runs)]
