"""The measurement on one GPU, tried without one: both programs run tiny models in processes of
their own, one failure loses its own line only, and what is read from traces and put into tables."""

import json
import time
import warnings

import pytest
import torch

from bench.gpu import main, measured, merged, once, parse
from bench.on_gpu.jobs import MODELS, NUM_TOKENS, ORDER, WAYS, Job, batches_for, peak_of, turns
from bench.on_gpu.profile import covered, kind_of, summary, waits_by_line
from bench.on_gpu.report import report
from bench.on_gpu.timing import largest_foretold
from models.towers.building import build_towers, count_flops, meta_inputs

TRIED = ["--device", "cpu", "--tiny", "--seconds-per-measurement", "0.05"]


@pytest.mark.all("measures as the bench does")
def test_both_programs_are_measured_and_a_failure_loses_its_own_line(tmp_path, capsys):
    """OpenCLIP's trainer, this program, replay and a prediction in real processes; then a model
    that cannot be built."""
    ways = "open_clip,wye,wye_predict,wye_replay"
    command = [*TRIED, "--only", ways, "--out", str(tmp_path), "--budget-s", "600"]
    assert main([*command, "--models", "ViT-B-32"]) == 0
    text = capsys.readouterr().out
    folder = tmp_path / "CPU-tiny"
    records = json.loads((folder / "results.json").read_text())["records"]
    assert {key: record["status"] for key, record in records.items()} == {
        f"ViT-B-32/{way}": "ok" for way in ways.split(",")
    }, text
    own, other = records["ViT-B-32/wye"], records["ViT-B-32/open_clip"]
    assert own["batch"] == other["batch"] == 16 and own["samples_per_s"] > 0
    assert all(0 < loss < 10 for loss in own["losses"])
    replay, foretold = records["ViT-B-32/wye_replay"], records["ViT-B-32/wye_predict"]
    assert (replay["batch"], replay["micro_batch"]) == (64, 16)
    assert foretold["counted_step_s"] > 0 and foretold["measured_step_s"] > 0
    assert "mean nothing" in text and (folder / "report.md").read_text() in text

    # the same command finds all done; what fails is said, beside what was measured
    (folder / "models" / "ViT-B-16-tiny").write_text("in the way of a folder")
    assert main([*command, "--models", "ViT-B-32,ViT-B-16"]) == 0
    again = json.loads((folder / "results.json").read_text())["records"]
    assert again["ViT-B-32/wye"] == own
    assert again["ViT-B-16/wye"]["status"] == "failed"
    assert "FileExistsError" in again["ViT-B-16/wye"]["reason"]
    assert "ViT-B-16, Wye: failed" in (folder / "report.md").read_text()


def test_what_does_not_fit_into_the_budget_is_skipped(tmp_path, capsys):
    command = [*TRIED, "--models", "RN50", "--only", "wye", "--out", str(tmp_path)]
    assert main([*command, "--budget-s", "3"]) == 1
    assert "RN50, Wye: skipped" in capsys.readouterr().out


def test_a_process_is_ended_at_its_limit_and_what_it_had_found_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.gpu.SLOWER_CPU", 1e-3)
    job = Job("ViT-B-32", "wye", 8, 8, "cpu", True, 0.05, str(tmp_path))
    start = time.monotonic()
    assert once(job, start + 1.0)["status"] == "timeout" and time.monotonic() - start < 60
    file = tmp_path / "job.jsonl"
    file.write_text('{"status": "ok", "batch": 8}\n{"batch": 16}\n{"profile": {"ker')
    assert merged(file) == {"status": "ok", "batch": 16}


def test_a_process_that_dies_without_a_word_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.gpu.environment", lambda device: {"PYTHONHOME": "/nothing"})
    job = Job("ViT-B-32", "wye", 8, 8, "cpu", True, 0.05, str(tmp_path))
    record = once(job, time.monotonic() + 300)
    assert record["status"] == "failed" and "exit status 1" in record["reason"]


def test_where_memory_runs_out_a_smaller_batch_is_tried(tmp_path, monkeypatch):
    tried = []

    def once_(job, deadline):
        tried.append((job.batch, job.micro_batch))
        return {"status": "out of memory"} if len(tried) < 3 else {"status": "ok"}

    monkeypatch.setattr("bench.gpu.once", once_)
    job = Job("ViT-B-32", "wye_replay", 400, 100, "cuda", False, 1.0, str(tmp_path))
    assert measured(job, 0.0) == {"status": "ok"}
    assert tried == [(400, 100), (368, 92), (336, 84)]


@pytest.mark.parametrize("model", MODELS)
def test_flops_of_a_sample_are_those_counted(model):
    towers = build_towers(
        f"open_clip:{model}",
        f"open_clip:{model}",
        MODELS[model].embed_dim,
        224,
        49408,
        NUM_TOKENS,
        eos_token_id=49407,
    )
    forward = sum(sum(count_flops(tower, meta_inputs(tower, 2))) / 2 for tower in towers)
    assert MODELS[model].flops == pytest.approx(3 * forward, rel=1e-4)


def test_every_way_has_its_turn_once_and_programs_alternate():
    every = list(turns(list(MODELS), list(WAYS)))
    assert len(set(every)) == len(every)
    assert {way for _, way in every} == set(WAYS)
    assert every[:2] == [("ViT-B-32", "open_clip"), ("ViT-B-32", "wye")]
    assert {way for ways, _ in ORDER for way in ways} == set(WAYS)


