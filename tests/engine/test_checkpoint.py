"""A run that was stopped goes on as if it had not been: on the same topology to the last bit, on
another one to rounding."""

from dataclasses import replace

import pytest
import torch
from checkpoint_cases import as_0_1_0_wrote, train_from, train_on_a_disk_that_fills_up, whole
from ranks import run_cases, run_ranks
from split_training import Case

from engine.backend.protocol import Shard
from engine.checkpoint.engine_state import changes, dealt
from engine.checkpoint.layout import checkpoints_in, verify

# Micro-batches of four everywhere: BatchNorm and dropout see the same, however it is split.
COMMON = {
    "micro_batch_size": 4,
    "towers": "resnet+bert",
    "dropout": 0.1,
    "ema": {"decay": 0.9},
    "optimizer_groups": {"image": {"lr": 5e-4, "layer_decay": 0.7}, "text": {"warmup_steps": 2}},
    "clipping": {
        "image": {"kind": "adaptive", "factor": 1.01, "decay": 0.5, "warmup_steps": 1},
        "text": 1.0,
        "head": 0.1,
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 40, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}
        | {"warmup_type": "linear"},
    },
}
ONE_EACH = {"image": 1, "text": 1}
LOCKED = {"text": {"all_but_last": 1}}
FORK_2_1 = Case("fork", {"image": 2, "text": 1}, ONE_EACH, **COMMON, fusion=2)
FORK_1_1 = Case("fork", ONE_EACH, ONE_EACH, **COMMON, fusion=2, schedule="replay")
LINE_2 = Case("merged", {"merged": 2}, 1, **COMMON, fusion=2)
MERGED_2 = Case("merged", {"merged": 1}, 2, **COMMON, fusion=2)


@pytest.mark.all("more resumed runs")
def test_the_same_topology_goes_on_to_the_last_bit(tmp_path):
    """Parameters, optimizer state, counters, learning rates and the next losses; the checkpoint was
    written while training went on, and by 0.1.0."""
    cases = {
        # with layers that do not learn, which have a file of their own
        "AdamW": replace(MERGED_2, fusion=0, zero_stage=0, schedule="replay", locked=LOCKED),
        "BF16_Optimizer": replace(
            MERGED_2, fusion=0, precision="bf16", towers="vit+clip", locked=LOCKED
        ),
        "DeepSpeedZeroOptimizer": Case("fork", ONE_EACH, {"image": 2, "text": 1}, **COMMON),
    }
    zero_1 = "DeepSpeedZeroOptimizer"
    cases[f"{zero_1}, ZeRO-2"] = replace(cases[zero_1], zero_stage=2)
    cases["fully_shard"] = replace(cases["BF16_Optimizer"], zero_stage=3)
    for names in (["AdamW", "BF16_Optimizer", "fully_shard"], [zero_1, f"{zero_1}, ZeRO-2"]):
        world_size, folders = cases[names[0]].world_size, [tmp_path / name for name in names]
        runs = [(cases[name], 4, None, tmp_path / name, 2) for name in names]
        first = run_cases(world_size, train_from, runs)
        for name, folder in zip(names, folders):
            checkpoint = folder / "step-00000002"
            assert bool([*checkpoint.glob("*.frozen.*")]) == bool(cases[name].locked)
            as_0_1_0_wrote(checkpoint)
            verify(checkpoint)
        runs = [(cases[name], 2, tmp_path / name / "step-00000002") for name in names]
        for name, went_on, resumed in zip(names, first, run_cases(world_size, train_from, runs)):
            for one, other in zip(went_on, resumed):
                assert other["changes"] == [], name
                for before, after in (("saved", "start"), ("end", "end")):
                    assert_same(one[before], other[after])
                for key in ("losses", "lr"):
                    assert other[key] == {step: one[key][step] for step in (3, 4)}, (name, key)
            assert len(set(went_on[0]["lr"].values())) == 4
            assert {result["optimizer"] for result in went_on} == {name.partition(",")[0]}


def assert_same(one, other):
    assert one["scalars"] == other["scalars"] and one["progress"] == other["progress"]
    assert one["tensors"].keys() == other["tensors"].keys()
    for fragment, tensor in one["tensors"].items():
        same = other["tensors"][fragment]
        assert tensor.dtype == same.dtype and torch.equal(tensor, same), fragment.key


