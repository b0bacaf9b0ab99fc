"""Both sides of the parity claim: a case says what is trained and how it is split; the engine trains it
on ranks, and `tests/unsplit.py` unsplit.

A batch has G samples: an image, c texts, a sound and a clip of each; the texts of sample p are at the
places c·p to c·p + c − 1. A sample may lack a modality: no row comes for it (`lacking`), or the row
comes and could not be loaded (`not_loaded`).
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import unsplit
from annotation_training import OF, WEIGHT, Annotations, annotations_of
from small_towers import (
    EMBED_DIM,
    FRAME_SIDE,
    MAX_TOKENS,
    MOST_FRAMES,
    SOUND_WIDTH,
    TOWERS,
    VOCAB,
    clip_tower,
    image_and_text_towers,
    sound_tower,
    with_lora,
)
from torch import Tensor
from unsplit import LOSS_SCALE

from models.losses import (
    InfoNCE,
    PlainLoss,
    Prefixed,
    Sigmoid,
    SimilarityKL,
    Views,
    build_loss,
    phrase_duplicates,
)
from models.towers.building import with_head
from models.towers.fusion import FusionSizes

SEED = 5
FIRST_INDEX = 10_000  # of the samples in their source
LR, WEIGHT_DECAY = 1e-3, 0.1
# what Muon steps of the towers vit+clip
MATRICES = (
    "image.encoder.layers.*_?.*.weight",
    "image.*.in_proj_weight",
    "text.encoder.layers.?.*.weight",
)
NAMES = ("image", "text", "audio", "video")
PAIRS = {
    "one": (("image", "text"),),
    "two": (("image", "text"), ("audio", "text")),
    "three": (("image", "text"), ("audio", "text"), ("image", "audio")),
    "four": (("image", "text"), ("video", "text"), ("audio", "text"), ("image", "video")),
}
WEIGHTS = {("image", "text"): 1.0, ("audio", "text"): 0.5, ("image", "audio"): 2.0}
WEIGHTS |= {("video", "text"): 0.7, ("image", "video"): 0.3}


def symmetric(first: Tensor, second: Tensor, scalars: Mapping[str, Tensor]) -> Tensor:
    """As InfoNCE."""
    logits, target = scalars["logit_scale"].exp() * first @ second.T, torch.arange(len(first))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def distance(first: Tensor, second: Tensor, scalars: Mapping[str, Tensor]) -> Tensor:
    """Without negatives, and without anything to learn."""
    return (first - second).square().sum(1).mean()


LOSSES = {  # of the other pairs than that of images and texts
    ("audio", "text"): InfoNCE(0.1),
    ("image", "audio"): Sigmoid(),
    ("video", "text"): InfoNCE(),
    ("image", "video"): Sigmoid(),
}
PLAIN = LOSSES | {
    ("image", "text"): PlainLoss(symmetric, {"logit_scale": 1.5}),
    ("audio", "text"): PlainLoss(distance),
    ("image", "audio"): PlainLoss(symmetric, {"logit_scale": 0.5}),
}


SMALL_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}


@dataclass(frozen=True)
class Case:
    """One way to split, and what to train."""

    layout: str
    stages: Any
    replicas: Any
    micro_batch_size: Any = "auto"
    pairs: str = "one"
    audio: str = "toy"
    further: str = ""  # a term that is no pair, see `further_of`
    annotated: str = ""  # "region" or "moment": a further pair, of these and phrases
    phrase_loss: str | None = None  # of that pair; not given: as of images and texts
    without: tuple[int, ...] = ()  # samples without annotations, beside those that never have any
    towers: str = "vit+clip"
    zero_stage: int = 1
    precision: str = "fp32"
    global_batch_size: int = 24
    steps: int = 1
    dropout: float = 0.0
    schedule: str = "batch_sync"
    imported: str | None = None  # the module that registers this schedule
    kept_micro_batches: Any = None  # under replay
    compile: Any = None
    checkpoint_interval: int = 0
    # branch -> [replica][micro-batch] -> samples; not given: equal, in order
    deals: dict[str, tuple] = field(default_factory=dict)
    # branch -> how many of its dealt micro-batches keep their activations
    kept_of_deals: dict[str, int] = field(default_factory=dict)
    deals_texts: bool = False  # the deal of the text branch is of texts, not of samples
    lacking: dict[str, tuple[int, ...]] = field(default_factory=dict)  # branch -> samples
    # branch -> places of its rows in the global batch
    not_loaded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    loss: str = "infonce"  # of images and texts; "plain": all are functions of one's own
    label_smoothing: float = 0.0
    prefixes: tuple[int, ...] = ()  # of the embeddings, which the loss is of, too
    duplicates: str | None = None  # what they are to each other; None: there are none
    texts_per_image: tuple[int, ...] = (1,)  # step by step, then from the first again
    full_texts: bool = (
        False  # as long as they can be: all micro-batches of a branch have equal shapes
    )
    weighted: tuple[str, ...] = ()  # branches whose micro-batches bring weights
    # the gradient_clipping block; limits of norms only, for the unsplit side
    clipping: dict[str, Any] = field(default_factory=dict)
    optimizer_groups: dict[str, Any] = field(default_factory=dict)  # the block
    lr: float = LR  # on the split side
    locked: dict[str, Any] = field(default_factory=dict)  # the block
    lora: dict[str, Any] = field(default_factory=dict)  # branch -> its adapters, as in the block
    ema: dict[str, Any] | None = None  # the block
    offload: bool = False  # the optimizer's state to the CPU
    optimizer: dict[str, Any] = field(default_factory=dict)  # the block; not given: AdamW
    # on the unsplit side a warm-up, linear, then constant
    scheduler: dict[str, Any] = field(default_factory=dict)
    source_starts: tuple[int, ...] | None = (
        None  # places of samples, of which each begins another source
    )
    skipped: tuple[int, ...] = ()  # steps whose update the unsplit side leaves out
    fusion: int = 0  # scales of the image tower's maps; 0: none
    loss_weights: dict[str, float] = field(default_factory=dict)
    evaluated: bool = False  # before the first step, on its batch
    loss_scale: int = LOSS_SCALE  # of fp16, a power of two
    seed: int = SEED
    name: str = ""

    @cached_property
    def branches(self) -> tuple[str, ...]:
        return tuple(name for name in NAMES if any(name in pair for pair in PAIRS[self.pairs]))

    @cached_property
    def world_size(self) -> int:
        if self.layout == "fork":
            return sum(self.stages[b] * self.replicas[b] for b in self.branches)
        return sum(self.stages.values()) * self.replicas

    def of(self, branch: str, written: Any) -> Any:
        """Of a value that is written for each branch, or for all."""
        return written[branch] if isinstance(written, dict) else written

    @property
    def config(self) -> dict[str, Any]:
        config = {
            "train_batch_size": self.global_batch_size,
            "optimizer": self.optimizer
            or {
                "type": "AdamW",
                "params": {"lr": self.lr, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
            },
            "zero_optimization": {"stage": self.zero_stage}
            | ({} if self.zero_stage == 3 else SMALL_BUCKETS),
            "branches": {
                "layout": self.layout,
                "stages": self.stages,
                "replicas": self.replicas,
                "micro_batch_size": self.micro_batch_size,
                "gradient_clipping": self.clipping,
                "optimizer_groups": self.optimizer_groups,
                "locked": self.locked,
                "train": {branch: {"lora": own} for branch, own in self.lora.items()},
                "ema": self.ema,
                "schedule": self.schedule,
                "kept_micro_batches": self.kept_micro_batches,
                "compile": self.compile,
            },
        }
        if self.offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if self.checkpoint_interval:
            config["pipeline"] = {"activation_checkpoint_interval": self.checkpoint_interval}
        if self.scheduler:
            config["scheduler"] = self.scheduler
        if self.precision == "fp16":
            power = self.loss_scale.bit_length() - 1
            fp16 = {"enabled": True, "initial_scale_power": power, "hysteresis": 1}
            config |= {"fp16": fp16}
        if self.precision == "bf16":
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        return config

    def texts_of(self, step: int) -> int:
        return self.texts_per_image[step % len(self.texts_per_image)]

    def samples(self, branch: str) -> Tensor:
        """Those of which a row comes."""
        lacking = self.lacking.get(branch, ())
        return torch.tensor([n for n in range(self.global_batch_size) if n not in lacking])

    def num_rows(self, step: int) -> dict[str, int]:
        """Of each branch, where samples lack any."""
        each = {"text": self.texts_of(step)}
        return {b: len(self.samples(b)) * each.get(b, 1) for b in self.branches if self.lacking}

    def rows_of(self, branch: str, samples: Tensor, step: int) -> Tensor:
        """The places of their images, or of their texts: all first ones before all second ones,
        unless each micro-batch is its own batch."""
        if branch != "text":
            return samples
        # [c, b]
        places = samples * self.texts_of(step) + torch.arange(self.texts_of(step))[:, None]
        return (places.T if self.schedule == "per_micro_batch" else places).flatten()

    def rows_of_share(self, branch: str, share: Tensor, step: int) -> Tensor:
        """The places of the rows of a micro-batch."""
        dealt = self.deals_texts and branch in self.deals
        return share if dealt else self.rows_of(branch, share, step)

    def keys(self, branch: str, rows: Tensor) -> Tensor:
        """int64, of rows at these places: some images, and some texts of any sample, are equal."""
        if branch == "image":
            return rows % 17 + 2**40
        return rows * 5 % (19 * max(self.texts_per_image)) - 2**40

    def weights(self, samples: Tensor) -> Tensor:
        """[len(samples)] int64, millionths; some are 0."""
        return samples * 7 % 5 * 250_000

    def lost(self, branches: tuple[str, ...], step: int = 0) -> set[int]:
        """Samples of which a row of these branches comes and could not be loaded."""
        each = {"text": self.texts_of(step)}
        return {place // each.get(b, 1) for b in branches for place in self.not_loaded.get(b, ())}

    @cached_property
    def annotations(self) -> Annotations:
        branches = (OF[self.annotated], "text")
        lacking = [place for branch in branches for place in self.lacking.get(branch, ())]
        not_seen, without = tuple(sorted(self.lost(branches))), (*self.without, *lacking)
        return annotations_of(self.annotated, self.global_batch_size, without, not_seen)

    def __str__(self) -> str:
        if self.name:
            return self.name
        parts = [self.layout, self.stages, self.replicas, self.micro_batch_size, self.towers]
        parts += [f"zero{self.zero_stage}", self.precision]
        parts += [self.pairs] if self.pairs != "one" else []
        parts += [self.audio] if self.audio != "toy" else []
        parts += [f"{self.annotated}s"] if self.annotated else []
        parts += [self.further] if self.further else []
        parts += [self.schedule] if self.schedule != "batch_sync" else []
        parts += [f"keep{self.kept_micro_batches}"] if self.kept_micro_batches is not None else []
        parts += [f"checkpoint{self.checkpoint_interval}"] if self.checkpoint_interval else []
        parts += ["compile", self.compile] if self.compile else []
        parts += [f"dropout{self.dropout}"] if self.dropout else []
        parts += [f"packed{'texts' * self.deals_texts}"] if self.deals else []
        parts += ["lacking"] if self.lacking else []
        parts += ["not_loaded"] if self.not_loaded else []
        parts += [self.loss] if self.loss != "infonce" else []
        parts += [f"smoothing{self.label_smoothing}"] if self.label_smoothing else []
        parts += [f"prefixes{self.prefixes}"] if self.prefixes else []
        parts += [self.duplicates] if self.duplicates else []
        parts += ["texts", *self.texts_per_image] if self.texts_per_image != (1,) else []
        parts += ["weighted"] if self.weighted else []
        parts += ["sources"] if self.source_starts else []
        parts += ["groups"] if self.optimizer_groups else []
        parts += ["locked", self.locked] if self.locked else []
        parts += ["lora", *self.lora] if self.lora else []
        parts += ["ema"] if self.ema else []
        parts += ["offload"] if self.offload else []
        parts += [f"fusion{self.fusion}"] if self.fusion else []
        return " ".join(str(p) for p in parts).replace("'", "").replace(" ", "")


def fork_of(image: tuple[int, int], text: tuple[int, int], micro_batch_size="auto", **more) -> Case:
    """`image`, `text`: (stages, replicas)."""
    stages, replicas = ({"image": image[n], "text": text[n]} for n in range(2))
    return Case("fork", stages, replicas, micro_batch_size, **more)


def merged_of(stages: int, replicas: int, micro_batch_size: int, **more) -> Case:
    return Case("merged", {"merged": stages}, replicas, micro_batch_size, **more)


# -- what is trained


def _built_loss(case: Case, name: str):
    """Where there are no duplicates it does not matter what they are, but that it is allowed."""
    smoothing = case.label_smoothing if name == "infonce" else 0.0
    loss = build_loss(name, smoothing, case.duplicates or phrase_duplicates(name))
    return Prefixed(loss, case.prefixes) if case.prefixes else loss


def similar(first: Tensor, second: Tensor, third: Tensor, scalars: Mapping[str, Tensor]) -> Tensor:
    """Any function of three branches."""
    triples = (first * second) @ third.T * scalars["scale"]
    return triples.logsumexp(1).mean() - triples.diagonal().mean() + distance(second, third, {}) / 9


def further_of(case: Case) -> list[Any]:
    """A term that is no pair."""
    from engine.objective import Joint

    if case.further == "views":  # the texts of an image, with each other
        loss = _built_loss(replace(case, prefixes=(), label_smoothing=0.0), "infonce")
        if case.loss == "sigmoid":
            loss = Sigmoid(targets=loss.targets)
        joint: Any = Views(loss)
        joint = Prefixed(joint, case.prefixes) if case.prefixes else joint
        return [Joint(("text",), joint, WEIGHT, "text_text_")]
    if case.further == "similarities":
        return [Joint(NAMES, SimilarityKL(30.0), WEIGHT, "taught_", "distillation")]
    if case.further == "of_three":
        loss = PlainLoss(similar, {"scale": 3.0})
        return [Joint(NAMES[:3], loss, WEIGHT, "three_", "likeness")]
    return []


def pairs_of(case: Case) -> list[Any]:
    from engine.objective import Pair

    losses = PLAIN
    if case.loss != "plain":
        losses = LOSSES | {("image", "text"): _built_loss(case, case.loss)}
    found = [
        Pair(
            *pair,
            losses[pair],
            weight=WEIGHTS[pair],
            matching=recording_matching() if case.fusion and pair == ("image", "text") else None,
            prefix="" if pair == ("image", "text") else f"{pair[0]}_{pair[1]}_",
        )
        for pair in PAIRS[case.pairs]
    ]
    if name := case.annotated:
        loss = _built_loss(case, case.phrase_loss or case.loss.replace("plain", "infonce"))
        made = (name, "phrase")
        found.append(Pair(OF[name], "text", loss, WEIGHT, prefix=f"{name}_", made=made))
    return found


def trained(case: Case) -> tuple[Any, dict[str, Any], int]:
    """The objective, the towers with their heads, the images' size."""
    from engine.objective import Branch, Objective

    bare = image_and_text_towers(case.towers, case.dropout)
    if "audio" in case.branches:
        bare["audio"] = sound_tower(case.audio)
    if "video" in case.branches:
        bare["video"] = clip_tower()
    sizes = FusionSizes(layers=2, width=16, heads=2, scales=case.fusion) if case.fusion else None
    pairs = (*pairs_of(case), *further_of(case))
    objective = Objective(tuple(Branch(name, tower.inputs) for name, tower in bare.items()), pairs)
    towers = {}
    for name, tower in bare.items():
        scalars = objective.scalars_of(name)
        fusion = sizes if name in ("image", "text") else None
        annotated = case.annotated if name in (OF.get(case.annotated), "text") else None
        whole = with_head(tower, EMBED_DIM, scalars, fusion, annotations=annotated or None)
        towers[name] = with_lora(whole, case.lora.get(name))
    return objective, towers, TOWERS[case.towers][2]


