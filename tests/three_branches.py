"""Three branches, split over ranks by the engine and unsplit in plain torch: an image, a text, and
audio, by a toy tower that the engine has never heard of or by one of `AUDIO_TOWERS`; and four, with
clips of one to three frames.

The unsplit side shares no code with the engine: whole towers in one process, and autograd through
one loss over the global batch. A sample may lack a modality: no row comes for it (`lacking`), or
the row comes and could not be loaded (`not_loaded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from split_training import (
    EMBED_DIM,
    FIRST_INDEX,
    SEED,
    Case,
    global_batch,
    gradient_pieces,
    micro_batch,
    towers_of,
)
from torch import Tensor, nn

from models.losses import InfoNCE, PlainLoss, Sigmoid
from models.towers.head import head
from models.towers.layers import Layer, LayerSpec, Tower, reset

SOUND_WIDTH = 12
PAIRS = {
    "two": (("image", "text"), ("audio", "text")),
    "three": (("image", "text"), ("audio", "text"), ("image", "audio")),
    "four": (("image", "text"), ("video", "text"), ("audio", "text"), ("image", "video")),
}
WEIGHTS = {("image", "text"): 1.0, ("audio", "text"): 0.5, ("image", "audio"): 2.0}
WEIGHTS |= {("video", "text"): 0.7, ("image", "video"): 0.3}


@dataclass(frozen=True)
class ThreeBranches:
    """One way to split. `lacking`, `not_loaded`: branch -> places of samples."""

    layout: str
    stages: Any
    replicas: Any
    micro_batch_size: Any
    pairs: str = "two"
    schedule: str = "batch_sync"
    global_batch_size: int = 24
    zero_stage: int = 1
    audio: str = "toy"
    plain: bool = False  # all losses are functions of one's own
    lacking: dict[str, tuple[int, ...]] = field(default_factory=dict)
    not_loaded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    loss_weights: dict[str, float] = field(default_factory=dict)  # as `train_batch` takes them
    keys: dict[str, Any] = field(default_factory=dict)  # further ones of the JSON
    locked: tuple[str, ...] = ()  # branches whose towers keep their weights, heads apart

    @cached_property
    def world_size(self) -> int:
        if self.layout == "fork":
            return sum(self.stages[b] * self.replicas[b] for b in self.stages)
        return sum(self.stages.values()) * self.replicas

    def __str__(self) -> str:
        parts = [self.layout, self.stages, self.replicas, self.micro_batch_size]
        parts += [self.pairs, self.schedule]
        parts += [self.audio] if self.audio != "toy" else []
        parts += ["plain"] if self.plain else []
        parts += ["lacking"] if self.lacking else []
        parts += ["not_loaded"] if self.not_loaded else []
        parts += ["weights"] if self.loss_weights else []
        parts += ["locked", *self.locked] if self.locked else []
        return " ".join(map(str, parts)).replace("'", "").replace(" ", "")

    def rows(self, branch: str) -> list[int]:
        """The samples that come."""
        lacking = self.lacking.get(branch, ())
        return [place for place in range(self.global_batch_size) if place not in lacking]

    def shares(self, branch: str, replicas: int, number: int) -> list[list[Tensor]]:
        """[replica][micro-batch] -> places."""
        places = torch.tensor(self.rows(branch))
        return [list(part.tensor_split(number)) for part in places.tensor_split(replicas)]


# -- a modality that the engine has never heard of


class SoundStem(Layer):
    reads, makes, drops = ("samples",), ("audio_hidden",), ("samples",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SOUND_WIDTH, 16)

    def compute(self, samples: Tensor) -> Tensor:
        return torch.tanh(self.linear(samples))


class SoundBlock(Layer):
    reads = makes = ("audio_hidden",)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.1)

    def compute(self, sound_hidden: Tensor) -> Tensor:
        return sound_hidden + self.dropout(F.gelu(self.linear(self.norm(sound_hidden))))


class SoundPool(Layer):
    reads, makes, drops = ("audio_hidden",), ("audio_features",), ("audio_hidden",)

    def compute(self, sound_hidden: Tensor) -> Tensor:
        return sound_hidden * 1


def sound_tower(scalars: dict[str, float]) -> Tower:
    specs = []
    with torch.device("meta"):
        for name, layer in (
            ("stem", SoundStem()),
            ("block0", SoundBlock()),
            ("block1", SoundBlock()),
            ("pool", SoundPool()),
        ):
            layer.canonical_names = {own: f"audio.{name}.{own}" for own in layer.state_dict()}
            specs.append(LayerSpec(f"audio.{name}", "audio", layer, reset))
    return Tower("audio", "toy", 16, (*specs, head("audio", 16, EMBED_DIM, scalars)), {})


# without batch normalisation, which sees the split, and so without HTSAT
AUDIO_TOWERS = {
    "whisper": "hf:whisper-tiny:d_model=32,encoder_layers=2,encoder_attention_heads=2,"
    "encoder_ffn_dim=48,num_mel_bins=8,max_source_positions=50,dropout=0.1",
    "ast": "hf:ast:hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48,"
    "num_mel_bins=16,max_length=40,attention_probs_dropout_prob=0.1",
    "vit": "vit_b_32:patch_size=8,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=48,dropout=0.1",
}


def real_audio_tower(name: str, scalars: dict[str, float]) -> Tower:
    from models.towers.audio import audio_tower
    from models.towers.building import with_head

    return with_head(audio_tower(AUDIO_TOWERS[name], size=32), EMBED_DIM, scalars)


VIDEO_TOWER = (
    "vit_b_32:patch_size=8,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=48,dropout=0.1,"
    "time=transformer,time_layers=2"
)
MOST_FRAMES, FRAME_SIDE = 3, 16


def real_video_tower(scalars: dict[str, float]) -> Tower:
    """What begins as zeros, and would leave others without a gradient, does not here."""
    from models.towers.building import with_head
    from models.towers.video import video_tower

    tower = video_tower(VIDEO_TOWER, FRAME_SIDE, MOST_FRAMES)
    specs = [
        replace(spec, initialise=reset) if spec.name.startswith("video.time.") else spec
        for spec in tower.specs
    ]
    return with_head(replace(tower, specs=tuple(specs)), EMBED_DIM, scalars)


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


def symmetric(first: Tensor, second: Tensor, scalars: dict[str, Tensor]) -> Tensor:
    """As InfoNCE."""
    logits, target = scalars["logit_scale"].exp() * first @ second.T, torch.arange(len(first))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def distance(first: Tensor, second: Tensor, scalars: dict[str, Tensor]) -> Tensor:
    """Without negatives, and without anything to learn."""
    return (first - second).square().sum(1).mean()


def all_of(case: ThreeBranches):
    """The objective, the towers with their heads, the images' size."""
    from engine.objective import Branch, Objective, Pair

    losses = {
        ("image", "text"): InfoNCE(),
        ("audio", "text"): InfoNCE(0.1),
        ("image", "audio"): Sigmoid(),
        ("video", "text"): InfoNCE(),
        ("image", "video"): Sigmoid(),
    }
    if case.plain:
        losses = {
            ("image", "text"): PlainLoss(symmetric, {"logit_scale": 1.5}),
            ("audio", "text"): PlainLoss(distance),
            ("image", "audio"): PlainLoss(symmetric, {"logit_scale": 0.5}),
        }
    pairs = tuple(
        Pair(
            *pair,
            losses[pair],
            weight=WEIGHTS[pair],
            prefix="" if pair == ("image", "text") else f"{pair[0]}_{pair[1]}_",
        )
        for pair in PAIRS[case.pairs]
    )
    towers, image_size = towers_of(Case("fork", 1, 1))
    entering = {**INPUTS} if case.audio == "toy" else {**INPUTS, "audio": ("input_features",)}
    if case.pairs == "four":
        entering["video"] = (
            "video_frames",
            "video_time",
            "video_row",
            "video_frame_row",
            "video_clips",
        )
    objective = Objective(tuple(Branch(name, inputs) for name, inputs in entering.items()), pairs)
    image = towers["image"]
    towers["image"] = replace(
        image,
        specs=(
            *image.specs[:-1],
            head("image", image.width, EMBED_DIM, objective.scalars_of("image")),
        ),
    )
    scalars = objective.scalars_of("audio")
    towers["audio"] = (
        sound_tower(scalars) if case.audio == "toy" else real_audio_tower(case.audio, scalars)
    )
    if case.pairs == "four":
        towers["video"] = real_video_tower(objective.scalars_of("video"))
    assert {name: towers[name].inputs for name in entering} == entering
    return objective, towers, image_size


