"""The two sides of the parity claim: training split over ranks by the engine, and the same training
unsplit in plain torch.

The unsplit side shares no code with the engine: it runs every micro-batch through the whole towers
in one process, lets autograd differentiate one loss over the global batch, and steps
torch.optim.AdamW. Batch normalisation sees micro-batches on both sides, since that is what a
micro-batch means to it.

A batch has G samples: G images and c·G texts, those of image p at the places c·p to c·p + c − 1.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from cost_models import BRANCHES
from torch import Tensor

TOWERS = {
    "resnet+bert": (
        "resnet50:layers=1-1-1-1,width_per_group=8",
        "bert-tiny:hidden_size=48,intermediate_size=64,num_hidden_layers=3",
        64,
    ),
    "vit+clip": (
        "vit_b_16:hidden_dim=48,num_heads=4,num_layers=3,mlp_dim=64,patch_size=8",
        "clip-text-base:hidden_size=48,intermediate_size=64,num_hidden_layers=3,num_attention_heads=4",
        32,
    ),
}
TOWERS |= {
    "resnet, max+bert, mean": (
        f"{TOWERS['resnet+bert'][0]},pool=max",
        f"{TOWERS['resnet+bert'][1]},pool=mean",
        64,
    ),
    "vit, attention+clip, attention": (
        f"{TOWERS['vit+clip'][0]},pool=attention",
        f"{TOWERS['vit+clip'][1]},pool=attention",
        32,
    ),
    "resnet18+bert, mean": ("resnet18", f"{TOWERS['resnet+bert'][1]},pool=mean", 64),
    "vit, avg+bert, last": (
        f"{TOWERS['vit+clip'][0]},pool=avg",
        f"{TOWERS['resnet+bert'][1]},pool=last",
        32,
    ),
}
_SMALL = "hidden_size=48,num_attention_heads=4,num_hidden_layers=3"
TOWERS |= {  # what blocks share, texts of full length, maps and registers, by transformers
    "swin+mpnet": (
        "hf:swin-tiny:embed_dim=16,depths=2-2,num_heads=2-4,window_size=4,drop_path_rate=0",
        f"mpnet-base:{_SMALL},intermediate_size=64",
        32,
    ),
    "siglip+t5": (
        f"hf:siglip-base-patch16-224:{_SMALL},intermediate_size=64,patch_size=8",
        "t5-small:d_model=48,d_kv=16,d_ff=64,num_layers=3,num_heads=3,dropout_rate=0",
        32,
    ),
}
TOWERS |= {  # recorded: two tensors between blocks, angles of positions, masks that travel
    "tnt+coca": (
        "timm:tnt_s_patch16_224:depth=3,embed_dim=48,inner_dim=8",
        "open_clip:coca_ViT-B-32:layers=3,width=48,heads=3,context_length=16",
        32,
    ),
    "dinov3+open_clip": (
        "timm:vit_small_patch16_dinov3:depth=3,embed_dim=48,num_heads=3",
        "open_clip:ViT-B-16-SigLIP:layers=3,width=48,heads=3,context_length=16",
        32,
    ),
    "swin_t+open_clip": (
        "timm:swin_tiny_patch4_window7_224:embed_dim=24,depths=2-2,num_heads=2-4",
        "open_clip:ViT-B-32-quickgelu:layers=2,width=48,heads=3,context_length=16,pool=last",
        32,
    ),
}
VOCAB, MAX_TOKENS, EMBED_DIM, SEED = 128, 16, 24, 5
FIRST_INDEX = 10_000  # of the samples in their source
LR, WEIGHT_DECAY = 1e-3, 0.1
LOSS_SCALE = 2**10  # of fp16


@dataclass(frozen=True)
class Case:
    """One way to split, and what to train."""

    layout: str
    stages: Any
    replicas: Any
    micro_batch_size: Any = "auto"
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
    # branch -> places of its rows in the global batch
    not_loaded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    loss: str = "infonce"
    label_smoothing: float = 0.0
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
    seed: int = SEED

    @cached_property
    def world_size(self) -> int:
        if self.layout == "fork":
            return sum(self.stages[b] * self.replicas[b] for b in ("image", "text"))
        return sum(self.stages.values()) * self.replicas

    @property
    def config(self) -> dict[str, Any]:
        config = {
            "train_batch_size": self.global_batch_size,
            "optimizer": self.optimizer
            or {
                "type": "AdamW",
                "params": {"lr": self.lr, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
            },
            "zero_optimization": {
                "stage": self.zero_stage,
                "reduce_bucket_size": 100_000,
                "allgather_bucket_size": 100_000,
            },
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
            power = LOSS_SCALE.bit_length() - 1
            fp16 = {"enabled": True, "initial_scale_power": power, "hysteresis": 1}
            config |= {"fp16": fp16}
        if self.precision == "bf16":
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        return config

    def texts_of(self, step: int) -> int:
        return self.texts_per_image[step % len(self.texts_per_image)]

    def rows_of(self, branch: str, samples: Tensor, step: int) -> Tensor:
        """The places of their images, or of their texts: all first ones before all second ones,
        unless each micro-batch is its own batch."""
        if branch == "image":
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

    def equal(self, samples: Tensor, texts: Tensor, step: int) -> Tensor:
        """bool [b, t]: an image of these samples is that of a text's sample, or one of the image's
        texts is the text."""
        number = self.texts_of(step)
        own, others = (self.keys("image", of) for of in (samples, texts // number))
        found = own[:, None] == others
        for k in range(number):
            mine = self.keys("text", samples * number + k)
            found = found | (mine[:, None] == self.keys("text", texts))
        return found

    def weights(self, samples: Tensor) -> Tensor:
        """[len(samples)] int64, millionths; some are 0."""
        return samples * 7 % 5 * 250_000

    def __str__(self) -> str:
        parts = [self.layout, self.stages, self.replicas, self.micro_batch_size, self.towers]
        parts += [f"zero{self.zero_stage}", self.precision]
        parts += [self.schedule] if self.schedule != "batch_sync" else []
        parts += [f"keep{self.kept_micro_batches}"] if self.kept_micro_batches is not None else []
        parts += [f"checkpoint{self.checkpoint_interval}"] if self.checkpoint_interval else []
        parts += ["compile", self.compile] if self.compile else []
        parts += [f"dropout{self.dropout}"] if self.dropout else []
        parts += [f"packed{'texts' * self.deals_texts}"] if self.deals else []
        parts += ["not_loaded"] if self.not_loaded else []
        parts += [self.loss] if self.loss != "infonce" else []
        parts += [f"smoothing{self.label_smoothing}"] if self.label_smoothing else []
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


def towers_of(case: Case):
    from models.losses import build_loss
    from models.towers.building import build_towers
    from models.towers.fusion import FusionSizes

    image, text, image_size = TOWERS[case.towers]
    if case.dropout:
        text += (
            f",hidden_dropout_prob={case.dropout}"
            if "bert" in text
            else f",attention_dropout={case.dropout}"
        )
    else:
        text += (
            ",hidden_dropout_prob=0,attention_probs_dropout_prob=0"
            if text.startswith("bert")
            else ""
        )
    image_tower, text_tower = build_towers(
        image,
        text,
        embed_dim=EMBED_DIM,
        image_size=image_size,
        vocab_size=VOCAB,
        max_text_tokens=MAX_TOKENS,
        pad_token_id=0,
        eos_token_id=2,
        scalars=build_loss(case.loss).parameters,
        fusion=FusionSizes(layers=2, width=16, heads=2, scales=case.fusion)
        if case.fusion
        else None,
    )
    towers = {"image": image_tower, "text": text_tower}
    return {branch: with_lora(tower, case.lora.get(branch)) for branch, tower in towers.items()}, (
        image_size
    )


def with_lora(tower, written: dict[str, Any] | None):
    """The tower with adapters, of which B starts at random: at zero nothing of A would be seen."""
    if written is None:
        return tower
    from models.towers.adapters.layers import AdaptedSpec, adapted_tower
    from models.towers.adapters.lora import LoRA

    class Drawn(AdaptedSpec):
        def build(self, seed, weights=None):
            layer = super().build(seed, weights)
            draw = torch.Generator().manual_seed(len(self.name))
            for name, tensor in layer.state_dict().items():
                if ".lora_B." in name:
                    tensor.copy_(0.1 * torch.randn(tensor.shape, generator=draw))
            return layer

    tower = adapted_tower(tower, LoRA(**written))
    specs = [Drawn(**vars(spec)) for spec in tower.specs[:-1]]
    return replace(tower, specs=(*specs, tower.specs[-1]))


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
    return {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask}


def micro_batch(
    case: Case, batch: dict[str, Tensor], branch: str, position: Tensor
) -> dict[str, Tensor]:
    """The images or texts at `position`, texts cut to their longest: shapes differ from micro-batch
    to micro-batch."""
    sample = (
        position
        if branch == "image"
        else position // (len(batch["input_ids"]) // case.global_batch_size)
    )
    index = sample + FIRST_INDEX
    broken = torch.isin(position, torch.tensor(case.not_loaded.get(branch, ()), dtype=torch.int64))
    labels = {
        f"{branch}_position": position,
        f"{branch}_index": torch.where(broken, -1 - index, index),
    }
    if case.duplicates:
        labels[f"{branch}_key"] = case.keys(branch, position)
    if branch in case.weighted:
        labels[f"{branch}_weight"] = case.weights(sample)
    if branch == "image":
        return {"pixel_values": batch["pixel_values"][position], **labels}
    mask = batch["attention_mask"][position]
    longest = int(mask.sum(1).max())
    return {
        "input_ids": batch["input_ids"][position][:, :longest],
        "attention_mask": mask[:, :longest],
        **labels,
    }


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
    from launch.objective import objective_of, pairs_of
    from models.losses import build_loss

    if case.imported:
        importlib.import_module(case.imported)
    towers, image_size = towers_of(case)
    config, block = check_config(case.config, BRANCHES)
    # equal layers: to count what each computes takes longer than the steps that are compared
    costs = proportional(
        {b: [1.0 if spec.num_parameters else 0.1 for spec in t.specs] for b, t in towers.items()}
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
            objective=objective_of(
                towers.values(),
                pairs_of(
                    "image:text",
                    build_loss(case.loss, case.label_smoothing, case.duplicates or "positives"),
                    recording_matching() if case.fusion else None,
                ),
            ),
            embed_dim=EMBED_DIM,
            total_num_steps=10,
            seed=case.seed,
            timeout=timedelta(seconds=300),
            equal_shares=not case.deals,
            source_starts=case.source_starts
            and [start + FIRST_INDEX for start in case.source_starts],
        )
    return engine, plan, image_size


def with_loss(objective, loss):
    """An objective of one pair, with another loss."""
    return replace(objective, pairs=(replace(objective.pairs[0], loss=loss),))


def micro_batches_of_rank(case: Case, engine, step: int, image_size: int):
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
    """Rows of each replica, of the branches that end here. In odd steps, and where a micro-batch is
    a batch, last stages tell each other."""
    found = {}
    if step % 2 or case.schedule == "per_micro_batch":
        return found
    for branch in engine.stage.tail_of:
        replicas = engine.stage.replicas
        parts = dealt(case, branch, engine.batches[branch].micro_batch_size)
        number = len(parts) // replicas
        found[branch] = [
            sum(
                len(case.rows_of_share(branch, own, step))
                for own in parts[r * number : (r + 1) * number]
            )
            for r in range(replicas)
        ]
    return found


def dealt(case: Case, branch: str, micro_batch_size: int) -> list[Tensor]:
    """The samples of each micro-batch, replica by replica."""
    if branch in case.deals:
        return [torch.tensor(places) for replica in case.deals[branch] for places in replica]
    return list(torch.arange(case.global_batch_size).split(micro_batch_size))


def train_split(case: Case) -> dict[str, Any]:
    """On each rank: losses, norms, the gradients of the first step as (name, offset, flat piece),
    the final parameters."""
    from engine.executor import StepSpec

    engine, plan, image_size = make_engine(case)
    recording_matching().noted.clear()  # of a case before
    gradients: list[tuple[str, int, Tensor]] = []

    def capture(*_):
        if engine.global_steps == 0:
            gradients.extend(gradient_pieces(engine))

    # after the clipping's own hook: without limits it only measures
    engine.basic_optimizer.register_step_pre_hook(capture)
    forwards: Counter[str] = Counter()
    for name, layer in engine.module.named_children():
        layer.register_forward_hook(lambda *_, name=name.replace("/", "."): forwards.update([name]))
    metrics = [
        engine.train_batch(
            micro_batches_of_rank(case, engine, step, image_size),
            StepSpec(
                num_micro_batches=num_micro_batches(case, engine),
                num_kept=case.kept_of_deals.get(next(iter(engine.stage.layers))),
                rows_per_sample={"text": case.texts_of(step)},
                loss_weights=case.loss_weights,
                shares=shares_of_step(case, engine, step),
            ),
        )
        for step in range(case.steps)
    ]
    return {
        "metrics": metrics,
        "gradients": gradients,
        "parameters": {
            n: p.detach().float().clone().cpu()
            for n, p in engine.module.canonical_parameters.items()
        },
        "buffers": {
            n: b.detach().clone().cpu() for n, b in engine.module.canonical_buffers.items()
        },
        "drawn": list(recording_matching().noted) if case.fusion else [],
        "stage": engine.stage.name,
        "optimizer": type(engine.optimizer).__name__,
        "unaligned": [
            name
            for name, p in engine.module.canonical_parameters.items()
            if p.numel() % 8 == 0 and p.data_ptr() % 16
        ],
        "forwards": dict(forwards),  # by layer, in all steps
        "gradient_bytes": engine.comm.gradients_out.sent_bytes
        if engine.comm.gradients_out is not None
        else 0,  # to the stage before
        "num_state_numbers": sum(
            t.numel()
            for own in engine.basic_optimizer.state.values()
            for t in own.values()
            if torch.is_tensor(t)
        ),
    }


def train_scalars(case: Case) -> dict[str, Any]:
    """On each rank, of each step: the logarithm of the scale as this rank's optimizer holds it
    before, if it does, and the scale that the loss used, as the metrics have it; the dtype of the
    parameter."""
    engine, _, image_size = make_engine(case)
    parameter, steps = engine.module.scalars.get("logit_scale"), []
    for step in range(case.steps):
        stepped = None if parameter is None else engine.clipping.stepped(parameter)
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
            StepSpec(rows_per_sample={"text": case.texts_of(1)}),
        )
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def gradient_pieces(engine) -> list[tuple[str, int, Tensor]]:
    """Inside the optimizer's step: (name, offset, flat piece) of what this rank has of each
    gradient."""
    pieces = []
    for name, parameter in engine.module.canonical_parameters.items():
        gradient = engine.clipping.gradient(parameter) if parameter.requires_grad else None
        if gradient is not None:
            mapping = getattr(parameter, "_hp_mapping", None)
            offset = mapping.lp_fragment_address.start if engine.clipping.partitioned else 0
            pieces.append((name, offset, gradient.flatten().float().clone().cpu()))
    return pieces


def compared(case: Case, micro_batch_size: int) -> list[Tensor]:
    """Which samples are each other's negatives: all, or, per micro-batch, the m-th micro-batches of
    the replicas."""
    texts = case.texts_of(0)
    missing = [
        place // (texts if branch == "text" else 1)
        for branch, places in case.not_loaded.items()
        for place in places
    ]
    everyone = torch.tensor(
        [place for place in range(case.global_batch_size) if place not in missing]
    )
    if case.schedule != "per_micro_batch":
        return [everyone]
    replicas = case.replicas["image"] if case.layout == "fork" else case.replicas
    return [
        part.flatten() for part in everyone.view(replicas, -1, micro_batch_size).transpose(0, 1)
    ]


def contrastive(
    case: Case, embeds: dict[str, Tensor], scalars: dict[str, Tensor], samples: Tensor, step: int
) -> Tensor:
    """[len(samples)], the losses of some samples, each image against each text; their mean is the
    loss. Weights are in parts of their mean."""
    rows = {branch: case.rows_of(branch, samples, step) for branch in embeds}
    logits = (
        scalars["logit_scale"].exp()
        * embeds["image"][rows["image"]]
        @ embeds["text"][rows["text"]].T
    )
    own = samples[:, None] == rows["text"] // case.texts_of(step)
    equal = case.equal(samples, rows["text"], step) if case.duplicates else own
    positive = (equal if case.duplicates == "positives" else own).float()
    masked = equal & ~own if case.duplicates == "masked" else torch.zeros_like(own)
    own = own.float()
    by_image = case.weights(samples).float() if case.weighted else torch.ones(len(samples))
    by_text = by_image[own.argmax(0)]
    if case.loss == "sigmoid":
        losses = -F.logsigmoid((2 * positive - 1) * (logits + scalars["logit_bias"])) * ~masked
        of_texts = (by_text / by_text.mean() * losses).sum(0)
        return ((by_image[:, None] / by_image.mean() * losses).sum(1) + own @ of_texts) / 2
    logits = logits.masked_fill(masked, -1e30)  # infinity times a target of 0 is not a number
    if case.loss == "milnce":
        not_own = own == 0
        of_texts = logits.logsumexp(0).expand_as(logits).masked_fill(not_own, -torch.inf)
        every = torch.cat([logits, of_texts], 1).logsumexp(1)
        losses = every - logits.masked_fill(not_own, -torch.inf).logsumexp(1)
        return by_image / by_image.mean() * losses

    def direction(logits: Tensor, positive: Tensor, weight: Tensor) -> Tensor:
        target = positive / positive.sum(1, keepdim=True)
        rows = F.cross_entropy(
            logits, target, reduction="none", label_smoothing=case.label_smoothing
        )
        return weight / weight.mean() * rows

    of_texts = direction(logits.T, positive.T, by_text)
    return (direction(logits, positive, by_image) + own @ of_texts / case.texts_of(step)) / 2


def lock_by_hand(case: Case, layers: dict[str, list]) -> None:
    """As the `locked` block has it. The head is the last layer of each branch."""
    for branch, own in layers.items():
        value = case.locked.get(branch, False)
        held = [layer for layer in own[:-1] if list(layer.parameters())]
        first = value["all_but_last"] if isinstance(value, dict) else 0 if value else len(held)
        locked = [*held[: len(held) - first], *([own[-1]] if case.locked.get("head") else [])]
        for layer in locked:
            layer.requires_grad_(False)
            if case.locked.get("batch_norm") == "locked":
                for module in layer.modules():
                    if isinstance(module, torch.nn.BatchNorm2d):
                        module.eval()


def by_hand(case: Case, named: dict[str, Tensor], layers: dict[str, list]) -> list[dict[str, Any]]:
    """A parameter group for each parameter, as the `optimizer_groups` block has it."""
    depths = {}
    for branch in layers.values():
        held = [layer for layer in branch if list(layer.parameters())]
        depths |= {
            layer.canonical_names[n]: len(held) - 1 - i
            for i, layer in enumerate(held)
            for n, _ in layer.named_parameters()
        }
    groups = []
    for name, parameter in named.items():
        own = case.optimizer_groups.get(name.split(".")[0], {})
        patterns = case.optimizer_groups.get("no_decay")
        undecayed = (
            parameter.dim() < 2
            if patterns is None
            else any(fnmatch(name, pattern) for pattern in patterns)
        )
        rate = own.get("lr", LR) * own.get("layer_decay", 1.0) ** depths[name]
        decay = 0.0 if undecayed else own.get("weight_decay", WEIGHT_DECAY)
        groups.append(
            {
                "params": [parameter],
                "weight_decay": decay,
                "highest": rate,
                "warmup_steps": own.get("warmup_steps"),
            }
        )
    return groups


def warmth(case: Case, step: int, warmup_steps: int | None) -> float:
    """The part of the rate in this step, counted from 0, under WarmupLR, linear."""
    if not case.scheduler:
        return 1.0
    total = warmup_steps or case.scheduler["params"]["warmup_num_steps"]
    return min(1.0, (step + 1) / total)


def train_whole(case: Case, plan_batches: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The reference. `plan_batches[branch]` = (micro_batch_size, number of micro-batches of all
    replicas)."""
    from engine.module import layer_seed

    towers, image_size = towers_of(case)
    layers = {
        branch: [spec.build(case.seed).train() for spec in tower.specs]
        for branch, tower in towers.items()
    }
    named = {
        layer.canonical_names[n]: p
        for branch in layers.values()
        for layer in branch
        for n, p in layer.named_parameters()
    }
    lock_by_hand(case, layers)
    optimizer = torch.optim.AdamW(by_hand(case, named, layers), lr=LR)
    losses, of_samples, norms, first_gradients, drawn = [], [], [], {}, []
    for step in range(case.steps):
        batch, embeds = global_batch(case, step, image_size), {}
        tokens = {"image": {}, "text": {}}  # by place: [T, F], [L, F] without padding
        for branch in ("image", "text"):
            rows = torch.zeros(
                len(batch["pixel_values" if branch == "image" else "input_ids"]), EMBED_DIM
            )
            for number_of, samples in enumerate(dealt(case, branch, plan_batches[branch][0])):
                position = case.rows_of_share(branch, samples, step)
                tensors = micro_batch(case, batch, branch, position)
                for i, layer in enumerate(layers[branch]):
                    # the same random numbers as the split side, by its documented rule
                    torch.manual_seed(
                        layer_seed(
                            case.seed,
                            step,
                            number_of,
                            i + (len(layers["image"]) if branch == "text" else 0),
                        )
                    )
                    tensors = in_precision(case, layer, tensors)
                rows = rows.index_copy(0, position, tensors[f"{branch}_embeds"])
                for row, place in enumerate(position.tolist() if case.fusion else ()):
                    kept = slice(None) if branch == "image" else tensors["text_mask"][row] == 1
                    tokens[branch][place] = tensors[f"{branch}_tokens"][row][kept]
            embeds[branch] = rows
        # never rounded
        scalars = {
            n: named[f"head.{n}"] for n in ("logit_scale", "logit_bias") if f"head.{n}" in named
        }
        groups = compared(case, plan_batches["image"][0])
        of_groups = [contrastive(case, embeds, scalars, group, step) for group in groups]
        of_samples.append(dict(zip(torch.cat(groups).tolist(), torch.cat(of_groups).tolist())))
        loss = torch.stack([of_group.mean() for of_group in of_groups]).mean()
        if case.fusion:
            groups_of_pairs = [
                matching(case, layers["text"][-1].fusion, embeds, scalars, tokens, g, step, m)
                for m, g in enumerate(groups)
            ]
            drawn.append([whom for _, whom in groups_of_pairs])
            weight = {"contrastive": 1.0, "matching": 1.0, **case.loss_weights}
            loss = (
                weight["contrastive"] * loss
                + weight["matching"] * torch.stack([own for own, _ in groups_of_pairs]).mean()
            )
        optimizer.zero_grad()
        (loss * LOSS_SCALE if case.precision == "fp16" else loss).backward()
        for parameter in named.values() if case.precision == "fp16" else ():
            if parameter.grad is not None:
                parameter.grad /= LOSS_SCALE
        if step == 0:
            first_gradients = {
                name: p.grad.detach().clone() for name, p in named.items() if p.requires_grad
            }
        norms.append({})
        for group in ("image", "text", "head"):
            members = [p for n, p in named.items() if n.startswith(group + ".")]
            norms[-1][group] = float(
                torch.nn.utils.clip_grad_norm_(members, case.clipping.get(group, float("inf")))
            )
        for group in optimizer.param_groups:
            group["lr"] = group["highest"] * warmth(case, step, group["warmup_steps"])
        if step not in case.skipped:
            optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "sample_losses": of_samples,  # step by step, by place
        "norms": norms,
        "drawn": drawn,  # step by step, batch by batch: branch -> negatives
        "gradients": first_gradients,
        "parameters": {n: p.detach() for n, p in named.items()},
        "buffers": {
            layer.canonical_names[n]: b
            for branch in layers.values()
            for layer in branch
            for n, b in layer.named_buffers()
            if n in layer.canonical_names
        },
    }