def towers_of(case: Case) -> tuple[dict[str, Any], int]:
    return trained(case)[1:]


@cache
def recording_matching():
    """The loss of pairs, and a note of every negative that it draws on this rank: (branch, row,
    negative)."""
    from models.losses import Matching

    class Recording(Matching):
        noted: ClassVar[list[tuple[str, int, int]]] = []

        def negatives(self, sides, branch, mine, parameters, seed):
            drawn = super().negatives(sides, branch, mine, parameters, seed)
            self.noted.extend(zip([branch] * len(mine), mine.tolist(), drawn.tolist()))
            return drawn

    return Recording()


# -- batches


def global_batch(case: Case, step: int, image_size: int) -> dict[str, Tensor]:
    """Random images, and texts of varying length so that masks and padding matter."""
    generator = torch.Generator().manual_seed(1000 + step)
    pixel_values = torch.randn(
        case.global_batch_size, 3, image_size, image_size, generator=generator
    )
    count = case.global_batch_size * case.texts_of(step)
    input_ids = torch.randint(5, VOCAB, (count, MAX_TOKENS), generator=generator)
    lengths = torch.randint(
        MAX_TOKENS if case.full_texts else 4, MAX_TOKENS + 1, (count,), generator=generator
    )
    attention_mask = (torch.arange(MAX_TOKENS) < lengths[:, None]).long()
    # 2 ends each text, 0 pads it
    input_ids = input_ids.scatter(1, lengths[:, None] - 1, 2) * attention_mask
    batch = {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask}
    if "audio" in case.branches:
        shape: tuple[int, ...] = (SOUND_WIDTH,)
        if case.audio != "toy":
            shape = sound_tower(case.audio).example(1)["input_features"].shape[1:]
        draw = torch.Generator().manual_seed(77 + step)
        batch["audio"] = torch.randn(case.global_batch_size, *shape, generator=draw)
    return batch


