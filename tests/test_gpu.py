"""What only a GPU can show, with one to four ranks: over NCCL where each has a GPU, else on one.

    DS_ACCELERATOR=cuda python -m pytest tests/test_gpu.py -n 3    about eight minutes; not more
    WYE_GPU_TESTS=cpu python -m pytest tests/test_gpu.py           the same on a CPU, to try the tests

The variable belongs to the command: everywhere else in the tests ranks are on the CPU, also where
there is a GPU, and all processes of a test are forked from a server that has chosen one.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_cases import whole
from gpu_cases import (
    checkpoint_of,
    train_exactly,
    train_exactly_from,
    train_with_overflow,
)
from launched import finish, launch, metrics, run_to_end
from ranks import run_ranks
from rounding import assert_equal_rows
from split_training import (
    LOSS_SCALE,
    RELATIVE,
    Case,
    assemble,
    check_all_gradients,
    check_gradients,
    train_whole,
)

from bench.on_gpu.profile import Profiled
from engine.streams import DeviceCopies

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = os.environ.get("DS_ACCELERATOR") == "cuda" and torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU and os.environ.get("WYE_GPU_TESTS") != "cpu",
        reason="needs a CUDA device and DS_ACCELERATOR=cuda in the environment",
    ),
]
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs the memory or the streams of a CUDA device")

SIZE = 4  # of all micro-batches, so that a split sees what the whole sees
RESNET = {"towers": "resnet+bert", "dropout": 0.1}
CLIPPED = {"clipping": {"image": 0.5, "text": 1.0, "head": 0.1}}
LORA = {"lora": {"text": {"r": 4, "target": "all"}}}
# of a branch's gradient: as on a CPU, tests/engine/test_parity.py
ROUNDED = {"fp32": RELATIVE, "bf16": 1e-2, "fp16": 1.5e-3}
OTHER_KERNELS = 30.0  # times the tolerance, where a CPU computed the reference


ONE_EACH = {"image": 1, "text": 1}


def fork(image, text, **more):
    """image, text: (stages, replicas)."""
    stages, replicas = ({"image": image[i], "text": text[i]} for i in (0, 1))
    return Case("fork", stages, replicas, SIZE, **more)


def merged(stages, replicas, **more):
    return Case("merged", {"merged": stages}, replicas, SIZE, **more)


SPLITS = [
    fork((1, 1), (1, 1), **RESNET),
    fork((1, 1), (1, 1), zero_stage=0, schedule="replay"),
    fork((1, 1), (1, 1), schedule="replay", kept_micro_batches=2, **RESNET),
    fork((1, 1), (1, 1), fusion=1, loss_weights={"contrastive": 0.8, "matching": 1.5}),
    fork((1, 1), (1, 1), locked={"image": True}),
    fork((1, 1), (1, 1), **LORA),
    fork((1, 2), (1, 2), **RESNET),
    fork((2, 1), (1, 2), **CLIPPED),
    fork((1, 3), (1, 1), schedule="replay"),
    merged(2, 1, **RESNET),
    merged(4, 1, schedule="replay", **CLIPPED),
    merged(1, 2, zero_stage=0, **RESNET),
    merged(2, 2, **CLIPPED),
    merged(2, 2, schedule="replay", compile="layers"),
]
HALF = [
    fork((1, 1), (1, 1), **RESNET),
    fork((1, 2), (1, 1), fusion=1, schedule="replay", **CLIPPED),
    merged(4, 1),
    merged(1, 2, **RESNET),
]
CASES = [
    *SPLITS,
    *(replace(c, precision=p) for c in HALF for p in ("bf16", "fp16")),
]
WHOLES: dict[str, list] = {}


def on_one_rank(case):
    """The same training on one rank, without a split."""
    one = replace(case, layout="merged", stages={"merged": 1}, replicas=1, zero_stage=1)
    one = replace(one, schedule="batch_sync", kept_micro_batches=None, compile=None)
    key = f"{one} {one.clipping}"  # which the name of a case leaves out
    if key not in WHOLES:
        WHOLES[key] = run_ranks(1, train_exactly, one)
    return WHOLES[key]


def gradients_of(results):
    shapes = {n: p.shape for r in results for n, p in r["parameters"].items()}
    learned = {name for result in results for name, _, _ in result["gradients"]}
    return assemble(results, {name: shapes[name] for name in learned})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_split_equals_one_rank(case):
    """Loss, every gradient, norms and running statistics, with the same dropout."""
    results, (one,) = run_ranks(case.world_size, train_exactly, case), on_one_rank(case)
    assert {r["device"].split(":")[0] for r in results} == {"cuda" if ON_GPU else "cpu"}
    # NCCL refuses ranks that share a GPU
    by_nccl = ON_GPU and torch.cuda.device_count() >= case.world_size
    assert {r["backend"] for r in results} == {"nccl" if by_nccl else "gloo"}
    tolerance = ROUNDED[case.precision]
    # a compiled layer draws other numbers, and rounds differently
    assert results[0]["metrics"][0].loss == pytest.approx(
        one["metrics"][0].loss, rel=max(RELATIVE, tolerance / 10)
    )
    assert results[0]["metrics"][0].grad_norm == pytest.approx(
        one["metrics"][0].grad_norm, rel=tolerance
    )
    split, expected = gradients_of(results), gradients_of([one])
    assert split.keys() == expected.keys()
    if case.precision == "fp32":
        check_gradients(split, expected)
    for group in {name.split(".")[0] for name in split} if case.precision != "fp32" else ():
        own, right = (
            torch.cat([each[n].flatten() for n in split if n.startswith(group + ".")])
            for each in (split, expected)
        )
        assert float((own - right).norm() / right.norm()) < tolerance, group
    # replicas average their running means, of fewer micro-batches each
    replicas = case.replicas["image"] if case.layout == "fork" else case.replicas
    for result in results if replicas == 1 else ():
        for name, buffer in result["buffers"].items():
            expected = one["buffers"][name].reshape(-1)
            assert_equal_rows(buffer.reshape(-1), expected, tolerance, name)


@pytest.mark.parametrize("towers", ["resnet+bert", "vit+clip"])
def test_one_rank_equals_plain_torch_on_a_cpu(towers):
    case = merged(1, 1, towers=towers)
    (one,) = on_one_rank(case)
    reference = train_whole(case)
    assert one["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    check_gradients(gradients_of([one]), reference["gradients"], OTHER_KERNELS)


REGIONS = [
    replace(merged(2, 1, schedule="replay"), micro_batch_size=8, annotated="region"),
    fork((1, 2), (1, 1), towers="resnet+bert", annotated="region", phrase_loss="sigmoid"),
]


@pytest.mark.parametrize("case", REGIONS, ids=str)
def test_regions_equal_plain_torch_on_a_cpu(case):
    results = run_ranks(case.world_size, train_exactly, case)
    reference = train_whole(case)
    assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    check_all_gradients(results, reference, OTHER_KERNELS)


def test_what_computes_with_a_copy_finds_it_complete():
    """In memory that earlier copies were in, and behind products that keep the device busy."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    copies, left = DeviceCopies(device), torch.randn(2048, 2048, device=device)
    right, rounds, elements = left, 40, 4 * 4 * 256 * 256
    sums = []
    for number in range(rounds):
        right = (left @ right).clamp(-1, 1)
        loaded = torch.full((4, 4, 256, 256), number, dtype=torch.uint8, pin_memory=ON_GPU)
        values = copies.take({"values": loaded})["values"].float() + 1.0
        values = values.to(memory_format=torch.channels_last)
        kept = copies.keep({"values": values})
        del values
        back = copies.take_back(kept)["values"]
        assert back.is_contiguous(memory_format=torch.channels_last)
        sums.append(back.sum())
    assert [float(each) for each in sums] == [elements * (n + 1.0) for n in range(rounds)]