INPUTS = {
    "image": ("pixel_values", "kept_patches"),
    "text": ("input_ids", "attention_mask"),
    "audio": ("samples",),
}


def loaded(case: ThreeBranches, branch: str, places: Tensor, image_size: int) -> dict[str, Tensor]:
    """A micro-batch of one branch."""
    of_two = Case(
        "fork", 1, 1, global_batch_size=case.global_batch_size, not_loaded=case.not_loaded
    )
    index = places + FIRST_INDEX
    gone = torch.tensor(case.not_loaded.get(branch, ()), dtype=torch.int64)
    labels = {
        f"{branch}_position": places,
        f"{branch}_index": torch.where(torch.isin(places, gone), -1 - index, index),
    }
    if branch == "video":
        return clips(places) | labels
    if branch != "audio":
        return micro_batch(of_two, global_batch(of_two, 0, image_size), branch, places)
    name, shape = "samples", (SOUND_WIDTH,)
    if case.audio != "toy":
        name, shape = (
            "input_features",
            real_audio_tower(case.audio, {}).example(1)["input_features"].shape[1:],
        )
    samples = torch.randn(
        case.global_batch_size, *shape, generator=torch.Generator().manual_seed(77)
    )
    return {name: samples[places]} | labels


# -- split


def train_three_split(case: ThreeBranches) -> dict[str, Any]:
    """On each rank: the metrics of one step, and the gradients as (name, offset, flat piece)."""
    from engine.executor import StepSpec

    engine, image_size = engine_of(case)
    gradients: list[tuple[str, int, Tensor]] = []
    engine.basic_optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(gradient_pieces(engine))
    )
    num_rows = {name: len(case.rows(name)) for name in engine.objective.names if case.lacking}
    metrics = engine.train_batch(
        _micro_batches(case, engine, image_size),
        StepSpec(num_rows=num_rows, loss_weights=case.loss_weights),
    )
    return {"metrics": metrics, "gradients": gradients, "graph": engine.graph.describe()}


