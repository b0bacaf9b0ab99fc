"""DeepSpeed's monitor blocks before a run begins, and a monitor that fails in it."""

import pytest
from deepspeed.monitor.config import DeepSpeedMonitorConfig

from launch.config import configuration
from launch.config.configuration import MONITORS, split_monitors
from launch.config.groups import TrackingOptions
from launch.tracking.backend import Backend
from launch.tracking.tracker import Tracker

CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}


def test_deepspeeds_engine_gets_no_block_of_a_monitor():
    blocks = {name: {"enabled": False} for name in MONITORS}
    blocks["csv_monitor"] = {"enabled": True, "output_path": "logs", "job_name": "birds"}
    config, read = split_monitors({**CONFIG, **blocks})
    assert config == CONFIG and read.enabled
    assert (read.csv_monitor.output_path, read.csv_monitor.job_name) == ("logs", "birds")
    assert not split_monitors(CONFIG)[1].enabled


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(configuration, "find_spec", lambda name: None)
    for block, command in (("tensorboard", "pip install ten"), ("comet", 'pip install "comet')):
        with pytest.raises(ValueError, match=f"^{block}.enabled: .*{command}"):
            split_monitors({**CONFIG, block: {"enabled": True}})
        split_monitors({**CONFIG, block: {"enabled": False}})


def test_a_monitor_that_fails_ends_alone(tmp_path, caplog):
    class Full(Backend):
        def log(self, values, step, samples):
            raise OSError("no space left on device")

    class Kept(Backend):
        def __init__(self):
            self.lines = []

        def log(self, values, step, samples):
            self.lines.append((values, step))

    tracker = Tracker(
        TrackingOptions(wandb="disabled"), DeepSpeedMonitorConfig(), tmp_path, {}, 0, plan=None
    )
    assert tracker.backends == {}
    tracker.backends |= {"W&B": Full(), "CSV": (kept := Kept())}
    for step in (1, 2):
        tracker.evaluation(step, "validation", {"alignment": 0.5})
    assert [step for _, step in kept.lines] == [1, 2] and tracker.backends == {"CSV": kept}
    assert [record.getMessage() for record in caplog.records] == [
        "W&B failed (OSError: no space left on device): its tracking ends, metrics.jsonl goes on"
    ]