@on_gpu
def test_copies_run_beside_kernels():
    device = torch.device("cuda")
    copies, left = DeviceCopies(device), torch.randn(4096, 4096, device=device)
    loaded = torch.zeros(1 << 24, dtype=torch.uint8, pin_memory=True)
    copies.take({"values": left.cpu()}), left @ left  # the first of each allots memory
    torch.cuda.synchronize()
    profiled, rounds = Profiled(), 20
    profiled.start()
    for _ in range(rounds):
        left @ left
        copies.take({"values": loaded})["values"].sum(dtype=torch.float32)
    torch.cuda.synchronize()
    found = profiled.stop(rounds)
    assert found["copies_alone_s"] < 0.5 * found["kernel_s"]["memcpy"]


def test_two_hundred_steps_in_fp16_with_an_overflow_put_in():
    """The loss scale starts at 2**10. The step with infinite pixels changes no weight, is counted,
    and halves the scale; the others learn one batch by heart."""
    case = fork((1, 1), (1, 1), precision="fp16", **CLIPPED)
    results = run_ranks(2, train_with_overflow, case, 200, 20)
    for found in results:
        assert found["skipped"] == [0.0] * 20 + [1.0] * 180
        assert found["loss_scale"][:20] == [LOSS_SCALE] * 20
        assert found["loss_scale"][21] == LOSS_SCALE / 2
        assert found["moved"] == [float(step != 20) for step in range(200)]
    assert results[0]["loss"][-1] < 0.1 * results[0]["loss"][0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_ends_where_an_undisturbed_one_ends_bit_for_bit(tmp_path, precision):
    case = fork((1, 2), (1, 1), precision=precision, **RESNET)
    undisturbed = run_ranks(3, train_exactly_from, case, 4, folder=tmp_path, save_at=2)
    resumed = run_ranks(3, train_exactly_from, case, 2, checkpoint_of(tmp_path, 2))
    assert resumed[0]["losses"] == {step: undisturbed[0]["losses"][step] for step in (3, 4)}
    before, after = (whole([r["end"] for r in each]) for each in (undisturbed, resumed))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


# -- train.py and its companions


def test_deterministic_runs_are_equal_bit_for_bit(tmp_path):
    """On a GPU cuDNN would choose its algorithms by their times, and some gradients be added up in
    any order."""

    def losses(name):
        flags = [*small(tmp_path / "how", "zero1_bf16.json"), "--steps", 20, "--eval-every", 20]
        run_dir = tmp_path / name
        status, output = run_to_end(
            "train.py", *flags, "--deterministic", "--run-dir", run_dir, ranks=1
        )
        assert status == 0, output[-3000:]
        return [line["loss"] for line in metrics(run_dir).values()]

    assert losses("first") == losses("again")


def small(folder, name="zero1_bf16.json", **branches):
    """Flags of a short run on the embedded data under one of the shipped files for GPUs."""
    config = json.loads((ROOT / "ds_configs" / name).read_text())
    config |= {"train_batch_size": 120}
    config["scheduler"]["params"]["warmup_num_steps"] = 5
    config["branches"] |= branches
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(config))
    towers = ["--image-tower", "resnet18:layers=1-1-1-1", "--text-tower", "bert-mini"]
    return ["--deepspeed_config", folder / name, *towers, "--workers", 2]


