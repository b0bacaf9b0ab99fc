"""What bench/gpu.py measures: the models, the ways to train them, and the order. Plain Python."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "ds_configs" / "zero1_bf16.json"
NUM_TOKENS = 77  # of each text: all that CLIP's text tower has room for
MICRO_BATCHES = 4  # of replay, and OpenCLIP's --accum-freq
# Of one GPU, dense bf16, FLOP/s, by a part of its name: NVIDIA's data sheets, SXM.
PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}


@dataclass(frozen=True)
class Model:
    """One of OpenCLIP's models. `flops`: of one sample in a training step: three forwards, each as
    `models/towers/building.py: count_flops` counts it (matrix products, convolutions, attention; a
    multiply-add is 2; texts of 77 tokens). `probes`: two batches that surely fit, by which the
    largest one is foretold. `a100`: samples/s that OpenCLIP's published GPU hours amount to on an
    A100 with 40 GB."""

    name: str
    embed_dim: int
    flops: float
    probes: tuple[int, int]
    a100: float | None = None

    def samples_per_s(self, mfu: float, peak: float) -> float:
        return mfu * peak / self.flops


MODELS = {
    model.name: model
    for model in (
        Model("ViT-B-32", 512, 44.331e9, (128, 256), 787),
        Model("ViT-L-14", 768, 525.976e9, (16, 32), 71),
        Model("ViT-B-16", 512, 123.259e9, (64, 128), 338),
        Model("RN50", 1024, 54.555e9, (64, 128)),
    )
}
TINY_PROBES = (4, 8)
# What OpenCLIP's configuration of a model becomes with --tiny: one layer of each kind, 32 pixels.
TINY = {
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64},
    "text_cfg": {"width": 64, "heads": 1, "layers": 1},
}
TINY_RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16}


@dataclass(frozen=True)
class Way:
    """One way to train a model. `needs_s`: with less time than that it is not begun; `limit_s`:
    after so many seconds it is ended. Both are for one GPU."""

    title: str
    program: Literal["wye", "open_clip"]
    needs_s: float
    limit_s: float
    compiled: bool = False
    accumulates: bool = False  # MICRO_BATCHES forwards without gradient, then each again
    decoded: bool = False  # images and texts come from files through the program's own loader
    predicts: bool = False  # nothing is trained


WAYS = {
    "open_clip": Way("OpenCLIP", "open_clip", 25, 120),
    "wye": Way("Wye", "wye", 25, 120),
    "open_clip_compiled": Way("OpenCLIP, torch.compile", "open_clip", 60, 240, compiled=True),
    "wye_compiled": Way("Wye, compile: layers", "wye", 40, 180, compiled=True),
    "open_clip_accum": Way("OpenCLIP, --accum-freq 4", "open_clip", 25, 120, accumulates=True),
    "wye_replay": Way("Wye, replay", "wye", 25, 120, accumulates=True),
    "wye_replay_large": Way("Wye, replay, 16 ×", "wye", 60, 180, accumulates=True),
    "wye_predict": Way("Wye, predicted", "wye", 25, 90, predicts=True),
    "wye_largest": Way("Wye, its largest batch", "wye", 25, 120),
    "open_clip_decoded": Way("OpenCLIP, from files", "open_clip", 40, 120, decoded=True),
    "wye_decoded": Way("Wye, from files", "wye", 40, 120, decoded=True),
}
SCHEDULES = {True: "replay", False: "batch_sync"}

# The most important first: ways, and the models for which they come now; within a line each model
# has its turn, and the two programs alternate.
BOTH, COMPILED = ("open_clip", "wye"), ("open_clip_compiled", "wye_compiled")
ORDER = (
    (BOTH, tuple(MODELS)),
    (("wye_predict",), tuple(MODELS)),
    (COMPILED, ("ViT-L-14", "ViT-B-32")),
    (("open_clip_accum", "wye_replay"), tuple(MODELS)),
    (COMPILED, ("ViT-B-16", "RN50")),
    (("wye_largest",), tuple(MODELS)),
    (("open_clip_decoded", "wye_decoded"), ("ViT-B-32", "RN50")),
    (("wye_replay_large",), tuple(MODELS)),
)


@dataclass(frozen=True)
class Job:
    """One measurement, as the process that makes it is told. `batch`: samples of an optimizer step;
    None: the largest that fits is looked for. `file`: where lines of results go."""

    model: str
    way: str
    batch: int | None
    micro_batch: int | None
    device: str
    tiny: bool
    seconds: float
    folder: str

    @property
    def spec(self) -> Model:
        return MODELS[self.model]

    @property
    def of(self) -> Way:
        return WAYS[self.way]

    @property
    def file(self) -> Path:
        return Path(self.folder) / f"{self.model}-{self.way}.jsonl"

    @property
    def tower(self) -> str:
        """The model as both programs are asked for it: a name of OpenCLIP's, or a small one of the
        same kind in a folder."""
        return str(tiny_folder(Path(self.folder), self.model)) if self.tiny else self.model

    @property
    def probes(self) -> tuple[int, int]:
        return TINY_PROBES if self.tiny else self.spec.probes

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def turns(models: Collection[str], ways: Collection[str]) -> Iterator[tuple[str, str]]:
    """(model, way) in the order in which they are measured."""
    for group, of_models in ORDER:
        for model in of_models:
            for way in group:
                if model in models and way in ways:
                    yield model, way


def batches_for(
    way: str, model: str, found: Mapping[str, Any], tiny: bool
) -> tuple[int | None, int | None]:
    """(samples of a step, of them in a micro-batch), by the largest batch that OpenCLIP held.
    `found`: records by `MODEL/WAY`. Where OpenCLIP was not measured, four times the larger probe."""
    probes = TINY_PROBES if tiny else MODELS[model].probes
    largest = found.get(f"{model}/open_clip", {}).get("batch") or 4 * probes[1]
    if way == "open_clip":
        return None, None
    if way == "wye_largest":
        foretold = found.get(f"{model}/wye", {}).get("largest_foretold")
        return (foretold, foretold) if foretold else (None, None)
    if way == "open_clip_accum":
        # it keeps all images on the GPU besides, and one more set of embeddings
        micro = max(2, int(0.93 * largest))
        return MICRO_BATCHES * micro, micro
    if way == "wye_replay":
        return MICRO_BATCHES * largest, largest
    if way == "wye_replay_large":  # four times as many as OpenCLIP accumulates
        return MICRO_BATCHES**2 * largest, largest
    if WAYS[way].decoded:
        half = max(2, largest // 2)  # the loaders set the pace: a step need not be long
        return half, half
    return largest, largest


def tiny_folder(folder: Path, model: str) -> Path:
    return folder / "tiny" / f"{model}-tiny"


def write_tiny(folder: Path, model: str, configuration: Mapping[str, Any]) -> None:
    """OpenCLIP's `configuration` of a model made small: as a folder for this program, and beside it
    as a file for `open_clip.add_model_config`."""
    vision = {**configuration["vision_cfg"], **TINY["vision_cfg"]}
    if isinstance(configuration["vision_cfg"]["layers"], list):
        vision |= TINY_RESNET
    elif vision["patch_size"] < 16:
        vision["patch_size"] = 16  # which divides 32 pixels
    small = {**configuration, "vision_cfg": vision}
    small["text_cfg"] = {**configuration["text_cfg"], **TINY["text_cfg"]}
    place = tiny_folder(folder, model)
    place.mkdir(parents=True, exist_ok=True)
    for file in (place / "open_clip_config.json", place.with_suffix(".json")):
        file.write_text(json.dumps(small, indent=2), encoding="utf-8")


def peak_of(gpu: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None: it is not known."""
    return next((peak for part, peak in PEAKS.items() if part in gpu), None)
