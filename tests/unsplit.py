"""The second opinion: what an objective trains, unsplit, in plain torch and one process.

Nothing here is of engine/, nor of the arithmetic in models/losses/. An objective is read as a record:
the terms, the rows that they compare, their losses and weights. Every micro-batch runs through the
whole towers; which rows belong together follows from what it brings of them (places, indices, keys,
weights); autograd differentiates one loss over all rows of the global batch; torch.optim.AdamW steps, or Muon by hand.
Batch normalisation sees micro-batches on both sides, since that is what a micro-batch means to it.

M rows of the first side of a pair, N of the second, D embedding width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from models.losses import MILNCE, InfoNCE, PlainLoss, Prefixed, Sigmoid, SimilarityKL, Views
from models.losses.matching import gumbel_noise

LOSS_SCALE = 2**10  # of fp16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NEVER = -1e30  # infinity times a target of 0 is not a number


@dataclass(frozen=True)
class Batch:
    """A global batch. `micro_batches`: branch -> those of all `replicas`, in their order;
    `rows_per_sample`: of a branch, where it is not 1; `num_losses`: the m-th micro-batches of all
    replicas are in loss m, of so many; `loss_weights`: in place of those of the objective."""

    micro_batches: Mapping[str, Sequence[Mapping[str, Tensor]]]
    replicas: Mapping[str, int]
    rows_per_sample: Mapping[str, int] = field(default_factory=dict)
    num_losses: int = 1
    loss_weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """How to train: parts of a configuration, as they are written there. `draws`: the documented rule
    (seed, step, micro-batch, layer) -> what a layer draws from; `clipping`: limits of norms;
    `scheduler`: WarmupLR, linear; `skipped`: steps whose update is left out."""

    seed: int
    draws: Callable[[int, int, int, int], int]
    precision: str = "fp32"
    lr: float = 1e-3
    weight_decay: float = 0.1
    locked: Mapping[str, Any] = field(default_factory=dict)
    optimizer_groups: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    clipping: Mapping[str, float] = field(default_factory=dict)
    skipped: Sequence[int] = ()
    loss_scale: int = LOSS_SCALE
    muon: Mapping[str, Any] = field(default_factory=dict)  # params; empty: all by AdamW
    matrices: Sequence[str] = ()  # patterns of what Muon steps


Layers = Mapping[str, Sequence[nn.Module]]


# -- rows


@dataclass(frozen=True)
class Rows:
    """All of one name, n of them, in the order of their places in the global batch."""

    place: Tensor  # [n]
    embeds: Tensor  # [n, D]
    index: Tensor  # [n], of the sample in the data; below 0: it could not be loaded
    key: Tensor  # [n], equal for equal values
    weight: Tensor  # [n]
    loss: Tensor  # [n], which of the losses of the step they are in
    tokens: list[Tensor]  # of each row [T, F], without padding; or none

    def chosen(self, wanted: Tensor) -> Rows:
        """[n] bool, or numbers in another order."""
        numbers = torch.arange(len(self.place))[wanted].tolist()
        tokens = [self.tokens[n] for n in numbers if self.tokens]
        tensors = [getattr(self, each.name)[wanted] for each in fields(self)[:-1]]
        return Rows(*tensors, tokens)


def rows_made(layers: Layers, batch: Batch, recipe: Recipe, step: int) -> dict[str, Rows]:
    """By their names, of all micro-batches."""
    parts: dict[str, list[Rows]] = defaultdict(list)
    first_layer = 0
    for branch, own in layers.items():
        statistics = RunningStatistics(own)
        of_each = len(batch.micro_batches[branch]) // batch.replicas[branch]
        for number, given in enumerate(batch.micro_batches[branch]):
            if number % of_each == 0:
                statistics.next_replica()
            tensors = {name: rounded(recipe.precision, each) for name, each in given.items()}
            for i, layer in enumerate(own, first_layer):
                torch.manual_seed(recipe.draws(recipe.seed, step, number, i))
                tensors = in_precision(recipe.precision, layer, tensors)
            for made in [made for made in tensors if made.endswith("_embeds")]:
                name = made.removesuffix("_embeds")
                rows = _rows(name, given, tensors, number % batch.num_losses)
                parts[name].append(rows)
        statistics.average()
        first_layer += len(own)
    return {name: _joined(each) for name, each in parts.items()}


class RunningStatistics:
    """Of batch normalisation: each replica goes on from those before the step, and their mean is kept.

    Through `data`, since what autograd has saved of a forward must not look changed.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        modules = [module for layer in layers for module in layer.modules()]
        normalising = [module for module in modules if isinstance(module, _BatchNorm)]
        self._buffers = [buffer.data for module in normalising for buffer in module.buffers()]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._after: list[list[Tensor]] = []

    def next_replica(self) -> None:
        self._after.append([buffer.clone() for buffer in self._buffers])
        for buffer, value in zip(self._buffers, self._before):
            buffer.copy_(value)

    def average(self) -> None:
        self.next_replica()
        for buffer, *values in zip(self._buffers, *self._after[1:]):  # the first: of no replica
            buffer.copy_(torch.stack(values).double().mean(0))