SILENT = (
    {},
    {"not_loaded": {"audio": tuple(range(24))}},
    {"loss_weights": {"contrastive/audio_text": 0.0}},
    {},
)


def train_with_silent_steps(case: ThreeBranches) -> dict[str, Any]:
    """A step as each of `SILENT` says. On each rank: after each step all tensors and numbers of the state by name, which names are of sounds, and the rates."""
    from engine.checkpoint.engine_state import snapshot
    from engine.executor import StepSpec

    objective, towers, image_size = all_of(case)
    towers = {name: towers[name] for name in objective.names}
    adaptive = {"audio": {"kind": "adaptive", "warmup_steps": 1}}
    block = {"ema": {"decay": 0.5}, "gradient_clipping": adaptive}
    engine = engine_for(
        *(case, objective, towers, case.global_batch_size, block),
        compared=PAIRS[case.pairs],
        keys={**WARM, **case.keys},
    )
    states, rates = [], []
    for changes in SILENT:
        own = replace(case, **changes)
        batches = _micro_batches(own, engine, image_size)
        engine.train_batch(batches, StepSpec(loss_weights=own.loss_weights))
        kept = snapshot(engine)
        state: dict[str, Any] = {
            f"{f.kind} {f.name} {f.offset}": tensor.detach().clone()
            for f, tensor in kept.tensors.items()
        }
        state |= {f"number {name}": str(number) for name, number in kept.scalars.items()}
        state["number audio.limit"] = str(engine.clipping.state_dict()["mean_norm"]["audio"])
        states.append(state)
        rates.append(engine.lr_scheduler.get_last_lr()[0])
    sounds = {n for spec in towers["audio"].specs for n in spec.canonical_parameters}
    sounds |= {n for n in engine.module.canonical_buffers if n.startswith("audio.")}
    return {"states": states, "rates": rates, "sounds": sorted(sounds | {"audio.limit"})}


WARM = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}


def train_with_alignment(case: ThreeBranches, steps: int) -> list[dict[str, Any]]:
    """On each rank, step by step: the weights that followed the evaluations so far, and the metrics
    of the step with them. The batch is the held-out set, too."""
    from engine.executor import StepSpec
    from launch.loss_weights import LossWeights
    from models.metrics.alignment import alignment_figures, alignment_sums

    engine, image_size = engine_of(case)
    weights, records = LossWeights("alignment", engine.objective.losses, 50), []
    for step in range(steps):
        loads = engine.stage.loads
        number = engine.batches[loads[0]].num_micro_batches if loads else 0
        batches = _micro_batches(case, engine, image_size)
        measured = engine.evaluate(batches, number, case.global_batch_size, of_rows(alignment_sums))
        figures = {}
        for pair in engine.objective.pairs:
            of_pair = alignment_figures(
                *measured[pair.name].directions.values(),
                measured[pair.name].num_samples,
                pair.branches,
            )
            figures |= {f"{name}/{pair.name}": value for name, value in of_pair.items()}
        reason = weights.after_evaluation(step, {"family": figures})
        batches = _micro_batches(case, engine, image_size)
        metrics = engine.train_batch(batches, StepSpec(loss_weights=weights.weights()))
        records.append(
            {
                "weights": weights.weights(),
                "reason": reason,
                "loss": metrics.loss,
                "losses": metrics.losses,
            }
        )
    return records