def clips(places: Tensor) -> dict[str, Tensor]:
    """Those of these samples, of 1 to `MOST_FRAMES` frames."""
    numbers = [1 + place % MOST_FRAMES for place in places.tolist()]
    frames = [
        torch.randn(number, 3, FRAME_SIDE, FRAME_SIDE, generator=torch.Generator().manual_seed(p))
        for p, number in zip(places.tolist(), numbers)
    ]
    lengths = torch.tensor(numbers, dtype=torch.int64)
    return {
        "video_frames": torch.cat(frames),
        "video_row": torch.arange(len(numbers)).repeat_interleave(lengths),
        "video_clips": lengths,
        "video_time": torch.cat([0.3 * torch.arange(n) for n in numbers]),
    }


def labels_of(case: Case, branch: str, position: Tensor, texts: int) -> dict[str, Tensor]:
    """What a micro-batch says of the rows at `position`, and of the annotations or phrases that come
    with them. `texts`: of each image."""
    sample = position // (texts if branch == "text" else 1)
    index = sample + FIRST_INDEX
    broken = torch.isin(position, torch.tensor(case.not_loaded.get(branch, ()), dtype=torch.int64))
    labels = {
        f"{branch}_position": position,
        f"{branch}_index": torch.where(broken, -1 - index, index),
    }
    if case.duplicates and branch in ("image", "text"):
        labels[f"{branch}_key"] = case.keys(branch, position)
    if branch == OF.get(case.annotated):
        labels |= case.annotations.of_values(sample, FIRST_INDEX)
    if case.annotated and branch == "text":  # with the first caption
        labels |= case.annotations.of_texts(sample[position % texts == 0], FIRST_INDEX)
    if branch in case.weighted:
        for index in [name for name in labels if name.endswith("_index")]:
            given = torch.where(labels[index] < 0, -1 - labels[index], labels[index])
            weight = case.weights(given - FIRST_INDEX)
            labels[f"{index.removesuffix('_index')}_weight"] = weight
    return labels