def test_any_topology_goes_on_where_another_one_stopped(tmp_path):
    """Steps of a fork of 2 + 1 stages, and the same on four topologies in turn: what is read is
    what was written, bit for bit, and each of the next twelve losses is within 1e-5: the sums are
    taken in another order."""
    reference = run_ranks(3, train_from, FORK_2_1, 14)
    before, step, folder = None, 0, tmp_path
    for case, steps in ((FORK_2_1, 2), (FORK_1_1, 3), (LINE_2, 3), (MERGED_2, 3), (FORK_2_1, 3)):
        source = folder / f"step-{step:08d}" if step else None
        step += steps
        results = run_ranks(case.world_size, train_from, case, steps, source, folder, save_at=step)
        if source:
            read, written = whole([r["start"] for r in results]), whole([r["end"] for r in before])
            moments = ("optimizer.exp_avg", "optimizer.exp_avg_sq")
            assert read.keys() == written.keys()
            assert {kind for kind, _ in read} == {"parameter", "average", "buffer", *moments}
            for key, tensor in written.items():  # nan, which no rank gave, would differ
                assert torch.equal(tensor, read[key]), key
            (change,) = results[0]["changes"]
            assert case.layout in change and "sums are taken in another order" in change
            assert adaptive_limits(results, "start") == adaptive_limits(before, "end") != set()
        for at, loss in results[0]["losses"].items():
            assert loss == pytest.approx(reference[0]["losses"][at], rel=1e-5), (case, at)
            assert results[0]["lr"][at] == reference[0]["lr"][at]
        if step < 11:  # a replica's running means are of its micro-batches
            means = dict(b for result in reference for b in result["buffers"][step].items())
            for name, buffer in (b for result in results for b in result["buffers"][step].items()):
                # what rounding has grown to in up to nine steps
                allowed = 1e-4 * float(means[name].float().norm())
                assert float((buffer - means[name]).float().norm()) <= allowed, name
        before = results
    kept = [f"step-{step:08d}" for step in (14, 11, 8)]
    assert [path.name for path in checkpoints_in(tmp_path)] == kept


def test_the_state_of_another_optimizer_goes_on_elsewhere(tmp_path):
    """SGD keeps a momentum, and counts nothing. Saved by one rank of each tower, read by two
    replicas of both. Another optimizer does not take it."""
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    own = {"micro_batch_size": 4, "zero_stage": 0, "optimizer": sgd}
    fork = Case("fork", ONE_EACH, ONE_EACH, **own)
    went_on = run_ranks(2, train_from, fork, 4, None, tmp_path, save_at=2)
    merged = Case("merged", {"merged": 1}, 2, **own)
    resumed = run_ranks(2, train_from, merged, 2, tmp_path / "step-00000002")
    read, written = (
        whole([r[k] for r in of]) for k, of in (("start", resumed), ("saved", went_on))
    )
    assert {kind for kind, _ in read} == {"parameter", "optimizer.momentum_buffer"}
    assert read.keys() == written.keys()
    for key, tensor in written.items():
        assert torch.equal(tensor, read[key]), key
    losses = {step: went_on[0]["losses"][step] for step in (3, 4)}
    assert resumed[0]["losses"] == pytest.approx(losses, rel=1e-5)
    with pytest.raises(
        RuntimeError, match="was trained with the optimizer SGD, .* has AdamW; go on"
    ):
        run_ranks(2, train_from, replace(merged, optimizer={}), 1, tmp_path / "step-00000002")


def adaptive_limits(results, when):
    """The running means of the group that all ranks with images hold."""
    return {r[when]["progress"]["clipping"]["mean_norm"].get("image", 0.0) for r in results} - {0.0}


@pytest.mark.parametrize(
    "stages, fusion", [((1, 2, 0, 2, 1), MERGED_2.fusion), ((1, 3, 3, 2, 3, 0), 0)]
)
def test_another_zero_stage_goes_on_from_the_same_state(tmp_path, stages, fusion):
    """What is read is what was written, to the last bit, and the losses are those of a run that did
    not change, to the rounding of sums in another order."""
    plain = replace(MERGED_2, dropout=0.0, fusion=fusion)
    reference = run_ranks(2, train_from, plain, 2 * len(stages))
    before = None
    for number, stage in enumerate(stages):
        case, step = replace(plain, zero_stage=stage), 2 * number
        source = tmp_path / f"step-{step:08d}" if step else None
        results = run_ranks(2, train_from, case, 2, source, tmp_path, save_at=step + 2)
        if before:
            read, written = whole([r["start"] for r in results]), whole([r["end"] for r in before])
            assert read.keys() == written.keys()
            for key, tensor in written.items():
                assert torch.equal(tensor, read[key]), (stage, key)
            assert results[0]["changes"] == []
        for at, loss in results[0]["losses"].items():
            assert loss == pytest.approx(reference[0]["losses"][at], rel=1e-5), (stage, at)
        before = results


