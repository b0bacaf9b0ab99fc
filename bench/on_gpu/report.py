"""The tables of bench/gpu.py, from its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.on_gpu.jobs import MODELS, WAYS, peak_of

GIB = 2**30
MEANS_NOTHING = (
    "Measured on a CPU with tiny models, to try the program: **these numbers mean nothing.**"
)
AIMS = (0.25, 0.40)  # MFU, whose samples/s stand beside what was measured
Records = Mapping[str, Mapping[str, Any]]  # by MODEL/WAY
Row = Sequence[str]


def report(records: Records, about: Mapping[str, Any]) -> str:
    """Markdown. `about`: hardware and versions, and whether it was a trial on a CPU."""
    peak = peak_of(str(about.get("device", "")))
    parts = ["# One GPU: Wye and OpenCLIP's own trainer", describe(about, peak)]
    if about.get("tiny"):
        parts.insert(1, MEANS_NOTHING)
    else:
        parts.append("## References\n\n" + references(peak or peak_of("H100") or 0.0))
    parts.append("## Speed and memory\n\n" + speeds(records, None if about.get("tiny") else peak))
    parts += [
        f"## {title}\n\n{text}"
        for title, text in (
            ("Where a step goes", profiles(records)),
            ("Where the host waits in a step of Wye", waiting(records)),
            ("Predicted and measured", predictions(records)),
            ("Not measured", missing(records)),
        )
        if text
    ]
    return "\n\n".join(parts) + "\n"


def table(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe(about: Mapping[str, Any], peak: float | None) -> str:
    said = ", ".join(f"{key} {value}" for key, value in about.items() if value and key != "tiny")
    formula = "MFU = samples/s × FLOPs of a sample ÷ peak; FLOPs: three forwards, counted"
    return f"{said}.\n\n{formula}; peak: " + (
        f"{peak / 1e12:.1f} TFLOP/s, dense bf16." if peak else "not known for this device."
    )


def references(peak: float) -> str:
    header = ["model", "GFLOP a sample", "OpenCLIP's published, A100-40"]
    header += [f"{mfu:.0%} MFU here" for mfu in AIMS]
    return table(
        header,
        [
            [
                model.name,
                f"{model.flops / 1e9:.1f}",
                f"{model.a100:,.0f} samples/s" if model.a100 else "–",
                *(f"{model.samples_per_s(mfu, peak):,.0f} samples/s" for mfu in AIMS),
            ]
            for model in MODELS.values()
        ],
    )


# -- what was measured


def ordered(records: Records) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(model, way, record) model by model."""
    return [
        (model, way, records[f"{model}/{way}"])
        for model in MODELS
        for way in WAYS
        if f"{model}/{way}" in records
    ]


def rival_of(way: str) -> str:
    """OpenCLIP's way that a way is compared with."""
    for ending in ("compiled", "decoded"):
        if way.endswith(ending):
            return f"open_clip_{ending}"
    return "open_clip_accum" if WAYS[way].accumulates else "open_clip"


def speeds(records: Records, peak: float | None) -> str:
    header = ["model", "way", "batch", "samples/s", "÷ OpenCLIP, same way"]
    header += ["÷ OpenCLIP compiled", "MFU", "ms a step", "spread", "peak GiB", "taken GiB"]
    rows = []
    for model, way, record in ordered(records):
        if "samples_per_s" not in record:
            continue
        rate = record["samples_per_s"]
        # texts from files are shorter than what is counted
        mfu = rate * MODELS[model].flops / peak if peak and not WAYS[way].decoded else None
        micro, windows = record.get("micro_batch"), record.get("windows_s")
        rows.append(
            [
                model,
                WAYS[way].title,
                f"{record['batch']:,}"
                + (
                    f" ({micro:,} × {record['batch'] // micro})"
                    if micro and micro != record["batch"]
                    else ""
                ),
                f"{rate:,.1f}",
                ratio(rate, records.get(f"{model}/{rival_of(way)}")),
                ratio(rate, records.get(f"{model}/open_clip_compiled")),
                f"{mfu:.1%}" if mfu else "–",
                f"{1e3 * record['step_s']:,.1f}",
                f"{max(windows) / min(windows) - 1:.1%}" if windows else "–",
                gib(record.get("peak_bytes")),
                gib(record.get("reserved_bytes")),
            ]
        )
    return table(header, rows) if rows else "Nothing was measured."