def micro_batch(
    case: Case, batch: dict[str, Tensor], branch: str, position: Tensor
) -> dict[str, Tensor]:
    """The rows at `position`, texts cut to their longest: shapes differ from micro-batch to
    micro-batch."""
    texts = len(batch["input_ids"]) // case.global_batch_size
    labels = labels_of(case, branch, position, texts)
    if branch == OF.get(case.annotated):
        labels |= case.annotations.where(labels[f"{case.annotated}_position"], position)
    if branch == "video":
        return clips(position) | labels
    if branch == "audio":
        name = "samples" if case.audio == "toy" else "input_features"
        return {name: batch["audio"][position], **labels}
    if branch == "image":
        return {"pixel_values": batch["pixel_values"][position], **labels}
    mask = batch["attention_mask"][position]
    longest = int(mask.sum(1).max())
    values = {
        "input_ids": batch["input_ids"][position][:, :longest],
        "attention_mask": mask[:, :longest],
    }
    if case.annotated:
        values = case.annotations.behind(values, labels["phrase_key"])
    return values | labels


def dealt(case: Case, branch: str, micro_batch_size: int) -> list[Tensor]:
    """The samples of each micro-batch, replica by replica."""
    if branch in case.deals:
        return [torch.tensor(places) for replica in case.deals[branch] for places in replica]
    samples = case.samples(branch)
    if branch not in case.lacking:
        return list(samples.split(micro_batch_size))
    replicas = case.of(branch, case.replicas)
    number = case.global_batch_size // replicas // micro_batch_size
    return [part for own in samples.tensor_split(replicas) for part in own.tensor_split(number)]


