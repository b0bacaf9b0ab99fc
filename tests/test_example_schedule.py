"""`examples/schedule.py`, registered by --import-module: everything that asks about a schedule
takes it.

That its gradients are right is in tests/engine/test_parity.py.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace

import pytest
from cost_models import BRANCHES, proportional
from launched import SMALL, fork_flags, metrics, run_to_end, words, write_pairs

from data import modules
from data.modules import import_modules
from engine.config.reading import check_config
from engine.planning.costs import configured, cost_model_to_json
from engine.planning.planner import plan_run, search_plans
from engine.processes.out_of_memory import TRAINING, RankSetup, Work, not_in_use
from engine.schedule import SCHEDULES
from launch.config.options import parse_options
from launch.reporting.timelines import prediction
from launch.tools.plan import parse_options as parse_plan_options
from launch.tools.plan import run as run_plan

NAME, MODULE = "one_by_one", "examples.schedule"
CONFIG = {"train_batch_size": 48, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
COSTS = proportional({"image": [3.0] * 4, "text": [1.0] * 4})
LINE = {"layout": "merged", "stages": {"merged": 4}, "micro_batch_size": 4}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is gone behind it."""
    before = dict(SCHEDULES)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield SCHEDULES
    SCHEDULES.clear()
    SCHEDULES.update(before)


@pytest.fixture
def registered(registry):
    import_modules([MODULE])
    return registry[NAME]


def plan_of(branches, world_size=4):
    config, block = check_config(CONFIG | {"branches": branches}, BRANCHES)
    return config, plan_run(
        config,
        block,
        world_size,
        replace(COSTS, **configured(config)),
    )


def test_without_the_module_the_name_is_refused():
    with pytest.raises(ValueError, match="branches.schedule: .*'one_by_one'.*batch_sync"):
        check_config(CONFIG | {"branches": {"schedule": NAME}}, BRANCHES)


def test_the_planner_and_the_simulator_take_it(registered):
    plans = {name: plan_of(LINE | {"schedule": name})[1] for name in ("batch_sync", "replay", NAME)}
    batch_sync, replay, own = (
        [stage.activation_bytes for stage in plan.predicted] for plan in plans.values()
    )
    # one micro-batch, one for each stage behind it too, all 12
    assert own[-1] == replay[-1] and own[0] < replay[0] < batch_sync[0]
    assert f", {NAME}, micro-batches 4×12" in plans[NAME].describe()
    kept = plan_of(LINE | {"schedule": NAME, "kept_micro_batches": 5})[1]
    assert f"{NAME} keeping 5" in kept.describe() and kept.predicted[0].activation_bytes > own[0]


def test_auto_chooses_only_what_says_that_it_may(registered):
    def found():
        ways = search_plans(*check_config(CONFIG | {"branches": LINE}, BRANCHES), 4, COSTS).ranked
        return {way.schedule for way in ways}

    assert found() == {"batch_sync", "replay"}
    registered.chosen_by_auto = True
    assert found() == {"batch_sync", "replay", NAME}


def test_the_advice_about_memory_is_about_its_own_keys(registered):
    config, plan = plan_of(LINE | {"schedule": NAME, "kept_micro_batches": 8})
    setup = RankSetup(plan, config, plan.graph.stages[0], True)
    (first, *_) = not_in_use(setup, Work(TRAINING, "ForwardPass"))
    assert first == 'fewer "kept_micro_batches" than 8'


def test_losses_that_are_not_as_the_class_says_are_refused(registry):
    """Otherwise a loss per micro-batch would pass for the loss over the global batch."""

    class Unsaid(registry["per_micro_batch"]):
        loss_per_micro_batch = False

    class Untrue(registry["batch_sync"]):
        loss_per_micro_batch = True

    for name, own in (("unsaid", Unsaid), ("untrue", Untrue)):
        registry[name] = own
        with pytest.raises(
            ValueError, match=f"{own.__name__}: its ComputeLoss has (a|no) buffer_id"
        ):
            plan_of(LINE | {"schedule": name})


