"""Which parameters learn how fast and decay how much: the `optimizer_groups` block, and the
schedule that carries it out.

A parameter's rate in a step is

    rate(step) = schedule(step) · lr / optimizer.params.lr · layer_decay^depth

with `schedule` DeepSpeed's own, `lr` that of the parameter's group (its branch or `head`, the first
part of its canonical name) and `depth` the number of layers with parameters between it and the head
of its branch, counted from 1 (Bao et al. 2022, BEiT, section 3.2). A group with `warmup_steps`
follows the same schedule with that many `warmup_num_steps`. Biases, norms and what the loss learns,
which all have one dimension, are not decayed; `no_decay` says it by names instead.

With Muon (`engine/optimizer/muon.py`) the matrices of blocks have groups of their own. Their rate is
multiplied by `muon_lr` / `lr`, and that of all others by `adam_lr` / `lr`, where the optimizer's
params have these. A block is a layer of which a branch has several, so a matrix of one is a
parameter of two dimensions, named `…weight`, which occurs in several layers under names that differ
in numbers alone, and which is no table of embeddings. Embeddings, projections, norms and the head
are stepped by AdamW; `muon` says it by names instead.

Reading, checking and grouping are plain Python; `GroupSchedule` acts on one rank's optimizer and
calls no collective.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field

from common.blocks import NotNegative, Whole, block, read_block, refuse_unknown
from common.spelling import nearest_pattern
from engine.config.implied import steps_matrices
from engine.optimizer.clipping_rules import HEAD

MUON_RATES = ("muon_lr", "adam_lr")  # of Muon's params: of matrices, of all others
_NUMBER = re.compile(r"\d+")  # of a layer: blocks.3, encoder_layer_3


@block
class GroupRule:
    """How the parameters of one group learn.

    None: as the `optimizer` and `scheduler` blocks say. `layer_decay`: of the rate from a layer to
    the one before it, above 0 up to 1.
    """

    lr: Annotated[
        float | None,
        Field(gt=0, description='a number above 0; to hold a tower still, use "locked"'),
    ] = None
    weight_decay: NotNegative | None = None
    layer_decay: Annotated[
        float, Field(gt=0, le=1, description="a number above 0 up to 1, such as 0.75")
    ] = 1.0
    warmup_steps: Whole | None = None


@dataclass(frozen=True)
class OptimizerGroups:
    """The `optimizer_groups` block. Patterns are of canonical names as in `fnmatch`. `no_decay`:
    None: parameters of one dimension. `muon`: of these names those of two dimensions; None: the
    matrices of blocks."""

    rules: Mapping[str, GroupRule]
    no_decay: tuple[str, ...] | None = None
    muon: tuple[str, ...] | None = None

    def rates(
        self, schedules: Mapping[int | None, float], base_lr: float | None
    ) -> dict[str, float]:
        """The present rate of each group that has one of its own, at its head. `schedules`: the
        rate of each length of warm-up."""
        found = {}
        for group, rule in self.rules.items():
            if rule.lr is not None or rule.warmup_steps is not None:
                scale = 1.0 if rule.lr is None or base_lr is None else rule.lr / base_lr
                found[group] = schedules[rule.warmup_steps] * scale
        return found


class Setting(NamedTuple):
    """The settings of a parameter group of the optimizer. `weight_decay`, `warmup_steps` None: as
    the JSON's blocks say. `branch`: whose parameters it holds, where branches may stand still one
    by one (`engine/optimizer/standing_still.py`); else empty. `muon`: whether Muon steps it."""

    lr_scale: float
    weight_decay: float | None
    warmup_steps: int | None
    branch: str = ""
    muon: bool = False


def optimizer_groups(block: Any, branches: Sequence[str]) -> OptimizerGroups:
    """`branches.optimizer_groups` as written, checked; None: all groups alike. Errors: ValueError
    with the key."""
    where, groups = "branches.optimizer_groups", (*branches, HEAD)
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        raise ValueError(
            f'{where}: got {block!r}; it is an object such as {{"{groups[0]}": {{"lr": 1e-4, "layer_decay": 0.75}}}}'
        )
    refuse_unknown(block, (*groups, "no_decay", "muon"), where)
    no_decay = _read_patterns(f"{where}.no_decay", block.get("no_decay"), "*.bias")
    muon = _read_patterns(f"{where}.muon", block.get("muon"), "image.blocks.*.weight")
    rules = {group: _read_rule(f"{where}.{group}", group, block.get(group, {})) for group in groups}
    return OptimizerGroups(rules, no_decay, muon)


def _read_patterns(where: str, written: Any, example: str) -> tuple[str, ...] | None:
    if written is None:
        return None
    if not (isinstance(written, list) and all(isinstance(pattern, str) for pattern in written)):
        raise ValueError(
            f'{where}: got {written!r}; it is a list of patterns of parameter names, such as ["{example}"]'
        )
    return tuple(written)


def _read_rule(where: str, group: str, written: Any) -> GroupRule:
    rule = read_block(GroupRule, written, where, '{"lr": 1e-4, "weight_decay": 0.1}')
    if group == HEAD and "layer_decay" in written:
        raise ValueError(f"{where}.layer_decay: the head is one layer; leave it out")
    return rule


def check_groups(groups: OptimizerGroups, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a rule that DeepSpeed's `optimizer` and `scheduler` blocks leave nothing
    to stand on."""
    params = config["optimizer"].get("params", {})
    base = params.get("lr")
    has_base = base == "auto" or (_is_number(base) and base > 0)
    schedule = config.get("scheduler", {}).get("params", {})
    for group, rule in groups.rules.items():
        where = f"branches.optimizer_groups.{group}"
        if rule.lr is not None and not has_base:
            raise ValueError(
                f"{where}.lr: the schedule is scaled by it ÷ optimizer.params.lr, which is "
                f"{base!r}; give a number above 0 there"
            )
        if rule.warmup_steps is not None and "warmup_num_steps" not in schedule:
            raise ValueError(
                f'{where}.warmup_steps: takes the place of "warmup_num_steps" in the scheduler\'s params, which has none; use a scheduler '
                "with it, such as WarmupCosineLR"
            )
    for key in MUON_RATES:
        if key in params and not has_base:
            raise ValueError(
                f"optimizer.params.{key}: the schedule is scaled by it ÷ optimizer.params.lr, which "
                f"is {base!r}; give a number above 0 there"
            )
    if groups.muon is not None and not steps_matrices(config["optimizer"]):
        raise ValueError(
            f"branches.optimizer_groups.muon: says what Muon steps, and the optimizer is "
            f"{config['optimizer']['type']}; remove the key, or use Muon"
        )


