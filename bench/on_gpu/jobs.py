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
    largest one is foretold."""

    embed_dim: int
    flops: float
    probes: tuple[int, int]


MODELS = {
    "ViT-B-32": Model(512, 44.331e9, (128, 256)),
    "ViT-L-14": Model(768, 525.976e9, (16, 32)),
    "ViT-B-16": Model(512, 123.259e9, (64, 128)),
    "RN50": Model(1024, 54.555e9, (64, 128)),
}
TINY_PROBES = (4, 8)
# What OpenCLIP's configuration of a model becomes with --tiny: one layer of each kind, 32 pixels.
TINY_VISION = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
TINY_RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16}
TINY_TEXT = {"width": 64, "heads": 1, "layers": 1}


@dataclass(frozen=True)
class Way:
    """One way to train a model. `needs_s`: with less time than that on a GPU it is not begun."""

    title: str
    program: Literal["wye", "open_clip"]
    needs_s: float
    compiled: bool = False
    accumulates: bool = False  # MICRO_BATCHES forwards without gradient, then each again
    predicts: bool = False  # nothing is trained


WAYS = {
    "open_clip": Way("OpenCLIP", "open_clip", 30),
    "wye": Way("Wye", "wye", 30),
    "open_clip_compiled": Way("OpenCLIP, torch.compile", "open_clip", 100, compiled=True),
    "wye_compiled": Way("Wye, compile: layers", "wye", 120, compiled=True),
    "open_clip_accum": Way("OpenCLIP, --accum-freq 4", "open_clip", 30, accumulates=True),
    "wye_replay": Way("Wye, replay", "wye", 30, accumulates=True),
    "wye_predict": Way("Wye, predicted", "wye", 30, predicts=True),
    "wye_largest": Way("Wye, its largest batch", "wye", 30),
}
# The most important first: ways, and the models for which they come now; within a line each model
# has its turn, and the two programs alternate.
ORDER = (
    (("open_clip", "wye"), tuple(MODELS)),
    (("wye_predict",), tuple(MODELS)),
    (("open_clip_compiled", "wye_compiled"), ("ViT-L-14", "ViT-B-32")),
    (("open_clip_accum", "wye_replay"), tuple(MODELS)),
    (("open_clip_compiled", "wye_compiled"), ("ViT-B-16", "RN50")),
    (("wye_largest",), tuple(MODELS)),
)


@dataclass(frozen=True)
class Job:
    """One measurement, as the process that makes it gets it. `batch`: samples of an optimizer step;
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
        folder = Path(self.folder) / "models" / f"{self.model}-tiny"
        return str(folder) if self.tiny else self.model

    @property
    def probes(self) -> tuple[int, int]:
        return TINY_PROBES if self.tiny else self.spec.probes

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def turns(models: Collection[str], ways: Collection[str]) -> Iterator[tuple[str, str]]:
    """(model, way) in the order in which they are measured."""
    for group, of_models in ORDER:
        for model in of_models:
            yield from ((model, way) for way in group if model in models and way in ways)


def batches_for(
    way: str, model: str, found: Mapping[str, Any], tiny: bool
) -> tuple[int | None, int | None]:
    """(samples of a step, of them in a micro-batch), by the largest batch that OpenCLIP held.
    `found`: records by `MODEL/WAY`. Without OpenCLIP's, four times the larger probe."""
    probes = TINY_PROBES if tiny else MODELS[model].probes
    largest = found.get(f"{model}/open_clip", {}).get("batch") or 4 * probes[1]
    if way == "open_clip":
        return None, None
    if way == "wye_largest":
        foretold = found.get(f"{model}/wye", {}).get("largest_foretold")
        return foretold, foretold
    if way == "open_clip_accum":
        # it keeps all images on the GPU besides, and one more set of embeddings
        largest = max(2, int(0.93 * largest))
    return MICRO_BATCHES * largest if WAYS[way].accumulates else largest, largest


def write_tiny(place: Path, configuration: Mapping[str, Any]) -> None:
    """OpenCLIP's `configuration` of a model made small: as a folder for this program, and beside it
    as a file for `open_clip.add_model_config`."""
    vision = configuration["vision_cfg"]
    small = TINY_RESNET if isinstance(vision["layers"], list) else TINY_VISION
    text = {**configuration["text_cfg"], **TINY_TEXT}
    config = {**configuration, "vision_cfg": {**vision, **small}, "text_cfg": text}
    place.mkdir(parents=True, exist_ok=True)
    for file in (place / "open_clip_config.json", place.with_suffix(".json")):
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def peak_of(gpu: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None: it is not known."""
    return next((peak for part, peak in PEAKS.items() if part in gpu), None)