# -- split


def make_engine(case: Case, build_layer: Callable | None = None):
    """The engine of this rank, its plan and the images' size. `build_layer`: default, the layers
    as they come."""
    from datetime import timedelta
    from unittest import mock

    import torch.distributed as dist
    from cost_models import proportional
    from deepspeed.accelerator import get_accelerator

    from engine.build import build_engine
    from engine.config.reading import check_config
    from engine.planning.planner import plan_run

    if case.imported:
        importlib.import_module(case.imported)
    objective, towers, image_size = trained(case)
    config, block = check_config(case.config, case.branches)
    # equal layers: to count what each computes takes longer than the steps that are compared
    costs = proportional(
        {b: [1.0 if spec.num_parameters else 0.1 for spec in t.specs] for b, t in towers.items()},
        compared=PAIRS[case.pairs] if len(objective.terms) > 1 else (),
    )
    layers = {
        b: [
            replace(
                own,
                num_parameters=spec.num_parameters,
                num_learned=getattr(spec, "num_learned", None),
            )
            for own, spec in zip(costs.layers[b], t.specs)
        ]
        for b, t in towers.items()
    }
    plan = plan_run(config, block, dist.get_world_size(), replace(costs, layers=layers))
    # slow on most CPUs, but right
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        engine = build_engine(
            plan,
            config,
            layers={b: t.specs for b, t in towers.items()},
            build_layer=build_layer or (lambda spec: spec.build(case.seed)),
            objective=objective,
            embed_dim=EMBED_DIM,
            total_num_steps=10,
            seed=case.seed,
            timeout=timedelta(seconds=300),
            equal_shares=not case.deals and not case.lacking,
            source_starts=case.source_starts
            and [start + FIRST_INDEX for start in case.source_starts],
        )
    return engine, plan, image_size