def evaluate_three_split(case: ThreeBranches) -> dict[str, tuple[dict[str, list[float]], int]]:
    """On each rank: by comparison the sums of `alikeness` in both directions, and the samples."""
    engine, image_size = engine_of(case)
    loads = engine.stage.loads
    measured = engine.evaluate(
        _micro_batches(case, engine, image_size),
        engine.batches[loads[0]].num_micro_batches if loads else 0,
        case.global_batch_size,
        of_rows(alikeness),
    )
    return {
        name: ({key: sums.tolist() for key, sums in own.directions.items()}, own.num_samples)
        for name, own in measured.items()
    }


def refused_evaluation(case: ThreeBranches) -> str:
    """What each rank says of a held-out set of which the sounds have two other samples."""
    engine, image_size = engine_of(case)
    loads, batches = engine.stage.loads, _micro_batches(case, engine, image_size)

    def with_others():
        for batch in batches:
            if "audio_index" in batch:
                batch["audio_index"] = batch["audio_index"] + (batch["audio_position"] < 2)
            yield batch

    number = engine.batches[loads[0]].num_micro_batches if loads else 0
    try:
        engine.evaluate(
            with_others() if loads else None, number, case.global_batch_size, of_rows(alikeness)
        )
    except RuntimeError as error:
        return str(error)
    return "nothing"


@torch.no_grad()
def evaluate_three_whole(case: ThreeBranches) -> dict[str, tuple[dict[str, list[float]], int]]:
    """The reference: whole towers, all embeddings at once."""
    _, towers, image_size = all_of(case)
    every, embeds = torch.arange(case.global_batch_size), {}
    for name, tower in towers.items():
        tensors = loaded(case, name, every, image_size)
        for spec in tower.specs:
            tensors = spec.build(SEED).eval()(tensors)
        embeds[name] = tensors[f"{name}_embeds"]
    found = {}
    for one, other in (("image", "text"), ("audio", "text"), ("image", "audio")):
        out = {*case.not_loaded.get(one, ()), *case.not_loaded.get(other, ())}
        both = torch.tensor([p for p in every.tolist() if p not in out])
        sides = {name: embeds[name][both] for name in (one, other)}
        found[f"{one}_{other}"] = (
            {
                f"{a}_to_{b}": alikeness(sides[a], sides[b], torch.arange(len(both))).tolist()
                for a, b in ((one, other), (other, one))
            },
            len(both),
        )
    return found