def test_what_muon_keeps_goes_on_under_another_zero_stage(tmp_path):
    """0, 1, 2, 0 and 1 in turn, on one replica and on three: matrices have a momentum, all others
    two moments and a count."""
    muon = {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 2e-3}}
    plain = Case("merged", {"merged": 1}, 2, 4, optimizer=muon, ema={"decay": 0.9})
    three, one = replace(plain, replicas=3), replace(plain, replicas=1)
    reference = run_ranks(1, train_from, one, 10)
    before = None
    for number, case in enumerate((one, plain, replace(three, zero_stage=2), one, three)):
        case = replace(case, zero_stage=0) if number == 3 else case
        source = tmp_path / f"step-{2 * number:08d}" if number else None
        run = (case, 2, source, tmp_path, 2 * number + 2)
        results = run_ranks(case.world_size, train_from, *run)
        if before:
            read, written = whole([r["start"] for r in results]), whole([r["end"] for r in before])
            assert read.keys() == written.keys()
            for key, tensor in written.items():  # nan, which no rank gave, would differ
                assert torch.equal(tensor, read[key]), (number, key)
            kinds = {}
            for kind, name in read:
                kinds.setdefault(name, set()).add(kind.removeprefix("optimizer."))
            kept = {frozenset(own - {"parameter", "average"}) for own in kinds.values()}
            assert kept == {frozenset({"momentum_buffer"}), frozenset({"exp_avg", "exp_avg_sq"})}
            assert read["optimizer.momentum_buffer", "text.encoder.layers.0.mlp.fc1.weight"].any()
        for at, loss in results[0]["losses"].items():
            assert loss == pytest.approx(reference[0]["losses"][at], rel=1e-5), (number, at)
        before = results


def test_another_precision_goes_on_from_the_same_weights(tmp_path):
    """What is saved of a bf16 run are its fp32 weights and moments: fp32 takes them as they are,
    bf16 rounds a copy."""
    small = {"fusion": 0, "towers": "vit+clip", "dropout": 0.0}
    bf16, fp32 = replace(MERGED_2, precision="bf16", **small), replace(FORK_1_1, **small)
    saved = run_ranks(2, train_from, bf16, 2, None, tmp_path, save_at=2)
    resumed = run_ranks(2, train_from, fp32, 1, tmp_path / "step-00000002", tmp_path, save_at=3)
    read, written = whole([r["start"] for r in resumed]), whole([r["end"] for r in saved])
    assert read.keys() == written.keys()
    assert all(torch.equal(tensor, read[key]) for key, tensor in written.items())
    words = "computed in float32, and before in bfloat16: numbers differ"
    assert any(words in change for change in resumed[0]["changes"])
    (back, *_) = run_ranks(2, train_from, bf16, 1, tmp_path / "step-00000003")
    assert back["losses"][4] == pytest.approx(resumed[0]["losses"][3], rel=0.2)
    assert back["optimizer"] == "BF16_Optimizer"


@pytest.mark.parametrize("full_on", [0, 1])
def test_a_full_disk_is_warned_of_and_the_run_goes_on(tmp_path, full_on):
    """Unless it is the last checkpoint that has no room. Nothing that was whole is lost, and
    nothing half-written is left."""
    case = replace(MERGED_2, fusion=0, towers="vit+clip", dropout=0.0)
    first, second = run_ranks(2, train_on_a_disk_that_fills_up, case, tmp_path, full_on)
    assert second["warned"] == "" and first["warned"].count("wye: warning") >= 1
    for words in (
        f"checkpoint {tmp_path / 'step-00000002'} was not written: ",
        "File too large",
        "the newest one is step-00000001; make room on that disk",
    ):
        assert words in first["warned"]
    *before, last = first["there"][3]
    assert before == ["latest", "step-00000001"]
    assert last in ("step-00000003.writing", "step-00000003")
    assert first["failure"] == second["failure"]
    assert "step-00000004 was not written" in first["failure"]
    assert first["there"][4] == second["there"][4] == ["latest", "step-00000001", "step-00000003"]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    assert verify(tmp_path / "step-00000003").state == {"step": 3}


def test_what_all_replicas_hold_is_dealt_to_them_evenly():
    held = [torch.arange(10.0 * i, 10.0 * i + n) for i, n in enumerate((5, 1, 0, 9, 2))]
    runs = [
        Shard(f"p{i}", tuple(tensor.shape), 0, tensor.numel(), tensor, 0)
        for i, tensor in enumerate(held)
    ]
    for parts in range(1, 20):
        shares = [list(dealt(runs, part, parts)) for part in range(parts)]
        assert max(sum(run.numel for run in share) for share in shares) <= 17 // parts + 1
        pieces = [(run.name, run.offset, run.of(run.held)) for share in shares for run in share]
        assert torch.equal(torch.cat([piece for _, _, piece in pieces]), torch.cat(held))
        for name, offset, piece in pieces:
            assert torch.equal(piece, held[int(name[1:])][offset : offset + len(piece)])


def test_changes_say_what_they_do_to_the_numbers():
    before = {"stages": "a", "stage_graph": [1], "schedule": "replay", "precision": "bfloat16"}
    before["micro_batch_size"] = {"image": 4, "text": 8, "audio": 6}
    assert changes(before, dict(before)) == []
    now = {**before, "stages": "b", "stage_graph": [2], "precision": "float16"}
    now["micro_batch_size"] = {"image": 4, "text": 2, "audio": 3}
    # what it means for two branches is said once
    split, size, precision = changes(before, now)
    assert "split as b, replay, and before as a, replay" in split and "last bits" in split
    assert "text micro-batches of 2 (before: 8), audio micro-batches of 3 (before: 6)" in size
    assert precision.startswith("computed in float16, and before in bfloat16")