class DescribesParameters(Protocol):
    """What is asked of a layer before it exists: the shape of each of its parameters, by its name
    in the run, and which of them are tables of embeddings."""

    @property
    def canonical_parameters(self) -> Mapping[str, Sequence[int]]: ...

    @property
    def tables(self) -> Collection[str]: ...


def settings_of(
    groups: OptimizerGroups,
    layers: Mapping[str, Sequence[DescribesParameters]],
    optimizer: Mapping[str, Any],
    apart: bool = False,
) -> dict[str, Setting]:
    """canonical name -> the settings of its parameter group. `layers[branch]`: all layers in order,
    the head last; `optimizer`: DeepSpeed's block; `apart`: a group for each branch. Raises ValueError for a pattern that matches no
    parameter."""
    params: Mapping[str, Any] = optimizer.get("params", {})
    matrices = matrices_of(groups, layers, optimizer)
    ratios = [params[key] / params["lr"] if key in params else 1.0 for key in MUON_RATES]
    found = {}
    for branch, specs in layers.items():
        held = [spec.canonical_parameters for spec in specs if spec.canonical_parameters]
        for depth, parameters in enumerate(reversed(held)):  # from the head, which is at depth 0
            for name, shape in parameters.items():
                rule = groups.rules[name.split(".", 1)[0]]
                scale = 1.0 if rule.lr is None else rule.lr / params["lr"]
                decay = rule.weight_decay
                if _is_not_decayed(name, shape, groups.no_decay):
                    decay = 0.0
                elif decay is None:
                    decay = params.get("weight_decay")
                muon_ratio, adam_ratio = ratios
                found[name] = Setting(
                    scale
                    * rule.layer_decay**depth
                    * (muon_ratio if name in matrices else adam_ratio),
                    decay,
                    rule.warmup_steps,
                    branch if apart else "",
                    name in matrices,
                )
    _refuse_idle("no_decay", groups.no_decay, found, "parameter")
    return found


def matrices_of(
    groups: OptimizerGroups,
    layers: Mapping[str, Sequence[DescribesParameters]],
    optimizer: Mapping[str, Any],
) -> frozenset[str]:
    """The canonical names of what Muon steps; none with another optimizer. Arguments and errors: as
    `settings_of`."""
    if not steps_matrices(optimizer):
        return frozenset()
    if groups.muon is None:
        return frozenset(name for specs in layers.values() for name in _matrices_of_blocks(specs))
    shapes = {
        name: shape
        for specs in layers.values()
        for spec in specs
        for name, shape in spec.canonical_parameters.items()
    }
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    _refuse_idle("muon", groups.muon, matrices, "parameter of two dimensions")
    return frozenset(name for name in matrices if _matches(name, groups.muon))