def in_precision(case: Case, module: torch.nn.Module, *inputs: Any) -> Any:
    """The module's output with its parameters rounded; their gradients come back to what was
    rounded, in fp32, use by use."""
    if case.precision == "fp32":
        return module(*inputs)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
    return torch.func.functional_call(
        module, {name: parameter.to(dtype) for name, parameter in module.named_parameters()}, inputs
    )


def matching(
    case: Case, fusion, embeds, scalars, tokens, samples: Tensor, step: int, batch: int
) -> tuple[Tensor, dict[str, list[int]]]:
    """The loss of the pairs of some samples, pair by pair, and who was drawn for whom, by branch.
    Negatives from the whole matrix, by the documented rule."""
    from engine.module import layer_seed
    from models.losses.matching import gumbel_noise

    texts = case.rows_of("text", samples, step)
    texts = texts.sort().values if case.schedule != "per_micro_batch" else texts
    image_of = texts // case.texts_of(step)
    scale = scalars["logit_scale"].detach().clamp(max=math.log(100.0)).exp()
    logits = scale * embeds["image"].detach()[samples] @ embeds["text"].detach()[texts].T
    logits = logits.masked_fill(samples[:, None] == image_of, -math.inf)
    seed = layer_seed(case.seed, step, batch if case.schedule == "per_micro_batch" else 0, -1)
    drawn_text = (logits + gumbel_noise(seed, torch.arange(len(samples)), len(texts))).argmax(1)
    drawn_image = (logits.T + gumbel_noise(~seed, torch.arange(len(texts)), len(samples))).argmax(1)
    drawn = {"image": drawn_text.tolist(), "text": drawn_image.tolist()}
    pairs = [(image, text, True) for image, text in zip(image_of.tolist(), texts.tolist())]
    pairs += [
        (image, text, False) for image, text in zip(samples[drawn_image].tolist(), texts.tolist())
    ]
    pairs += [
        (image, text, False) for image, text in zip(samples.tolist(), texts[drawn_text].tolist())
    ]
    weights = [torch.ones(len(samples)), torch.ones(len(texts))]
    if case.weighted:
        weights = [case.weights(which).float() for which in (samples, image_of)]
    of_images, of_texts = (weight / weight.sum() for weight in weights)
    losses = []
    for (image, text, belong), weight in zip(pairs, torch.cat([of_texts, of_texts, of_images])):
        own, text_tokens = tokens["image"][image][None], tokens["text"][text][None]
        score = in_precision(case, fusion, own, text_tokens, torch.ones(text_tokens.shape[:2]))[0]
        losses.append(weight * F.softplus(-score if belong else score))
    return torch.stack(losses).sum() / 3, drawn


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
