"""launch.tools.plan: the table shows what the planner found; every mistake is one line and status
2."""

import json
from dataclasses import replace

import pytest
from cost_models import proportional

from common.sizes import GIB
from engine.config.reading import BranchesBlock
from engine.planning.costs import FurtherRows
from engine.planning.planner import search_plans
from launch.tools.plan import (
    cells,
    configuration,
    cost_model,
    main,
    make_parser,
    parse_options,
    plan_table,
    run,
)

TOWERS = "--image-tower resnet18:layers=1-1-1-1 --text-tower bert-mini".split()
TOWERS += "--image-size 64 --max-text-tokens 32".split()
COSTS = proportional(
    {"image": [0.004] * 4, "text": [0.002] * 3}, optimizer_s_per_parameter=1e-9, instruction_s=1e-4
)


def table_rows(search, batch_size: int, top: int) -> list[list[str]]:
    rows = plan_table(search, batch_size, top).rows
    return [" ".join(row).split() for row in rows]


@pytest.fixture(scope="module")
def search():
    return search_plans({"train_batch_size": 64}, BranchesBlock(), 8, COSTS)


def test_rows_are_the_fastest_and_the_choice_is_the_planners(search):
    """A choice beyond the top comes last."""
    rows = table_rows(search, 64, 5)
    assert [row[0] for row in rows[:5]] == ["1", "2", "3", "4", "5"]
    (chosen,) = [row for row in rows if row[1] == "→"]
    assert search.ranked[int(chosen[0]) - 1] is search.best
    assert " ".join(chosen[2:]) == " ".join(cells(search.best, 64))
    others = [candidate for candidate in search.ranked if candidate is not search.best]
    beyond = replace(search, ranked=(*others[:3], search.best, *others[3:]))
    assert beyond.best is search.best
    rows = table_rows(beyond, 64, 1)
    assert [row[0] for row in rows] == ["1", "4"] and rows[1][1] == "→"


def test_from_towers_to_table_and_on_request_a_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = parse_options(["--gpus", "4", *TOWERS])
    main(options)
    out = capsys.readouterr().out
    config, block = configuration(options)
    best = search_plans(config, block, 4, cost_model(options, config)).best
    (chosen,) = [line for line in out.splitlines() if "→ " in line and "choice" not in line]
    assert chosen.split()[2:] == " ".join(cells(best, 4096)).split()
    assert f"auto: {best.describe()}" in out and "--picture FILE" in out.splitlines()[-1]
    assert not list(tmp_path.iterdir())
    main(parse_options(["--gpus", "2", "--picture", "plan.html", *TOWERS]))
    assert capsys.readouterr().out.splitlines()[-1] == "plan.html"
    assert (tmp_path / "plan.html").stat().st_size > 10_000


def planned(words: str, *more: str):
    return parse_options(["--gpus", *words.split(), *more])


def test_what_is_planned_without_a_file():
    config, block = configuration(planned("4"))
    assert block == BranchesBlock() and config["bf16"] == {"enabled": True}
    assert config["train_batch_size"] == 4096
    assert configuration(planned("1024"))[0]["train_batch_size"] == 32768
    assert "bf16" not in configuration(planned("4 --precision fp32"))[0]


def test_flags_replace_what_the_file_says(tmp_path):
    file = tmp_path / "own.json"
    branches = {
        "layout": "fork",
        "stages": {"image": 2, "text": 1},
        "replicas": {"image": 1, "text": 2},
        "schedule": "replay",
    }
    config = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    file.write_text(json.dumps({**config, "branches": branches}))
    given = ("--deepspeed_config", str(file))
    config, block = configuration(planned("4", *given))
    assert config["train_batch_size"] == 64 and block == BranchesBlock(**branches)
    flags = "--train-batch-size 128 --micro-batch-size 8 --layout merged"
    options = planned(f"4 {flags} --activation-checkpoint-interval 2", *given)
    config, block = configuration(options)
    assert block == BranchesBlock(layout="merged", micro_batch_size=8, schedule="replay")
    assert config["train_batch_size"] == 128 and "gradient_accumulation_steps" not in config
    assert config["pipeline"] == {"activation_checkpoint_interval": 2}


def test_the_hardware_is_as_asked():
    words = "4 --gpus-per-node 2 --memory 3.5 --activation-checkpoint-interval 1"
    options = planned(words, *TOWERS)
    config, _ = configuration(options)
    costs = cost_model(options, config)
    assert (costs.machine.ranks_per_node, costs.machine.memory_bytes) == (2, 3.5 * GIB)
    assert costs.checkpoint_interval == 1 and costs.sharded_optimizer and costs.embed_dim == 512
    assert all(costs.layers[branch] for branch in ("image", "text"))
    numbers = "flops=1e13,memory=1e10,bandwidth=1e12,ranks_per_node=4"
    machine = cost_model(planned(f"4 --device {numbers}", *TOWERS), config).machine
    assert (machine.memory_bytes, machine.ranks_per_node) == (1e10, 4)