def test_batches_follow_what_open_clip_held():
    found = {"ViT-B-32/open_clip": {"batch": 1000}, "ViT-B-32/wye": {"largest_foretold": 1600}}

    def of(way):
        return batches_for(way, "ViT-B-32", found, False)

    assert of("open_clip") == (None, None)
    assert of("wye") == of("open_clip_compiled") == (1000, 1000)
    assert of("wye_replay") == (4000, 1000)
    assert of("open_clip_accum") == (3720, 930)
    assert of("wye_largest") == (1600, 1600)
    assert batches_for("wye", "RN50", found, False) == (512, 512)  # OpenCLIP was not measured


def test_the_largest_batch_follows_from_two_peaks():
    """10 bytes a sample and 100 besides: 0.94 × 2,000 hold 178 samples, which are 176 in eights."""
    assert largest_foretold((10, 200), (20, 300), 2000) == 176


# -- traces


def test_kernels_are_told_by_their_names():
    kinds = {
        "void pytorch_flash::flash_fwd_kernel<...>": "attention",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": "attention",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": "matmul",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>": "matmul",
        "sm90_xmma_dgrad_implicit_gemm_indexed_bf16bf16": "convolution",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<>": "norm",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>": "optimizer",
        "triton_poi_fused_convolution_gelu_2": "compiled",
        "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernel>": "elementwise",
        "somebody's own": "other",
    }
    assert {name: kind_of(name) for name in kinds} == kinds


def event(cat, name, ts, dur):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_a_trace_is_summed_per_step():
    """Two steps: 4 + 2 µs of kernels of which 1 runs beside another, and copies of 1 beside them
    and of 3 alone."""
    events = [
        event("kernel", "nvjet_a", 0.0, 4.0),
        event("kernel", "flash_fwd", 3.0, 2.0),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1.0, 1.0),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10.0, 3.0),
        event("gpu_user_annotation", "a range", 0.0, 100.0),
        event("cuda_runtime", "cudaStreamSynchronize", 0.0, 1.0),
        event("cuda_runtime", "cudaMemcpyAsync", 0.0, 1.0),
        event("cpu_op", "aten::item", 0.0, 1.0),
        {"ph": "i", "cat": "kernel", "name": "no span"},
    ]
    found = summary(events, 2)
    assert found["kernel_s"] == pytest.approx({"matmul": 2e-6, "memcpy": 2e-6, "attention": 1e-6})
    assert found["copies_alone_s"] == pytest.approx(1.5e-6)
    assert found["busy_s"] == pytest.approx(4e-6) and found["kernels"] == 1
    assert found["waits"] == {"cudaStreamSynchronize": 0.5, "aten::item": 0.5}


def test_covered_time_counts_once():
    assert covered([(5, 6), (0, 2), (1, 3), (1, 1.5)]) == 4
    assert covered([]) == 0


def test_lines_at_which_torch_says_that_it_waits_are_counted(monkeypatch):
    """torch warns where a GPU is; here the same warnings are made."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "before")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with waits_by_line(torch.device("cuda")) as waits:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        json.loads("1", parse_int=_waiting)
    assert modes == ["warn", "before"] and sorted(waits.values()) == [1, 2]
    assert all(place.startswith("tests/bench/test_gpu.py:") for place in waits)


def _waiting(text):
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


# -- tables


def speed(batch, step_s, **more):
    return {"status": "ok", "batch": batch, "micro_batch": batch, "step_s": step_s} | {
        "samples_per_s": batch / step_s,
        "windows_s": [step_s, 1.1 * step_s],
        "peak_bytes": 60 * 2**30,
        "reserved_bytes": 64 * 2**30,
        **more,
    }


def test_the_report_of_a_gpu():
    """On an H100, 1,000 samples of 525.976 GFLOP in 1.3294 s are 40 % of 989.4 TFLOP/s."""
    profile = {
        "kernel_s": {"matmul": 0.9, "attention": 0.1},
        "busy_s": 0.99705,
        "copies_alone_s": 0.0125,
        "kernels": 1234.0,
        "waits": {"cudaStreamSynchronize": 5.0, "aten::item": 1.0},
    }
    records = {
        "ViT-L-14/open_clip": speed(1000, 2.0),
        "ViT-L-14/open_clip_compiled": speed(1000, 1.6),
        "ViT-L-14/wye": speed(1000, 1.3294, profile=profile, waiting_lines={"a.py:1: x": 2}),
        "ViT-L-14/wye_predict": {
            "status": "ok",
            "batch": 1000,
            "counted_step_s": 1.0,
            "measured_step_s": 1.3294,
        },
        "RN50/wye": {"status": "out of memory"},
    }
    text = report(records, {"device": "NVIDIA H100 80GB HBM3", "tiny": False})
    assert "mean nothing" not in text
    line = next(line for line in text.splitlines() if line.startswith("| ViT-L-14, Wye | 1,000"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:] == ["752.2", "1.50", "1.20", "40.0%", "1,329.4", "10.0%", "60.0", "64.0"]
    profiled = "| ViT-L-14, Wye | 1,329.4 | 25% | 1,234 | 12.5 | 900.0 | 100.0 | 5 cudaStream"
    assert profiled in text
    assert "| ViT-L-14 | 1,000 | 1,329.4 | 1,000.0 | 0.75 | 1,329.4 | 1.00 |" in text
    assert "- RN50, Wye: out of memory" in text and "2 × `a.py:1: x`" in text


def test_peaks_are_known_by_the_name_of_the_gpu():
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_of("CPU") is None


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--device", "cpu"], "add --tiny"),
        (["--only", "wye,nothing"], "'nothing'"),
        (["--models", "ViT-H-14"], "some of ViT-B-32"),
        (["--budget-s", "0"], "above 0"),
    ],
)
def test_what_is_asked_for_is_checked(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert said in capsys.readouterr().err