def of_rows(figure: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A figure of (own rows, all other rows, partners) as the engine measures it."""

    def measure(sides: Any, branch: str, mine: Tensor) -> Tensor:
        (other,) = (name for name in sides if name != branch)
        return figure(sides[branch].embeds[mine], sides[other].embeds, mine)

    return measure


def alikeness(own: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """[3] sums over the rows: similarity to their partner, to all others, its square."""
    similarity = own @ other.T
    return torch.stack(
        [similarity[range(len(own)), target].sum(), similarity.sum(), similarity.square().sum()]
    )


def engine_of(case: ThreeBranches) -> tuple[Any, int]:
    """The engine of this rank, and the images' size."""
    objective, towers, image_size = all_of(case)
    towers = {name: towers[name] for name in objective.names}
    locked = {"locked": dict.fromkeys(case.locked, True)}
    engine = engine_for(
        case,
        objective,
        towers,
        case.global_batch_size,
        locked,
        compared=PAIRS[case.pairs],
        equal_shares=not case.lacking,
    )
    return engine, image_size


def engine_for(
    case: Any,
    objective: Any,
    towers: Mapping[str, Tower],
    global_batch_size: int,
    branches: Mapping[str, Any],
    compared: Any = None,
    keys: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """That of this rank, for a case that says how it is split. `branches`: further keys of that
    block; `keys`: of the whole JSON; `compared`: as in `cost_models.proportional`."""
    import torch.distributed as dist
    from cost_models import proportional

    from engine.build import build_engine
    from engine.config.reading import check_config
    from engine.planning.planner import plan_run

    config = {
        "train_batch_size": global_batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": case.zero_stage,
            "reduce_bucket_size": 100_000,
            "allgather_bucket_size": 100_000,
        },
        "branches": {
            "layout": case.layout,
            "stages": case.stages,
            "replicas": case.replicas,
            "micro_batch_size": case.micro_batch_size,
            "schedule": case.schedule,
            "gradient_clipping": {},
            **branches,
        },
        **(keys or {}),
    }
    config, block = check_config(config, objective.names)
    costs = proportional(
        {
            name: [1.0 if spec.num_parameters else 0.1 for spec in tower.specs]
            for name, tower in towers.items()
        },
        **({} if compared is None else {"compared": compared}),
    )
    layers = {  # what is locked is counted by the true numbers of parameters
        name: [
            replace(own, num_parameters=spec.num_parameters)
            for own, spec in zip(costs.layers[name], tower.specs)
        ]
        for name, tower in towers.items()
    }
    return build_engine(
        plan_run(config, block, dist.get_world_size(), replace(costs, layers=layers)),
        config,
        layers={name: tower.specs for name, tower in towers.items()},
        build_layer=lambda spec: spec.build(SEED),
        objective=objective,
        embed_dim=EMBED_DIM,
        total_num_steps=10,
        seed=SEED,
        timeout=timedelta(seconds=300),
        **more,
    )


def _micro_batches(case: ThreeBranches, engine, image_size: int):
    """Every branch that enters at this rank, micro-batch by micro-batch."""
    if not engine.stage.loads:
        return None
    shares = {}
    for branch in engine.stage.loads:
        batch = engine.batches[branch]
        shares[branch] = case.shares(branch, batch.replicas, batch.num_micro_batches)[
            engine.comm.replica
        ]
    return iter(
        [
            {
                name: tensor
                for branch, own in zip(shares, parts)
                for name, tensor in loaded(case, branch, own, image_size).items()
            }
            for parts in zip(*shares.values())
        ]
    )


# -- unsplit


def train_three_whole(case: ThreeBranches, batches: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The reference. `batches[branch]`: replicas and micro-batches of each of them, which dropout
    knows."""
    from engine.module import layer_seed

    objective, towers, image_size = all_of(case)
    layers = {
        name: [spec.build(SEED).train() for spec in towers[name].specs] for name in objective.names
    }
    for branch in case.locked:
        for layer in layers[branch][:-1]:
            layer.requires_grad_(False)
    named = {
        layer.canonical_names[n]: p
        for own in layers.values()
        for layer in own
        for n, p in layer.named_parameters()
        if p.requires_grad
    }
    embeds, scalars, first_layer = {}, {}, 0
    for name in objective.names:
        rows = torch.zeros(case.global_batch_size, EMBED_DIM)
        replicas, number = batches[name]
        for replica, parts in enumerate(case.shares(name, replicas, number)):
            for m, places in enumerate(parts):
                tensors = loaded(case, name, places, image_size)
                for i, layer in enumerate(layers[name]):
                    torch.manual_seed(layer_seed(SEED, 0, replica * number + m, first_layer + i))
                    tensors = layer(tensors)
                rows = rows.index_copy(0, places, tensors[f"{name}_embeds"])
                scalars |= {tensor: tensors[tensor] for tensor in objective.scalars_of(name)}
        embeds[name] = rows
        first_layer += len(layers[name])
    losses = {}
    for pair in objective.pairs:
        left_out = {
            p
            for b in pair.branches
            for p in (*case.lacking.get(b, ()), *case.not_loaded.get(b, ()))
        }
        both = torch.tensor([p for p in range(case.global_batch_size) if p not in left_out])
        first, second = (embeds[branch][both] for branch in pair.branches)
        learned = {name: scalars[tensor] for name, tensor in pair.scalars.items()}
        if case.plain:
            losses[pair.name] = pair.loss.function(first, second, learned)
            continue
        logits = learned["logit_scale"].exp() * first @ second.T
        if isinstance(pair.loss, Sigmoid):
            signs = 2 * torch.eye(len(both)) - 1
            losses[pair.name] = -F.logsigmoid(signs * (logits + learned["logit_bias"])).sum() / len(
                both
            )
        else:
            target, smoothing = torch.arange(len(both)), pair.loss.label_smoothing
            losses[pair.name] = (
                F.cross_entropy(logits, target, label_smoothing=smoothing)
                + F.cross_entropy(logits.T, target, label_smoothing=smoothing)
            ) / 2
    weights = {
        pair.name: case.loss_weights.get(f"contrastive/{pair.name}", pair.weight)
        for pair in objective.pairs
    }
    loss = sum(weights[name] * own for name, own in losses.items())
    loss.backward()
    return {
        "loss": loss.item(),
        "losses": {name: own.item() for name, own in losses.items()},
        "gradients": {name: p.grad for name, p in named.items()},
    }
