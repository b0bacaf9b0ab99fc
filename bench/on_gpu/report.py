"""The tables of bench/gpu.py, from its records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.common import GIB, table
from bench.on_gpu.jobs import MODELS, WAYS, peak_of

MEANS_NOTHING = "Tiny models on a CPU, to try the program: **these numbers mean nothing.**"
Records = Mapping[str, Mapping[str, Any]]  # by MODEL/WAY


def report(records: Records, about: Mapping[str, Any]) -> str:
    """Markdown. `about`: hardware and versions, and whether it was a trial on a CPU."""
    peak = None if about.get("tiny") else peak_of(str(about.get("device", "")))
    known = ", ".join(f"{key} {value}" for key, value in about.items() if value and key != "tiny")
    parts = [
        "# One GPU: Wye and OpenCLIP's own trainer",
        MEANS_NOTHING if about.get("tiny") else "",
        f"{known}; peak {peak / 1e12:.1f} TFLOP/s, dense bf16" if peak else known,
        speeds(records, peak),
        profiles(records),
        predictions(records),
        "\n".join(
            f"- {title}, the host waits: {number} × `{place}`"
            for title, _, record in ordered(records)
            for place, number in (record.get("waiting_lines") or {}).items()
        ),
        "\n".join(
            f"- {title}: {record['status']}: {record.get('reason', '')}"
            for title, _, record in ordered(records)
            if record.get("status") != "ok"
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def ordered(records: Records) -> Iterator[tuple[str, tuple[str, str], Mapping[str, Any]]]:
    """(title, (model, way), record) model by model."""
    for model in MODELS:
        for way in WAYS:
            if record := records.get(f"{model}/{way}"):
                yield f"{model}, {WAYS[way].title}", (model, way), record


def rival_of(way: str) -> str:
    """OpenCLIP's way that a way is compared with."""
    if WAYS[way].compiled:
        return "open_clip_compiled"
    return "open_clip_accum" if WAYS[way].accumulates else "open_clip"


def speeds(records: Records, peak: float | None) -> str:
    header = ["model, way", "batch", "samples/s", "÷ OpenCLIP, same way", "÷ OpenCLIP compiled"]
    header += ["MFU", "ms a step", "spread", "peak GiB", "taken GiB"]
    rows = []
    for title, (model, way), record in ordered(records):
        if "samples_per_s" not in record:
            continue
        rate, micro, batch = record["samples_per_s"], record["micro_batch"], record["batch"]
        row = [title, f"{batch:,}" + (f" ({micro:,} × {batch // micro})" if micro != batch else "")]
        row.append(f"{rate:,.1f}")
        for rival in (rival_of(way), "open_clip_compiled"):
            other = records.get(f"{model}/{rival}", {}).get("samples_per_s")
            row.append(f"{rate / other:.2f}" if other else "–")
        row.append(f"{rate * MODELS[model].flops / peak:.1%}" if peak else "–")
        windows = record["windows_s"]
        row += [f"{1e3 * record['step_s']:,.1f}", f"{max(windows) / min(windows) - 1:.1%}"]
        sizes = (record.get(key) for key in ("peak_bytes", "reserved_bytes"))
        rows.append([*row, *(f"{size / GIB:.1f}" if size else "–" for size in sizes)])
    return table(header, rows) if rows else "Nothing was measured."


def profiles(records: Records) -> str:
    """Kernel time by class, and what of a step no kernel runs in. That is against the step without
    a profiler, which slows the host down and no kernel."""
    found = [(title, r, r["profile"]) for title, _, r in ordered(records) if r.get("profile")]
    kinds = {kind: None for *_, profile in found for kind in profile["kernel_s"]}
    header = ["model, way", "ms a step", "no kernel runs", "kernels", "copies alone, ms"]
    header += [*(f"{kind}, ms" for kind in kinds), "waiting calls"]
    rows = []
    for title, record, profile in found:
        idle = max(0.0, 1 - profile["busy_s"] / record["step_s"])
        row = [title, f"{1e3 * record['step_s']:,.1f}", f"{idle:.0%}", f"{profile['kernels']:,.0f}"]
        seconds = [profile["copies_alone_s"], *(profile["kernel_s"].get(k, 0.0) for k in kinds)]
        waits = ", ".join(f"{number:.0f} {name}" for name, number in profile["waits"].items())
        rows.append([*row, *(f"{1e3 * each:,.1f}" for each in seconds), waits])
    return table(header, rows) if rows else ""


def predictions(records: Records) -> str:
    header = ["model", "batch", "measured, ms"]
    header += ["by data sheet, ms", "÷ measured", "by measured costs, ms", "÷ measured"]
    rows = []
    for _, (model, way), record in ordered(records):
        trained = records.get(f"{model}/wye", {})
        # an earlier command may have trained another batch
        if WAYS[way].predicts and "step_s" in trained and trained["batch"] == record.get("batch"):
            row = [model, f"{trained['batch']:,}", f"{1e3 * trained['step_s']:,.1f}"]
            for key in ("counted_step_s", "measured_step_s"):
                value = record.get(key)
                ratio = f"{value / trained['step_s']:.2f}" if value else "–"
                row += [f"{1e3 * value:,.1f}" if value else "–", ratio]
            rows.append(row)
    return table(header, rows) if rows else ""
