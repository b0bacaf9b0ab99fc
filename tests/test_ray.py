"""train.py on a Ray cluster: two nodes on this machine."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from launched import ROOT, SMALL, command, finish, metrics, run_to_end, wait_for, write_pairs
from listeners import listening

pytest.importorskip("ray", reason="needs ray: pip install -r requirements-ray.txt")
from ray.cluster_utils import Cluster

STEPS = 18
VIT = "vit_b_32:patch_size=16,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0"
BERT = "bert-tiny:hidden_dropout_prob=0,attention_probs_dropout_prob=0"


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    made.shutdown()


@pytest.mark.all("starts Ray")
def test_a_cluster_of_ones_own_listens_everywhere(tmp_path, monkeypatch):
    """As SECURITY.md warns. Without --address the job makes one for itself."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = [sys.executable, "-m", "launch.tools.ray_job", "--num-workers", "1", "--", *SMALL]
    job += ["--data", write_pairs(tmp_path / "pairs", 48), "--max-text-tokens", 16, "--workers", 0]
    job += ["--set", "train_batch_size=24", "--steps", 1, "--run-dir", tmp_path / "run"]
    run, places = command(lambda port: job), set()
    while run.poll() is None:
        places |= listening(run)
        time.sleep(0.1)
    status, output = finish(run)
    assert status == 0, output[-5000:]
    assert {"::", "0.0.0.0"} & {place.ip for place in places}


@pytest.mark.all("starts Ray")
def test_a_rank_that_dies_then_fewer_ranks(cluster, tmp_path):
    """All ranks end with the one that died, and go on from the newest checkpoint. The job saves and
    ends when it is asked to, and another one goes on with fewer: the losses are those of a run that
    nothing happened to."""
    config = json.loads((ROOT / "ds_configs" / "cpu_fp32.json").read_text())
    config["train_batch_size"] = 24
    config["branches"] |= {"layout": "merged", "stages": 1, "schedule": "batch_sync"}
    (tmp_path / "merged.json").write_text(json.dumps(config))
    arguments = ["--image-tower", f"{VIT},attention_dropout=0", "--image-size", 32]
    arguments += ["--text-tower", BERT, "--embed-dim", 32, "--max-text-tokens", 16, "--workers", 0]
    arguments += ["--deepspeed_config", tmp_path / "merged.json", "--steps", STEPS]
    arguments += ["--save-every", 3, "--data", write_pairs(tmp_path / "pairs", 320)]
    cluster.add_node(num_cpus=1)
    run_dir = tmp_path / "ray"

    def start(workers):
        job = [sys.executable, "-m", "launch.tools.ray_job", "--address", cluster.address]
        job += ["--num-workers", workers, "--failures", "1", "--"]
        return command(lambda port: [*job, *arguments, "--run-dir", run_dir])

    def stand_still_after(step):
        """Suspends the second rank, for which the first one waits, and returns both."""
        wait_for(lambda: newest(run_dir) > step, run)
        ranks = ranks_of(run_dir)
        assert sorted(ranks) == ["0", "1"]
        ranks["1"].suspend()
        return ranks

    run = start("1:2")
    ranks = stand_still_after(0)
    ranks["1"].kill()
    assert not psutil.wait_procs(ranks.values(), timeout=60)[1]
    ranks = stand_still_after(newest(run_dir))
    os.kill(run.pid, signal.SIGTERM)
    wait_for((run_dir / "stop").exists, run)
    ranks["1"].resume()
    status, output = finish(run)
    assert status == 75, output[-5000:]
    stopped = newest(run_dir)
    assert 0 < stopped < STEPS
    status, output = finish(start("1"))
    assert status == 0 and f"goes on from step-{stopped:08}" in output, output[-5000:]
    assert not ranks_of(run_dir)

    status, output = run_to_end("train.py", *arguments, "--run-dir", tmp_path / "one", ranks=2)
    assert status == 0, output[-5000:]
    there, here = (
        [line["loss"] for _, line in sorted(metrics(folder).items())]
        for folder in (run_dir, tmp_path / "one")
    )
    assert len(there) == STEPS and there == pytest.approx(here, rel=1e-4)


def newest(run_dir: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    file = run_dir / "checkpoints" / "latest"
    return int(file.read_text().strip().split("-")[1]) if file.exists() else 0


def ranks_of(run_dir: Path) -> dict[str, psutil.Process]:
    """The processes that are train.py of this run, by rank."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and str(ROOT / "train.py") == (words + [""] * 2)[1]:
            found[process.environ()["RANK"]] = process
    return found