def test_clips_take_as_much_memory_as_images_times_their_frames():
    ratio = {}
    for frames in (4, 8):
        tower = f"--video-tower resnet18:layers=1-1-1-1 --video-frames {frames}"
        options = planned(f"2 --pairs image:text,video:text {tower}", *TOWERS)
        costs = cost_model(options, configuration(options)[0])
        of = {
            branch: sum(layer.activation_bytes.at(64) for layer in layers)
            for branch, layers in costs.layers.items()
        }
        ratio[frames] = of["video"] / of["image"]
    assert ratio == pytest.approx({4: 4, 8: 8}, rel=0.05)


def test_regions_take_memory():
    peaks = {}
    for pairs in ("image:text", "image:text,region:text --max-regions 50"):
        options = planned(f"2 --pairs {pairs} --layout merged", *TOWERS)
        config, block = configuration(options)
        costs = cost_model(options, config)
        best = search_plans(config, block, 2, costs).best
        peaks[pairs] = best.peak_bytes, costs.further
    (without, none), (regions, further) = peaks.values()
    assert none == () and further == (FurtherRows("image", "text", (50, 50)),)
    rows = options.train_batch_size or config["train_batch_size"]
    assert regions - without > 2 * 50 * rows * options.embed_dim * 4


def test_muon_takes_one_moment_less_of_each_matrix():
    """Shared by the replicas, as all of the optimizer's state under ZeRO-1."""
    options = planned("2 --layout merged --micro-batch-size 32", *TOWERS)
    config, block = configuration(options)
    block = replace(block, schedule="batch_sync", stages={"merged": 1}, replicas=2)
    found = {}
    for kind in ("AdamW", "Muon"):
        config["optimizer"] = {"type": kind, "params": {"lr": 1e-3}}
        costs = cost_model(options, config)
        matrices = {
            branch: sum(layer.num_muon for layer in layers)
            for branch, layers in costs.layers.items()
        }
        found[kind] = matrices, search_plans(config, block, 2, costs).best.peak_bytes
    (none, adam), (matrices, muon) = found.values()
    assert none == {"image": 0, "text": 0}
    width = 256  # four matrices of attention in each of 4 blocks, two of four times the size
    assert matrices == {"image": 0, "text": 4 * (4 + 2 * 4) * width**2}
    assert adam - muon == pytest.approx(4 * matrices["text"] / 2)


def test_a_mistake_is_one_line(capsys):
    for arguments, message in (
        ("", "the following arguments are required: --gpus"),
        ("--gpus 0", "--gpus: 0 is below 1"),
        ("--gpus many", "--gpus: invalid whole number value: 'many'"),
        ("--gpus 8 --device H10", "--device: device 'H10' is not known; did you mean 'H100'?"),
        ("--gpus 8 --schedule batchsync", "'batchsync' (choose from batch_sync, replay,"),
        ("--gpus 8 --picture plan.png", "give a name that ends in .html"),
        ("--gpus 8 --picture nowhere/plan.html", "there is no folder 'nowhere'"),
        ("--gpus 8 --precision fp16 --deepspeed_config a.json", "--precision: a.json says it;"),
    ):
        with pytest.raises(SystemExit) as exit:
            parse_options(arguments.split())
        out, err = capsys.readouterr()
        assert exit.value.code == 2 and out == "" and err.count("\n") == 1, arguments
        assert message in err, arguments


def test_what_cannot_be_planned_is_one_line_on_stderr_and_status_2(capsys):
    for arguments, message in (
        ("--memory 0.01", "nothing fits 2 ranks of 10.2 MiB (H100"),
        ("--train-batch-size 7 --micro-batch-size 2", "micro_batch_size 2"),
        ("--deepspeed_config missing.json", "missing.json: no such file"),
        ("--text-tower bert-huge", "text tower 'bert-huge' is not known; did you mean"),
        ("--image-tower resnet19", "'resnet19' is not known; did you mean"),
        ("--layout ring", "branches.layout: unknown value 'ring'; valid keys: auto, fork, merged"),
        ("--layout chain", '"chain" is no longer there, because '),
    ):
        assert run(["--gpus", "2", *TOWERS, *arguments.split()]) == 2, arguments
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, arguments
        assert err.startswith("python -m launch.tools.plan: error: ") and message in err, arguments


def test_help_says_units_and_defaults():
    for action in make_parser()._actions:
        if action.dest not in ("help", "gpus"):
            assert "default" in action.help, action.dest