def ratio(rate: float, other: Mapping[str, Any] | None) -> str:
    return f"{rate / other['samples_per_s']:.2f}" if other and "samples_per_s" in other else "–"


def gib(number: float | None) -> str:
    return f"{number / GIB:.1f}" if number else "–"


def profiles(records: Records) -> str:
    """Kernel time by class, and what of a step no kernel runs in. That is against the step without
    a profiler, which slows the host down and no kernel."""
    found = [(m, w, r) for m, w, r in ordered(records) if r.get("profile") and "step_s" in r]
    kinds = {kind: None for _, _, r in found for kind in r["profile"]["kernel_s"]}
    if not found:
        return ""
    header = [
        "model",
        "way",
        "ms a step",
        "no kernel runs",
        "kernels",
        "host waits",
        "copies alone, ms",
    ]
    rows = []
    for model, way, record in found:
        profile, step_s = record["profile"], record["step_s"]
        waits = {k: v for k, v in profile["waits"].items() if k.startswith("cuda")}
        idle = max(0.0, 1 - profile["busy_s"] / step_s)
        rows.append(
            [
                model,
                WAYS[way].title,
                f"{1e3 * step_s:,.1f}",
                f"{idle:.0%}" if profile["busy_s"] else "–",
                f"{profile['kernels']:,.0f}",
                f"{sum(waits.values()):.0f}",
                f"{1e3 * profile.get('copies_alone_s', 0.0):,.1f}",
                *(f"{1e3 * profile['kernel_s'].get(kind, 0):,.1f}" for kind in kinds),
            ]
        )
    calls = [
        f"- {model}, {WAYS[way].title}: "
        + ", ".join(f"{name} × {number:.0f}" for name, number in record["profile"]["waits"].items())
        for model, way, record in found
        if record["profile"]["waits"]
    ]
    text = table([*header, *(f"{kind}, ms" for kind in kinds)], rows)
    return text + ("\n\nWaiting calls a step:\n\n" + "\n".join(calls) if calls else "")


def waiting(records: Records) -> str:
    lines = []
    for model, way, record in ordered(records):
        for place, number in (record.get("waiting_lines") or {}).items():
            lines.append(f"- {model}, {WAYS[way].title}: {number} × `{place}`")
    return "\n".join(lines)


def predictions(records: Records) -> str:
    header = ["model", "batch", "measured, ms", "by data sheet, ms", "÷ measured"]
    header += ["by measured costs, ms", "÷ measured"]
    rows = []
    for model, way, record in ordered(records):
        trained = records.get(f"{model}/wye", {})
        if not WAYS[way].predicts or "step_s" not in trained:
            continue
        if record.get("batch") != trained["batch"]:
            continue
        step_s = trained["step_s"]
        row = [model, f"{trained['batch']:,}", f"{1e3 * step_s:,.1f}"]
        for key in ("counted_step_s", "measured_step_s"):
            value = record.get(key)
            row += [f"{1e3 * value:,.1f}", f"{value / step_s:.2f}"] if value else ["–", "–"]
        rows.append(row)
    aims = "Aims: 0.75 to 1.25 by the data sheet, 0.90 to 1.10 by measured costs."
    return f"{table(header, rows)}\n\n{aims}" if rows else ""


def missing(records: Records) -> str:
    return "\n".join(
        f"- {model}, {WAYS[way].title}: {record['status']}"
        + (f": {record['reason']}" if record.get("reason") else "")
        for model, way, record in ordered(records)
        if record.get("status") != "ok"
    )