def with_loss(objective, loss):
    """An objective of one pair, with another loss."""
    return replace(objective, terms=(replace(objective.terms[0], loss=loss),))


def micro_batches_of_rank(
    case: Case, engine, step: int, image_size: int
) -> Iterator[dict[str, Tensor]] | None:
    """What the loader of this rank yields: every branch that enters here, micro-batch by
    micro-batch."""
    batch = global_batch(case, step, image_size)
    branches = engine.stage.loads
    if not branches:
        return None
    number = num_micro_batches(case, engine)
    shares = {
        b: dealt(case, b, engine.batches[b].micro_batch_size)[
            engine.comm.replica * number : (engine.comm.replica + 1) * number
        ]
        for b in branches
    }
    loaded = [
        {
            b: micro_batch(case, batch, b, case.rows_of_share(b, own, step))
            for b, own in zip(branches, each)
        }
        for each in zip(*shares.values())
    ]
    return iter(
        [
            {name: tensor for of_branch in one.values() for name, tensor in of_branch.items()}
            for one in loaded
        ]
    )


def num_micro_batches(case: Case, engine) -> int:
    """Of each replica of this line: a deal may have another number than was planned."""
    branch = next(iter(engine.stage.layers))
    return (
        len(case.deals[branch][0])
        if branch in case.deals
        else engine.batches[branch].num_micro_batches
    )