def _matrices_of_blocks(specs: Sequence[DescribesParameters]) -> list[str]:
    alike: dict[str, list[str]] = defaultdict(list)  # without their numbers -> names
    found_in: dict[str, set[int]] = defaultdict(set)  # the same -> layers
    for place, spec in enumerate(specs):
        for name, shape in spec.canonical_parameters.items():
            if len(shape) == 2 and name.endswith("weight") and name not in spec.tables:
                key = _NUMBER.sub("#", name)
                alike[key].append(name)
                found_in[key].add(place)
    return [name for key, names in alike.items() if len(found_in[key]) > 1 for name in names]


def _refuse_idle(
    key: str, patterns: Sequence[str] | None, names: Collection[str], kind: str
) -> None:
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"branches.optimizer_groups.{key}: {pattern!r} matches no "
                f"{kind}{nearest_pattern(pattern, list(names))}"
            )


def _is_not_decayed(name: str, shape: Sequence[int], patterns: Sequence[str] | None) -> bool:
    if patterns is None:
        return len(shape) <= 1
    return _matches(name, patterns)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def groups_of_names(
    names: Sequence[str], settings: Mapping[str, Setting]
) -> dict[Setting, list[str]]:
    """The names with the same settings, in the order in which they come."""
    found: dict[Setting, list[str]] = {}
    for name in names:
        found.setdefault(settings[name], []).append(name)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class GroupSchedule:
    """DeepSpeed's learning-rate schedule, scaled for each parameter group, with a schedule for each
    length of warm-up.

    `make(warmup_steps)` builds DeepSpeed's schedule on `optimizer` with that many
    `warmup_num_steps` (None: as written), or returns None where the rate is constant. `settings[i]`
    is of the optimizer's i-th group; `warmups`: all that occur in the run, so that the state is
    equal on all ranks. A schedule sees each group at the same base rate; what it makes of it is
    `rates[warmup_steps]`.

    By itself DeepSpeed's warm-up holds two steps at its least rate, 0 unless another is given. Here
    step k of a run, counted from 1, is step k of its schedule: in a linear warm-up of N steps it
    has k / N of the rate, as in OpenCLIP.
    """

    def __init__(
        self,
        optimizer: Any,
        make: Callable[[int | None], Any],
        settings: Sequence[Setting],
        warmups: Sequence[int | None],
    ):
        self.optimizer, self.settings = optimizer, settings
        base = optimizer.param_groups[0]["lr"]
        self.schedules, self.rates = {}, {}
        for warmup in dict.fromkeys((None, *warmups)):
            self._set([base] * len(settings))
            self.schedules[warmup] = schedule = make(warmup)
            if hasattr(schedule, "warmup_num_steps"):
                schedule.step(1)
            self.rates[warmup] = optimizer.param_groups[0]["lr"]
        self._scale()

    def step(self, **given: Any) -> None:
        """After an applied step."""
        for warmup, schedule in self.schedules.items():
            if schedule is not None:
                schedule.step(**given)
                self.rates[warmup] = self.optimizer.param_groups[0]["lr"]
        self._scale()

    def _scale(self) -> None:
        self._set([self.rates[own.warmup_steps] * own.lr_scale for own in self.settings])

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        """By parameter group, of the next step."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {
            "rates": {str(warmup): rate for warmup, rate in self.rates.items()},
            "schedules": {str(w): s.state_dict() for w, s in self.schedules.items() if s},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["rates"]) != set(map(str, self.rates)):
            raise ValueError(
                f"learning-rate schedule: the state has warm-ups of {list(state['rates'])} steps, "
                f"and this run of {list(self.rates)} (None: the scheduler's own); go on with the "
                "optimizer_groups that the checkpoint was made with"
            )
        planned = {str(warmup) for warmup, own in self.schedules.items() if own is not None}
        if planned - state["schedules"].keys():
            raise ValueError(
                "learning-rate schedule: the checkpoint was trained at a constant rate, and this run "
                "has a scheduler; take the scheduler out, or export.py the model and begin another "
                "run with --import"
            )
        if any("last_batch_iteration" not in own for own in state["schedules"].values()):
            raise ValueError(
                "learning-rate schedule: the checkpoint was trained with one of torch's, which are "
                "no longer taken; export.py its model and begin another run with --import"
            )
        self.rates = {warmup: state["rates"][str(warmup)] for warmup in self.rates}
        for warmup, schedule in self.schedules.items():
            if schedule is not None:
                own = state["schedules"][str(warmup)]
                schedule.load_state_dict(own)
                if (done := own["last_batch_iteration"]) >= 0:
                    # what it makes of so many steps in a run of this length
                    schedule.step(done)
                    self.rates[warmup] = self.optimizer.param_groups[0]["lr"]
        self._scale()