def _rows(name: str, given: Mapping[str, Tensor], made: Mapping[str, Tensor], loss: int) -> Rows:
    """Of a micro-batch. Without keys no two samples are equal, without weights all weigh the same."""
    place = given[f"{name}_position"]
    index = given[f"{name}_index"]
    weight = given.get(f"{name}_weight", torch.ones_like(place))
    tokens = [*made.get(f"{name}_tokens", ())]
    if f"{name}_mask" in made and tokens:
        tokens = [own[mask == 1] for own, mask in zip(tokens, made[f"{name}_mask"])]
    key = given.get(f"{name}_key", index)
    in_loss = torch.full_like(place, loss)
    return Rows(place, made[f"{name}_embeds"], index, key, weight.float(), in_loss, tokens)


def _joined(parts: Sequence[Rows]) -> Rows:
    tensors = [torch.cat([getattr(p, each.name) for p in parts]) for each in fields(Rows)[:-1]]
    rows = Rows(*tensors, [token for part in parts for token in part.tokens])
    return rows.chosen(rows.place.argsort())


def in_precision(precision: str, module: nn.Module, *inputs: Any) -> Any:
    """The module's output with its parameters rounded; their gradients come back to what was
    rounded, in fp32, use by use."""
    if precision == "fp32":
        return module(*inputs)
    own = {name: rounded(precision, each) for name, each in module.named_parameters()}
    return torch.func.functional_call(module, own, inputs)


def rounded(precision: str, tensor: Tensor) -> Tensor:
    return tensor.to(DTYPES[precision]) if tensor.is_floating_point() else tensor


class Sides(NamedTuple):
    """The rows of a pair that take part, and which of the second side each of the first belongs to,
    or is equal to: one of the values of its sample is one of the other's. [M, N] bool."""

    first: Rows
    second: Rows
    belongs: Tensor
    equal: Tensor


def sides_of(
    comparison: Any, rows: Mapping[str, Rows], rows_per_sample: Mapping[str, int], loss: int = 0
) -> Sides:
    """Of the rows that are in one of the losses. A sample, or what else the rows are of, is left out
    unless all of its rows could be loaded and both sides have some; of made rows the second side may
    have more, which are nobody's and only answer."""
    first, second = (rows[name].chosen(rows[name].loss == loss) for name in comparison.rows)
    asks, answers = (
        side.place // (1 if comparison.made else rows_per_sample.get(name, 1))
        for name, side in zip(comparison.rows, (first, second))
    )
    broken = torch.cat([asks[first.index < 0], answers[second.index < 0]])
    here = torch.isin(asks, answers) & ~torch.isin(asks, broken)
    there = torch.isin(answers, asks) | (comparison.made is not None)
    there &= ~torch.isin(answers, broken)
    first, second = first.chosen(here), second.chosen(there)
    belongs = asks[here][:, None] == answers[there]
    of_firsts, of_seconds = ((side.key[:, None] == side.key).float() for side in (first, second))
    equal = of_firsts @ belongs.float() + belongs.float() @ of_seconds > 0
    return Sides(first, second, belongs, belongs | equal)