def shares_of_step(case: Case, engine, step: int) -> dict[str, list[int]]:
    """Rows of each replica, by the names of those that are made here. In odd steps, and where a
    micro-batch is a batch, last stages tell each other."""
    found: dict[str, list[int]] = {}
    if step % 2 or case.schedule == "per_micro_batch":
        return found
    for branch in engine.stage.last_of:
        replicas = engine.stage.replicas
        parts = dealt(case, branch, engine.batches[branch].micro_batch_size)
        number = len(parts) // replicas
        for place, own in enumerate(parts):
            rows = case.rows_of_share(branch, own, step)
            for label, values in labels_of(case, branch, rows, case.texts_of(step)).items():
                if label.endswith("_position"):
                    of_replicas = found.setdefault(label.removesuffix("_position"), [0] * replicas)
                    of_replicas[place // number] += len(values)
    return found


def spec_of_step(case: Case, engine, step: int):
    from engine.executor import StepSpec

    made = {}
    if case.annotated:
        number = len(case.annotations.sample)
        made = {case.annotated: number, "phrase": number + len(case.annotations.negative)}
    return StepSpec(
        num_micro_batches=num_micro_batches(case, engine),
        num_kept=case.kept_of_deals.get(next(iter(engine.stage.layers))),
        rows_per_sample={"text": case.texts_of(step)},
        num_rows=case.num_rows(step),
        loss_weights=case.loss_weights,
        shares=shares_of_step(case, engine, step),
        num_made=made,
    )


def train_split(case: Case) -> dict[str, Any]:
    """On each rank: losses, norms, the gradients of the first step as (name, offset, flat piece),
    the final parameters."""
    engine, plan, image_size = make_engine(case)
    recording_matching().noted.clear()  # of a case before
    gradients: list[tuple[str, int, Tensor]] = []

    def capture(*_):
        if engine.global_steps == 0:
            gradients.extend(gradient_pieces(engine))

    # after the clipping's own hook: without limits it only measures
    engine.backend.optimizer.register_step_pre_hook(capture)
    forwards: Counter[str] = Counter()
    for name, layer in engine.module.named_children():
        layer.register_forward_hook(lambda *_, name=name.replace("/", "."): forwards.update([name]))
    measured = evaluate_split(case, engine, image_size) if case.evaluated else {}
    metrics = [
        engine.train_batch(
            micro_batches_of_rank(case, engine, step, image_size), spec_of_step(case, engine, step)
        )
        for step in range(case.steps)
    ]
    return {
        "metrics": metrics,
        "measured": measured,
        "gradients": gradients,
        "parameters": {
            n: whole(p).float().clone().cpu() for n, p in engine.module.canonical_parameters.items()
        },
        "buffers": {
            n: b.detach().clone().cpu() for n, b in engine.module.canonical_buffers.items()
        },
        "drawn": list(recording_matching().noted) if case.fusion else [],
        "stage": engine.stage.name,
        "optimizer": engine.backend.wrapper,
        "unaligned": [
            name
            for name, p in engine.module.canonical_parameters.items()
            if p.numel() % 8 == 0 and not hasattr(p, "full_tensor") and p.data_ptr() % 16
        ],
        "forwards": dict(forwards),  # by layer, in all steps
        "gradient_bytes": engine.comm.gradients_out.sent_bytes
        if engine.comm.gradients_out is not None
        else 0,  # to the stage before
        "num_state_numbers": sum(
            t.numel()
            for own in engine.backend.optimizer.state.values()
            for t in own.values()
            if torch.is_tensor(t)
        ),
    }


def evaluate_split(case: Case, engine, image_size: int) -> dict[str, dict[str, Any]]:
    """By comparison the sums of `alikeness` in both directions, and the number of samples."""
    measured = engine.evaluate(
        micro_batches_of_rank(case, engine, 0, image_size),
        num_micro_batches(case, engine),
        case.global_batch_size,
        alikeness,
    )
    return {
        name: {way: sums.tolist() for way, sums in own.directions.items()} | {"n": own.num_samples}
        for name, own in measured.items()
    }


def alikeness(sides: Any, branch: str, mine: Tensor) -> Tensor:
    """[5] sums over the rows that are somebody's: their similarity to their partner; to all of the
    same sample; to all others; its square; 1."""
    own, other = sides[branch], sides[next(name for name in sides if name != branch)]
    mine = mine[own.label[mine] >= 0]
    partner = own.label[mine, None] == other.label
    together = partner
    if own.sample is not None:
        together = (own.sample[mine, None] == other.sample) & (other.label >= 0)
    return sums_of(own.embeds[mine] @ other.embeds.T, partner, together)


def sums_of(similarity: Tensor, partner: Tensor, together: Tensor) -> Tensor:
    sums = [(partner * similarity).sum(), (together * similarity).sum()]
    sums += [similarity.sum(), similarity.square().sum()]
    return torch.stack([*sums, similarity.new_tensor(float(len(similarity)))])


def train_scalars(case: Case) -> dict[str, Any]:
    """On each rank, of each step: the logarithm of the scale as this rank's optimizer holds it
    before, if it does, and the scale that the loss used, as the metrics have it; the dtype of the
    parameter."""
    engine, _, image_size = make_engine(case)
    parameter, steps = engine.module.scalars.get("logit_scale"), []
    for step in range(case.steps):
        stepped = None if parameter is None else engine.backend.stepped(parameter)
        held = None if stepped is None or not len(stepped) else float(stepped)
        batches = micro_batches_of_rank(case, engine, step, image_size)
        steps.append((held, engine.train_batch(batches).scalars["logit_scale_exp"]))
    dtype = None if parameter is None else str(parameter.dtype)
    return {"steps": steps, "dtype": dtype}


def disagreement(case: Case) -> str:
    """What each rank says when the texts of a batch are those of other samples than its images."""
    engine, _, image_size = make_engine(case)
    loaded = micro_batches_of_rank(case, engine, 0, image_size)
    if loaded is not None:
        loaded = iter(
            [
                {
                    name: tensor.roll(1) if name == "text_index" else tensor
                    for name, tensor in one.items()
                }
                for one in loaded
            ]
        )
    try:
        engine.train_batch(loaded)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def refusal(case: Case) -> str:
    """What each rank says when it is asked for the first step."""
    from engine.executor import StepSpec

    engine, _, image_size = make_engine(case)
    try:
        engine.train_batch(
            micro_batches_of_rank(case, engine, 0, image_size),
            StepSpec(rows_per_sample={"text": case.texts_of(1)}, loss_weights=case.loss_weights),
        )
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def whole(parameter: Tensor) -> Tensor:
    """Of all replicas, where each has a share: they call it together."""
    full = getattr(parameter.detach(), "full_tensor", None)
    return full() if full else parameter.detach()


def gradient_pieces(engine) -> list[tuple[str, int, Tensor]]:
    """Inside the optimizer's step: (name, offset, flat piece) of what this rank has of each
    gradient."""
    pieces, offsets = [], {shard.name: shard.offset for shard in engine.backend.shards()}
    for name, parameter in engine.module.canonical_parameters.items():
        gradient = engine.backend.gradient(parameter) if parameter.requires_grad else None
        if gradient is not None:
            pieces.append((name, offsets[name], gradient.flatten().float().clone().cpu()))
    return pieces


# -- unsplit


def recipe_of(case: Case) -> unsplit.Recipe:
    from engine.module import layer_seed

    names = ("locked", "optimizer_groups", "scheduler", "clipping", "skipped", "precision")
    given = {name: getattr(case, name) for name in (*names, "loss_scale")}
    if case.optimizer.get("type") == "Muon":
        patterns = case.optimizer_groups.get("muon", MATRICES)
        given |= {"muon": case.optimizer["params"], "matrices": patterns}
    return unsplit.Recipe(case.seed, layer_seed, lr=LR, weight_decay=WEIGHT_DECAY, **given)


def whole_batch(case: Case, image_size: int, step: int) -> unsplit.Batch:
    batch, micro_batches = global_batch(case, step, image_size), {}
    for branch in case.branches:
        shares = dealt(case, branch, case.of(branch, case.micro_batch_size))
        rows = [case.rows_of_share(branch, own, step) for own in shares]
        micro_batches[branch] = [micro_batch(case, batch, branch, own) for own in rows]
    apart = case.schedule == "per_micro_batch"
    number = len(micro_batches["image"]) // case.of("image", case.replicas) if apart else 1
    return unsplit.Batch(
        micro_batches,
        {branch: case.of(branch, case.replicas) for branch in case.branches},
        {"text": case.texts_of(step)},
        number,
        case.loss_weights,
    )


def train_whole(case: Case) -> dict[str, Any]:
    objective, towers, image_size = trained(case)
    batches = map(partial(whole_batch, case, image_size), range(case.steps))
    return unsplit.train(objective, towers, batches, recipe_of(case))


def evaluate_whole(case: Case) -> dict[str, dict[str, Any]]:
    """As `evaluate_split`."""
    objective, towers, image_size = trained(case)
    batch = whole_batch(replace(case, schedule="batch_sync"), image_size, 0)
    found = {}
    for name, sides in unsplit.held_out(objective, towers, batch, recipe_of(case)).items():
        first, second, belongs, _ = sides
        somebodys = belongs.any(0)
        together = (first.index[:, None] == second.index) & somebodys
        similarity = first.embeds @ second.embeds.T
        forth = sums_of(similarity, belongs, together)
        back = sums_of(*(each.T[somebodys] for each in (similarity, belongs, together)))
        a, b = next(each.rows for each in objective.comparisons if each.name == name)
        found[name] = {f"{a}_to_{b}": forth.tolist(), f"{b}_to_{a}": back.tolist()}
        found[name]["n"] = len(first.place)
    return found


# -- the comparison


def assemble(results: list[dict[str, Any]], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Whole gradients from the ranks' pieces: every element must be given by someone."""
    whole = {name: torch.full((shape.numel(),), float("nan")) for name, shape in shapes.items()}
    for result in results:
        for name, offset, piece in result["gradients"]:
            whole[name][offset : offset + piece.numel()] = piece
    return {name: flat.view(shapes[name]) for name, flat in whole.items()}


RELATIVE, EMBEDDING_TABLE, FLOOR = 1e-5, 1e-4, 1e-7


def check_gradients(
    gradients: dict[str, Tensor], reference: dict[str, Tensor], factor: float = 1.0
) -> None:
    """fp32: the same sums are taken in another order (over replicas, rows, micro-batches), which
    moves the last bits of numbers of about the size of a gradient's largest parts. A gradient is
    held to 1e-5 of its own norm (embedding tables to 1e-4: a row is the sum of few terms of both
    signs), but not below 1e-7 of the norm of its group: key biases have a true gradient of zero,
    since a constant added to every key does not change a softmax, and what is left of them is
    rounding. `factor`: of all these, where the reference was computed by other kernels.
    """
    group_norm = {
        group: math.sqrt(
            sum(
                float(g.double().square().sum())
                for n, g in reference.items()
                if n.startswith(group)
            )
        )
        for group in {name.split(".")[0] for name in reference}
    }
    for name, expected in reference.items():
        relative = EMBEDDING_TABLE if "embedding" in name and expected.dim() == 2 else RELATIVE
        floor = FLOOR * group_norm[name.split(".")[0]]
        allowed = factor * max(relative * float(expected.norm()), floor)
        error = float((gradients[name] - expected).norm())
        assert error <= allowed, f"{name}: gradient is off by {error:.2e}, allowed {allowed:.2e}"


def check_all_gradients(
    results: list[dict[str, Any]], reference: dict[str, Any], factor: float = 1.0
) -> None:
    """Those of `train_split` on all ranks against those of `train_whole`."""
    shapes = {name: gradient.shape for name, gradient in reference["gradients"].items()}
    check_gradients(assemble(results, shapes), reference["gradients"], factor)