def test_bf16_and_fp16_losses_follow_fp32(tmp_path):
    """Within 2 %: half precision rounds each activation to 8 or 11 bits, and 20 steps let the
    differences grow."""

    def losses(name):
        run_dir = tmp_path / Path(name).stem
        flags = [*small(tmp_path / "how", name), "--steps", 20, "--eval-every", 20]
        status, output = run_to_end("train.py", *flags, "--run-dir", run_dir, ranks=1)
        assert status == 0, output[-3000:]
        return [line["loss"] for line in metrics(run_dir).values()]

    exact = losses("zero1_fp32.json")
    for name in ("zero1_bf16.json", *(["zero1_fp16.json"] if ON_GPU else [])):
        assert losses(name) == pytest.approx(exact, rel=0.02), name


def test_a_fork_under_the_launcher_is_traced_evaluated_and_exported(tmp_path):
    """Two ranks, on one GPU where there is one."""
    branches = {"layout": "fork", "stages": {"image": 1, "text": 1}, "replicas": "auto"}
    flags = [
        *small(tmp_path / "how", **branches),
        "--trace-every",
        5,
        "--run-dir",
        tmp_path / "run",
    ]
    status, output = finish(launch(2, *flags, "--steps", 10, "--eval-every", 10))
    assert status == 0, output[-3000:]
    if ON_GPU and torch.cuda.device_count() == 1:
        assert "ranks share 1 GPU and communicate through host memory" in output
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    steps = metrics(tmp_path / "run")
    for rank in (0, 1):
        spans = [e for e in trace if e["ph"] == "X" and e["tid"] == rank and e["args"]["step"] == 5]
        forwards = [e["dur"] for e in spans if e["args"]["instruction"] == "ForwardPass"]
        assert forwards and min(forwards) > 0, "device times of each forward"
        last = max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)
        assert last / 1e6 < 1.2 * steps[5]["step_s"]
    status, output = run_to_end("evaluate.py", tmp_path / "run")
    assert status == 0 and "R@10" in output, output[-3000:]
    status, output = run_to_end("export.py", tmp_path / "run", tmp_path / "out")
    assert status == 0 and list((tmp_path / "out").glob("**/*.safetensors")), output[-3000:]