def together(
    term: Any, rows: Mapping[str, Rows], rows_per_sample: Mapping[str, int], loss: int = 0
) -> list[tuple[Rows, Tensor]]:
    """Of each branch of a term its rows that are in one of the losses, and the sample of each: of
    samples of which all branches have all rows, and could load them."""
    sides = [rows[name].chosen(rows[name].loss == loss) for name in term.rows]
    samples = [side.place // rows_per_sample.get(name, 1) for name, side in zip(term.rows, sides)]
    whole = {*samples[0].tolist()}.intersection(*(each.tolist() for each in samples))
    whole -= {n for side, each in zip(sides, samples) for n in each[side.index < 0].tolist()}
    here = [torch.isin(each, torch.tensor([*whole], dtype=torch.int64)) for each in samples]
    return [(side.chosen(own), each[own]) for side, each, own in zip(sides, samples, here)]


# -- losses


def joint(loss: Any, sides: Sequence[tuple[Rows, Tensor]], scalars: Mapping[str, Tensor]) -> Tensor:
    """[]: a loss over the rows of one branch, or of several at once."""
    if isinstance(loss, Prefixed):
        dims = [*loss.dims, sides[0][0].embeds.shape[1]]
        cut = [[(_shortened(side, dim), sample) for side, sample in sides] for dim in dims]
        return torch.stack([joint(loss.loss, each, scalars) for each in cut]).mean()
    embeds = [side.embeds for side, _ in sides]
    if isinstance(loss, PlainLoss):
        return loss.function(*embeds, scalars)
    scale = scalars["logit_scale"].exp()
    weights = [side.weight / side.weight.sum() for side, _ in sides]
    if isinstance(loss, SimilarityKL):
        own = (
            scale * embeds[0] @ embeds[1].T,
            loss.teacher_scale * embeds[2].detach() @ embeds[3].detach().T,
        )
        directions = (own, [each.T for each in own])
        return (
            sum(
                weight @ F.kl_div(s.log_softmax(1), t.softmax(1), reduction="none").sum(1)
                for weight, (s, t) in zip(weights, directions)
            )
            / 2
        )
    assert isinstance(loss, Views), f"the reference knows no {type(loss).__name__}"
    ((rows, sample),) = sides
    itself = torch.eye(len(sample), dtype=torch.bool)
    belongs = sample[:, None] == sample
    same = (rows.key[:, None] == rows.key).float()
    equal = (same @ belongs.float() + belongs.float() @ same > 0) | belongs
    duplicates = loss.loss.targets.duplicates
    positive = (equal if duplicates == "positives" else belongs) & ~itself
    masked = itself | (equal & ~belongs if duplicates == "masked" else torch.zeros_like(itself))
    raw = scale * embeds[0] @ embeds[0].T
    if isinstance(loss.loss, Sigmoid):
        signs = 2 * positive.float() - 1
        losses = -F.logsigmoid(signs * (raw + scalars["logit_bias"])) * ~masked
        return weights[0] @ (losses.sum(1) + losses.sum(0)) / 2
    of_rows = _cross_entropy(raw, raw.masked_fill(masked, NEVER), positive.float(), 0.0)
    return weights[0] @ of_rows


def _shortened(side: Rows, dim: int) -> Rows:
    return replace(side, embeds=F.normalize(side.embeds[:, :dim], dim=1))


def contrastive(loss: Any, sides: Sides, scalars: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[] and [M]: the loss, and that of each row of the first side with those of the second that
    belong to it."""
    first, second, belongs, equal = sides
    if isinstance(loss, PlainLoss):
        whole = loss.function(first.embeds, second.embeds, scalars)
        return whole, whole.expand(len(first.place))
    raw = logits = scalars["logit_scale"].exp() * first.embeds @ second.embeds.T
    positive = (equal if loss.targets.duplicates == "positives" else belongs).float()
    masked = equal & ~belongs if loss.targets.duplicates == "masked" else torch.zeros_like(equal)
    own, number = belongs.float(), len(first.place)
    asks, answers = first.weight / first.weight.mean(), second.weight
    if isinstance(loss, Sigmoid):
        losses = -F.logsigmoid((2 * positive - 1) * (raw + scalars["logit_bias"])) * ~masked
        of_rows = (asks[:, None] * losses).sum(1)
        of_columns = (answers / answers.mean() * losses).sum(0)
    else:
        assert isinstance(loss, InfoNCE), f"the reference knows no {type(loss).__name__}"
        logits = raw.masked_fill(masked, NEVER)
        answers = answers * own.sum(0)  # what is nobody's asks nothing
        if isinstance(loss, MILNCE):
            of_texts = logits.logsumexp(0).expand_as(logits).masked_fill(~belongs, -math.inf)
            every = torch.cat([logits, of_texts], 1).logsumexp(1)
            shares = asks * (every - logits.masked_fill(~belongs, -math.inf).logsumexp(1))
            return shares.mean(), shares
        smoothing = loss.label_smoothing
        of_rows = asks * _cross_entropy(raw, logits, positive, smoothing)
        of_columns = _cross_entropy(raw.T, logits.T, positive.T, smoothing)
        of_columns = number * answers / answers.sum() * of_columns
    shares = (of_rows + own @ of_columns) / 2
    return (of_rows.sum() + of_columns.sum()) / 2 / number, shares


def _cross_entropy(raw: Tensor, logits: Tensor, positive: Tensor, smoothing: float) -> Tensor:
    """[rows], against targets that are even over the positives, and with the part `smoothing` over
    all. A masked row of the other side is in no softmax."""
    target = (1 - smoothing) * positive / positive.sum(1, keepdim=True).clamp(min=1)
    target = target + smoothing / raw.shape[1]
    return logits.logsumexp(1) - (target * raw).sum(1)


def matching(
    loss: Any, fusion: nn.Module, sides: Sides, scale: Tensor, *, seed: int, precision: str
) -> tuple[Tensor, tuple[list[int], list[int]]]:
    """The loss of single pairs, pair by pair, and who was drawn for whom on each side, −1: nobody.
    Negatives from the whole matrix, by the documented rule."""
    first, second, belongs, equal = sides
    logits = scale.detach().clamp(max=math.log(100.0)).exp() * first.embeds @ second.embeds.T
    not_drawn = belongs if loss.targets.duplicates == "negatives" else equal
    logits = logits.detach().masked_fill(not_drawn, -math.inf)

    def drawn(logits: Tensor, seed: int) -> list[int]:
        best = (logits + gumbel_noise(seed, torch.arange(len(logits)), logits.shape[1])).max(1)
        return torch.where(best.values == -math.inf, -1, best.indices).tolist()

    of_firsts, of_seconds = drawn(logits, seed), drawn(logits.T, ~seed)
    partner = belongs.float().argmax(0).tolist()
    asks, answers = (side.weight / side.weight.sum() for side in (first, second))
    pairs = [(a, b, 1.0, answers[b]) for b, a in enumerate(partner)]
    pairs += [(a, b, -1.0, answers[b]) for b, a in enumerate(of_seconds) if a >= 0]
    pairs += [(a, b, -1.0, asks[a]) for a, b in enumerate(of_firsts) if b >= 0]
    losses = []
    for a, b, sign, weight in pairs:
        tokens = first.tokens[a][None], second.tokens[b][None]
        score = in_precision(precision, fusion, *tokens, torch.ones(tokens[1].shape[:2]))[0]
        losses.append(weight * F.softplus(-sign * score))
    return torch.stack(losses).sum() / 3, (of_firsts, of_seconds)


def contrastive_of_prefixes(
    loss: Any, sides: Sides, scalars: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """As `contrastive`: the mean over the prefixes of a `Prefixed`, and all of the embeddings."""
    if not isinstance(loss, Prefixed):
        return contrastive(loss, sides, scalars)

    found = [contrastive(loss.loss, sides, scalars)]
    for dim in loss.dims:
        first, second = (_shortened(side, dim) for side in sides[:2])
        shorter = sides._replace(first=first, second=second)
        found.append(contrastive(loss.loss, shorter, scalars))
    values, shares = zip(*found)
    return torch.stack(values).mean(), torch.stack(shares).mean(0)


class StepLosses(NamedTuple):
    whole: Tensor  # [], the sum with all weights
    by_name: dict[str, float]  # contrastive/image_text, without its weight
    of_samples: dict[str, dict[int, float]]  # pair -> place in the first side -> contrastive loss
    drawn: list[dict[str, list[int]]]  # loss by loss: rows -> negatives


def losses_of(
    objective: Any,
    layers: Layers,
    named: Mapping[str, Tensor],
    batch: Batch,
    recipe: Recipe,
    step: int,
) -> StepLosses:
    rows = rows_made(layers, batch, recipe, step)
    whole, by_name, of_samples = torch.zeros(()), {}, {}
    drawn: list[dict[str, list[int]]] = [{} for _ in range(batch.num_losses)]
    for pair in objective.terms:
        # never rounded
        scalars = {name: named[f"head.{tensor}"] for name, tensor in pair.scalars.items()}
        suffix = f"/{pair.name}" if len(objective.terms) > 1 else ""
        values: dict[str, list[Tensor]] = defaultdict(list)
        of_pair = of_samples.setdefault(pair.name, {})
        of_two = hasattr(pair, "first")
        for m in () if of_two else range(batch.num_losses):
            of_term = together(pair, rows, batch.rows_per_sample, m)
            weighs = len(of_term[0][1]) and min(side.weight.sum() for side, _ in of_term)
            nothing = sum(0.0 * rows[name].embeds.sum() for name in pair.rows)
            value = joint(pair.loss, of_term, scalars) if weighs else nothing
            values[f"{pair.kind}{suffix}"].append(value)
        for m in range(batch.num_losses) if of_two else ():
            sides = sides_of(pair, rows, batch.rows_per_sample, m)
            if not len(sides.first.place) or not min(s.weight.sum() for s in sides[:2]):
                nothing = sum(0.0 * rows[name].embeds.sum() for name in pair.rows)
                values[f"contrastive{suffix}"].append(nothing)
                continue
            value, shares = contrastive_of_prefixes(pair.loss, sides, scalars)
            values[f"contrastive{suffix}"].append(value)
            of_pair |= dict(zip(sides.first.place.tolist(), shares.tolist()))
            if pair.matching:
                seed = recipe.draws(recipe.seed, step, m, -1)
                value, negatives = matching(
                    *(pair.matching, layers[pair.second][-1].fusion, sides, scalars["logit_scale"]),
                    seed=seed,
                    precision=recipe.precision,
                )
                values[f"matching{suffix}"].append(value)
                drawn[m] |= dict(zip(pair.rows, negatives))
        for name, of_losses in values.items():
            value = torch.stack(of_losses).mean()
            whole = whole + batch.loss_weights.get(name, pair.weight) * value
            by_name[name] = value.item()
    return StepLosses(whole, by_name, of_samples, drawn)


# -- training


def built(objective: Any, towers: Mapping[str, Any], seed: int) -> dict[str, list[nn.Module]]:
    return {name: [spec.build(seed) for spec in towers[name].specs] for name in objective.names}


def train(
    objective: Any, towers: Mapping[str, Any], batches: Iterable[Batch], recipe: Recipe
) -> dict[str, Any]:
    """Step by step the losses, and the norms of gradients by group; the gradients of the first step;
    parameters and running statistics at the end."""
    layers = built(objective, towers, recipe.seed)
    every = [layer.train() for own in layers.values() for layer in own]
    named = {layer.canonical_names[n]: p for layer in every for n, p in layer.named_parameters()}
    lock(recipe.locked, layers)
    groups = groups_by_hand(recipe, named, layers)
    optimizer = torch.optim.AdamW([g for g in groups if not g["muon"]], lr=recipe.lr)
    muon = [g for g in groups if g["muon"]]
    steps, norms, gradients, clipped = [], [], {}, {}
    for step, batch in enumerate(batches):
        steps.append(losses_of(objective, layers, named, batch, recipe, step))
        factor = recipe.loss_scale if recipe.precision == "fp16" else 1
        for parameter in named.values():
            parameter.grad = None
        (factor * steps[-1].whole).backward()
        learned = {n: p for n, p in named.items() if p.requires_grad}
        for parameter in learned.values():
            if parameter.grad is None:  # of what no row has come to
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= factor
        gradients = gradients or {n: p.grad.clone() for n, p in learned.items()}
        norms.append({})
        for group in (*objective.names, "head"):
            members = [p for n, p in named.items() if n.startswith(group + ".")]
            limit = recipe.clipping.get(group, math.inf)
            norms[-1][group] = float(nn.utils.clip_grad_norm_(members, limit))
        clipped = clipped or {n: p.grad.clone() for n, p in learned.items()}
        for group in (*optimizer.param_groups, *muon):
            group["lr"] = group["highest"] * warmth(recipe.scheduler, step, group["warmup_steps"])
        if step not in recipe.skipped:
            optimizer.step()
            for group in muon:
                step_matrix(group, recipe.muon)
    return {
        "losses": [each.whole.item() for each in steps],
        "losses_by_name": [each.by_name for each in steps],
        "sample_losses": [each.of_samples for each in steps],
        "drawn": [each.drawn for each in steps],
        "norms": norms,
        "gradients": gradients,
        "clipped": clipped,
        "parameters": {n: p.detach() for n, p in named.items()},
        "buffers": {
            layer.canonical_names[n]: buffer
            for layer in every
            for n, buffer in layer.named_buffers()
            if n in layer.canonical_names
        },
    }


@torch.no_grad()
def held_out(
    objective: Any, towers: Mapping[str, Any], batch: Batch, recipe: Recipe
) -> dict[str, Sides]:
    """Comparison -> what an evaluation has of it."""
    layers = built(objective, towers, recipe.seed)
    for own in layers.values():
        for layer in own:
            layer.eval()
    rows = rows_made(layers, batch, recipe, 0)
    return {
        each.name: sides_of(each, rows, batch.rows_per_sample) for each in objective.comparisons
    }


def lock(block: Mapping[str, Any], layers: Layers) -> None:
    """As the `locked` block has it. The head is the last layer of each branch."""
    for branch, own in layers.items():
        value = block.get(branch, False)
        held = [layer for layer in own[:-1] if list(layer.parameters())]
        first = value["all_but_last"] if isinstance(value, dict) else 0 if value else len(held)
        for layer in [*held[: len(held) - first], *([own[-1]] if block.get("head") else [])]:
            layer.requires_grad_(False)
            if block.get("batch_norm") == "locked":
                for module in layer.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.eval()


def groups_by_hand(
    recipe: Recipe, named: Mapping[str, Tensor], layers: Layers
) -> list[dict[str, Any]]:
    """A parameter group for each parameter, as the `optimizer_groups` block has it."""
    block, depths = recipe.optimizer_groups, {}
    for branch in layers.values():
        held = [layer for layer in branch if list(layer.parameters())]
        for i, layer in enumerate(held):
            names = [layer.canonical_names[n] for n, _ in layer.named_parameters()]
            depths |= dict.fromkeys(names, len(held) - 1 - i)
    groups = []
    for name, parameter in named.items():
        own, patterns = block.get(name.split(".")[0], {}), block.get("no_decay")
        undecayed = parameter.dim() < 2
        if patterns is not None:
            undecayed = any(fnmatch(name, pattern) for pattern in patterns)
        rate = own.get("lr", recipe.lr) * own.get("layer_decay", 1.0) ** depths[name]
        decay = 0.0 if undecayed else own.get("weight_decay", recipe.weight_decay)
        groups.append({"params": [parameter], "weight_decay": decay, "highest": rate})
        groups[-1]["warmup_steps"] = own.get("warmup_steps")
        named_so = any(fnmatch(name, pattern) for pattern in recipe.matrices)
        muon = named_so and parameter.dim() == 2
        groups[-1]["muon"] = muon
        key = "muon_lr" if muon else "adam_lr"
        groups[-1]["highest"] *= recipe.muon.get(key, recipe.lr) / recipe.lr
    return groups


@torch.no_grad()
def step_matrix(group: dict[str, Any], params: Mapping[str, Any]) -> None:
    """Muon as Jordan (2024) and Liu et al. (2025) write it down, in float64."""
    (matrix,) = group["params"]
    gradient, momentum = matrix.grad.double(), params.get("momentum", 0.95)
    kept = group.setdefault("kept", torch.zeros_like(gradient))
    kept.mul_(momentum).add_(gradient, alpha=1 - momentum)
    x = (1 - momentum) * gradient + momentum * kept if params.get("nesterov", True) else kept
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(params.get("ns_steps", 5)):
        gram = x @ x.mT if len(x) <= x.shape[1] else x.mT @ x  # x times either is the same
        quintic = -4.7750 * gram + 2.0315 * gram @ gram
        x = 3.4445 * x + (quintic @ x if len(x) <= x.shape[1] else x @ quintic)
    rate = group["lr"]
    matrix.mul_(1 - rate * group["weight_decay"])
    matrix.sub_((rate * 0.2 * max(matrix.shape) ** 0.5 * x).to(matrix.dtype))


def warmth(scheduler: Mapping[str, Any], step: int, warmup_steps: int | None) -> float:
    """The part of the rate in this step, counted from 0."""
    if not scheduler:
        return 1.0
    return min(1.0, (step + 1) / (warmup_steps or scheduler["params"]["warmup_num_steps"]))