def test_the_flag_is_repeatable_and_recorded():
    options = parse_options(["--import-module", f"{MODULE},json", "--import-module", "math"])
    assert options.import_module == (MODULE, "json", "math") and options.record()[
        "import_module"
    ] == [MODULE, "json", "math"]
    assert parse_options([]).import_module is None


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(tmp_path, monkeypatch):
    path = [*sys.path]
    for number, (source, said) in enumerate(
        (
            (None, ["there is no module 'mine'", "start in the folder that holds it"]),
            ("import nowhere_to_be_found", ["No module named 'nowhere_to_be_found' (line 1 of"]),
            ("\nSCHEDULES['mine'] = 1", ["NameError: name 'SCHEDULES'", "(line 2 of", "mend the"]),
            ("class:", ["SyntaxError", "mine.py, line 1"]),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*path])
        if source is not None:
            (folder / "mine.py").write_text(source)
        with pytest.raises(ValueError) as refused:
            import_modules(["mine"])
        assert str(refused.value).startswith("--import-module mine: ")
        assert all(word in str(refused.value) for word in said), source


def test_what_is_no_module_name_is_refused_by_the_command_line(capsys):
    for given in ("examples/schedule.py", "a,,b", ""):
        for parse, others in ((parse_options, []), (parse_plan_options, ["--gpus", "2"])):
            with pytest.raises(SystemExit):
                parse([*others, "--import-module", given])
            assert f"{given!r} is not a list of module names" in capsys.readouterr().err


def test_the_plan_tool_takes_it(capsys):
    towers = words("--image-tower resnet18:layers=1-1-1-1 --text-tower bert-mini")
    towers += words("--image-size 64 --max-text-tokens 32")
    own = ["--import-module", MODULE, "--schedule", NAME]
    assert (
        run_plan(["--gpus", "2", "--layout", "merged", *own, *towers]) == 0
        and f", {NAME}, " in capsys.readouterr().out
    )
    assert run_plan(["--gpus", "2", "--import-module", "nowhere"]) == 2
    assert "error: --import-module nowhere: there is no module 'nowhere'" in capsys.readouterr().err


def test_the_timeline_of_a_run_predicts_it_where_the_module_is_found(
    registered, registry, tmp_path, monkeypatch
):
    _, plan = plan_of(LINE | {"schedule": NAME})
    del registry[NAME]
    monkeypatch.delitem(sys.modules, MODULE)
    (tmp_path / "costs.json").write_text(
        json.dumps(cost_model_to_json(plan.costs), allow_nan=False)
    )
    record = {
        "schedule": NAME,
        "stage_graph": plan.graph.record(),
        "trainable": plan.trainable,
        "batches": {branch: asdict(batch) for branch, batch in plan.batches.items()},
        "options": {"import_module": [MODULE]},
    }
    monkeypatch.setattr(modules, "_named", set())
    predicted, reason = prediction(tmp_path, record)
    assert predicted is None and "--trust-run" in reason
    modules.import_named(argparse.Namespace(import_module=None, trust_run=True))
    predicted, reason = prediction(tmp_path, record)
    assert NAME in predicted.how and reason is None
    predicted, reason = prediction(
        tmp_path, record | {"options": {"import_module": ["examples.nowhere"]}}
    )
    assert (
        predicted is None
        and "nothing is predicted: --import-module examples.nowhere: there is no module" in reason
    )


def test_train_py_trains_with_it_and_one_rank_refuses_a_module_that_is_not_there(tmp_path):
    length = words("--val-fraction 0.25 --max-text-tokens 16 --workers 0 --steps 2")
    pairs = ["--data", write_pairs(tmp_path / "pairs", 96), *length]
    file = fork_flags(tmp_path)[1]
    config = json.loads(file.read_text())
    config["branches"] |= {"schedule": NAME, "micro_batch_size": 8}
    file.write_text(json.dumps(config))
    arguments = [*SMALL, *pairs, "--deepspeed_config", file, "--run-dir", tmp_path / "run"]
    status, output = run_to_end("train.py", *arguments, "--import-module", MODULE, ranks=2)
    assert status == 0 and f", {NAME}, micro-batches 8×3" in output, output[-3000:]
    assert set(metrics(tmp_path / "run")) == {1, 2}
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["schedule"] == NAME and record["options"]["import_module"] == [MODULE]
    status, output = run_to_end(
        "train.py", *arguments, "--import-module", "examples.nowhere", ranks=2
    )
    assert status == 2 and output.count("train.py: error:") == 1 and "Traceback" not in output, (
        output[-3000:]
    )
    assert "--import-module examples.nowhere: there is no module 'examples.nowhere'" in output
