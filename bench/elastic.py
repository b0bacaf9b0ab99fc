"""Hosts that come and go: what does a run lose, and how long does it stand still?

    python bench/elastic.py                      30 times, as root; needs iproute2, sshd and pdsh
    python bench/elastic.py --kills 5            as often as there is time for

`supervise.sh --elastic` on a host of its own keeps train.py going on three others, network
namespaces of this machine with a rank each. At a moment drawn by chance a host drawn by chance has
its rank killed, or all its processes, sshd among them, or its cable is pulled. When one host is
left, and else sometimes, all come back and SIGUSR2 lets the run grow. Checked: a failure costs the
steps since the newest checkpoint, at most one interval, or two where that one was still being
written; each loss that was ever logged is within 1e-5 of that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from nodes import SSHD, Node, lacking, nodes, plug, reached_by_ssh

from bench.runs import call, read_metrics, settings, table, train_arguments, train_command
from engine.processes.start import free_port

OUT = ROOT / "bench" / "out" / "elastic"
RANK, HOST, CABLE = "rank killed", "host killed", "cable pulled"
SHARES = {RANK: 3, HOST: 5, CABLE: 2}
HOSTS, LIMIT_S, TOLERANCE = 3, 300, 1e-5
# nothing that depends on how a batch is divided: no batch normalisation, no dropout
BASE = settings(
    "deepspeed_config=ds_configs/cpu_fp32.json data=demo workers=0 trace_every=0 wandb=disabled",
    "eval_every=1000000 embed_dim=128 image_size=32",
    "image_tower=vit_b_32:patch_size=8,num_layers=2,hidden_dim=128,num_heads=4,mlp_dim=512",
    "text_tower=bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0",
)
PARTS = ("noticed", "all have ended", "counted, started", "ranks have met", "opened", "first step")


class Fleet:
    """Hosts that come and go, the last of which is the supervisor's and stays; a run over them."""

    def __init__(self, made: Sequence[Node], given: Mapping[str, Any]):
        self.made, self.folder, self.lost, self.servers = made, OUT / "run", {}, []
        self.lines, self.losses = [], defaultdict(set)
        hosts, deepspeed = OUT / "hostfile", Path(sys.executable).parent / "deepspeed"
        hosts.write_text("".join(f"{node.address} slots=1\n" for node in made[:HOSTS]))
        words = (
            f"bash launch/supervise.sh --elastic 1 --restarts 9 -- {deepspeed} --hostfile {hosts}"
        )
        words = f"{words} --master_port {free_port()} train.py --run-dir {self.folder}".split()
        self.process = subprocess.Popen(
            made[HOSTS].command(*words, *train_arguments(given)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with (OUT / "log").open("w") as log:
            for line in self.process.stdout:
                self.lines.append((time.time(), line))
                print(f"{time.time():.2f} {line}", end="", file=log, flush=True)

    # -- the run

    def said(self, words: str, after_s: float) -> float | None:
        return next((at for at, line in self.lines if at > after_s and words in line), None)

    def written(self, name: str, after_s: float) -> float | None:
        """When a file of the run's folder was, if that is later."""
        with suppress(FileNotFoundError):
            at = (self.folder / name).stat().st_mtime
            return at if at > after_s else None

    def step(self) -> int:
        """The newest; keeps the losses of all."""
        file, step = self.folder / "metrics.jsonl", 0
        for line in file.read_text().splitlines() if file.is_file() else ():
            if '"loss"' in line and line.endswith("}"):
                step = json.loads(line)["step"]
                self.losses[step].add(json.loads(line)["loss"])
        return step

    def until(self, found: Callable[..., Any], *given: Any) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (value := found(*given)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run has ended, or nothing came for {LIMIT_S} s; see {OUT / 'log'}")
            time.sleep(0.02)
        return value

    def until_it_trains(self, act: Callable[..., Any], *given: Any) -> tuple[int, list[float]]:
        """Act, and wait for the next start: how many steps are lost, and the seconds of PARTS, with
        their sum."""
        acted = time.time()
        act(*given)
        starts = self.until(self.said, "supervise.sh: starts", acted)
        latest = self.folder / "checkpoints" / "latest"
        saved = int(latest.read_text().rpartition("-")[2]) if latest.is_file() else 0
        lost = self.step() - saved
        ended = self.said("supervise.sh: the run", acted) or starts
        noticed = min(self.said("error: ", acted) or ended, ended)
        met = self.until(self.written, "lock", starts)
        opened = self.until(self.written, "config.json", met)
        trained = self.until(self.written, "metrics.jsonl", opened)
        times = [acted, noticed, ended, starts, met, opened, trained]
        return lost, [*(end - begin for begin, end in pairwise(times)), trained - acted]

    # -- the hosts

    def disturb(self, number: int, how: str) -> None:
        if how != RANK:
            self.lost[number] = how
        if how == CABLE:
            plug(self.made, number, connected=False)
        else:
            self.end(number, "train.py --local_rank" if how == RANK else "")

    def end(self, number: int, words: str = "") -> None:
        """All processes of a host whose command has these words."""
        listed = ["ip", "netns", "pids", self.made[number].name]
        for pid in subprocess.run(listed, capture_output=True, text=True).stdout.split():
            with suppress(OSError):
                if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    os.kill(int(pid), signal.SIGKILL)

    def restore(self) -> None:
        for number, how in self.lost.items():
            if how == CABLE:
                plug(self.made, number, connected=True)
            else:
                words = [SSHD, "-D", "-f", str(OUT / "ssh" / "sshd_config")]
                self.servers.append(subprocess.Popen(self.made[number].command(*words)))
        self.lost = {}
        time.sleep(2)  # the bridge learns, sshd listens


def disturbed(arguments: argparse.Namespace, given: Mapping[str, Any]) -> Fleet:
    """The run that loses hosts. Prints how long it stood still, and what was lost."""
    chance = random.Random(arguments.seed)
    (OUT / "ssh").mkdir()
    seconds, lost = defaultdict(list), []
    with nodes(HOSTS + 1) as made, reached_by_ssh(made, OUT / "ssh") as wrapped:
        os.environ["PATH"] = f"{wrapped}:{os.environ['PATH']}"
        fleet = Fleet(made, given)
        try:
            fleet.until(fleet.step)
            while len(lost) < arguments.kills:
                time.sleep(chance.uniform(0, 4))
                here = [number for number in range(HOSTS) if number not in fleet.lost]
                number, (how,) = chance.choice(here), chance.choices(list(SHARES), SHARES.values())
                steps, parts = fleet.until_it_trains(fleet.disturb, number, how)
                lost.append(steps)
                seconds[how].append(parts)
                print(f"{how}, of {len(here)}: {steps} steps lost, {parts[-1]:.1f} s", flush=True)
                if len(fleet.lost) == HOSTS - 1 or chance.random() < 0.3:
                    fleet.restore()
                    grow = fleet.process.send_signal, signal.SIGUSR2
                    seconds["grown"].append(fleet.until_it_trains(*grow)[1])
            fleet.process.wait(timeout=LIMIT_S * 4)
            fleet.step()
        finally:
            for number in range(HOSTS + 1):
                fleet.end(number)
            for process in (fleet.process, *fleet.servers):
                process.wait()
    rows = [[how, len(all_), *map(figures, zip(*all_))] for how, all_ in seconds.items()]
    print(table(["seconds, median (least – most)", "times", *PARTS, "together"], rows))
    print(f"steps lost: {figures(lost)}; a checkpoint every {arguments.save_every}")
    if max(lost) > 2 * arguments.save_every:
        sys.exit("more was lost than two intervals")
    return fleet


def figures(values: Sequence[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} – {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30, help="how often a host is lost")
    for name, value in {"steps": 600, "save-every": 5, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    if reason := lacking("ssh", "ssh-keygen", "sshd", "pdsh"):
        sys.exit(f"bench/elastic.py {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are removed
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    passed_on = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    (OUT / "env").write_text("".join(f"{k}={v}\n" for k, v in passed_on.items()))
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_ENV_FILE": str(OUT / "env")}
    given = settings(BASE, {"steps": arguments.steps, "save_every": arguments.save_every})
    fleet = disturbed(arguments, given)
    still = {**given, "run_dir": OUT / "still"}
    call(train_command(HOSTS, still), OUT / "still.log", "the undisturbed run")
    expected = {line["step"]: line["loss"] for line in read_metrics(OUT / "still")[0]}
    apart = {
        step: max(abs(loss - expected[step]) / expected[step] for loss in losses)
        for step, losses in fleet.losses.items()
    }
    worst = max(apart, key=apart.get)
    print(f"{len(apart)} steps; furthest from the undisturbed: {apart[worst]:.1e} at step {worst}")
    sys.exit("the losses differ" if apart[worst] > TOLERANCE else 0)


if __name__ == "__main__":
    main()