def test_regions_are_trained_in_bf16_and_evaluated(tmp_path):
    flags = ["--data", "demo:scenes:200", "--pairs", "image:text,region:text", "--workers", 2]
    flags += [*small(tmp_path / "how"), "--steps", 10, "--eval-every", 10]
    status, output = run_to_end("train.py", *flags, "--run-dir", tmp_path / "run", ranks=1)
    assert status == 0, output[-3000:]
    losses = [line["contrastive_loss/region_phrase"] for line in metrics(tmp_path / "run").values()]
    assert losses[-1] < losses[0]
    status, output = run_to_end("evaluate.py", tmp_path / "run")
    assert status == 0 and "phrase" in output, output[-3000:]


@on_gpu
@pytest.mark.parametrize("schedule", ["batch_sync", "replay"])
def test_peak_memory_is_as_predicted(tmp_path, schedule):
    """Within 10 %, once the layers are measured. Texts are cut to one length: the prediction is for
    the longest that may come."""
    flags = [
        *small(tmp_path / "how", layout="auto", schedule=schedule, micro_batch_size=60),
        *("--image-tower", "vit_b_16", "--image-size", 224, "--text-tower", "bert-base-uncased"),
        *("--max-text-tokens", 8, "--steps", 6, "--eval-every", 6, "--run-dir", tmp_path / "run"),
    ]
    status, output = run_to_end("train.py", *flags, ranks=1)
    assert status == 0, output[-3000:]
    predicted = float(re.search(r"at most ([\d.]+) GiB a rank \(from layers", output)[1])
    measured = max(line["peak_memory_bytes"] for line in metrics(tmp_path / "run").values())
    assert predicted == pytest.approx(measured / 2**30, rel=0.1)


@on_gpu
def test_memory_that_runs_out_is_one_message_with_what_to_change(tmp_path):
    """A ResNet-50 keeps some 140 MB for each image of 288 × 288 in fp32: no GPU has room for
    2,400 of them."""
    branches = {
        "layout": "merged",
        "stages": {"merged": 1},
        "micro_batch_size": 2400,
        "schedule": "batch_sync",
    }
    config = json.loads((ROOT / "ds_configs" / "zero1_fp32.json").read_text())
    config = {**config, "train_batch_size": 2400, "branches": {**config["branches"], **branches}}
    (tmp_path / "large.json").write_text(json.dumps(config))
    towers = ["--image-tower", "resnet50", "--image-size", "288", "--text-tower", "bert-tiny"]
    length = ["--steps", "2", "--eval-every", "2", "--run-dir", tmp_path / "run"]
    result = subprocess.run(
        [
            sys.executable,
            "train.py",
            "--deepspeed_config",
            tmp_path / "large.json",
            *towers,
            *length,
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=1200,
    )
    assert result.returncode == 2, result.stderr[-3000:]
    assert result.stderr.count("error:") == 1 and "Traceback" not in result.stderr, result.stderr[
        -3000:
    ]
    said = result.stderr.split("train.py: error: ")[1].splitlines()
    assert said[0] == (
        "rank 0 (merged 0, replica 0) ran out of memory in ForwardPass of micro-batch 0 "
        "(of 1, counted from 0), in step 1"
    )
    assert said[1].startswith("the allocator says: CUDA out of memory. Tried to allocate ")
    assert said[2].startswith("predicted for a training step of merged 0: at most ")
    assert '"schedule": "replay"' in result.stderr
    kept = (tmp_path / "run" / "error-rank0.txt").read_text()
    assert "OutOfMemoryError: CUDA out of memory" in kept and "_forward_pass" in kept
