"""The unit that a tower is cut into: a layer that maps named tensors to named tensors, and the
recipe that makes it.

A library model is built once on the meta device (no memory), cut into layers, and only the layers
that a stage owns are ever made real. Names come from the identity of parameters, so they are the
library's own.
"""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode


class Layer(nn.Module):
    """A step of a tower: reads some named tensors, makes some, passes all others on untouched.

    `reads`, `makes`, `drops` name tensors (the words of `models/README.md`); `drops` are those read
    here for the last time. `reads_if_given` are passed to `compute` by name, where there are any.
    `canonical_names` maps each local state-dict name to its name in the run: `image.` or `text.` +
    the library's name, or `head.` + ours. The first component is the group whose gradient norm is
    clipped together. `added`: how the local names of tensors begin that the library's model does
    not have, and how their canonical names do behind the branch. `scalars`: of a head, names and
    first values of what the losses learn and it owns. `unsaved_names`: the library's
    names of buffers that are not part of the state, for layers with a `LibraryModel`.
    """

    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    reads_if_given: tuple[str, ...] = ()
    added: tuple[str, str] | None = None
    scalars: Mapping[str, float] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.canonical_names: dict[str, str] = {}
        self.unsaved_names: dict[str, str] = {}

    # Any: a layer names the tensors that it reads, so each has a signature of its own
    def compute(self, *tensors: Any, **given: Any) -> Tensor | tuple[Tensor, ...]:
        """The tensors of `reads`, in that order, to those of `makes`, in that order."""
        raise NotImplementedError

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a new dict; the given one and the tensors in it stay as they are."""
        missing = [name for name in self.reads if name not in tensors]
        if missing:
            raise ValueError(
                f"{type(self).__name__} reads {', '.join(self.reads)} but was not given "
                f"{', '.join(missing)}; given: {', '.join(sorted(tensors)) or 'nothing'}. Feed the "
                "layers of a tower in their order"
            )
        given = {name: tensors[name] for name in self.reads_if_given if name in tensors}
        made = self.compute(*(tensors[name] for name in self.reads), **given)
        made = (made,) if isinstance(made, Tensor) else made
        passed = {name: tensor for name, tensor in tensors.items() if name not in self.drops}
        return {**passed, **dict(zip(self.makes, made, strict=True))}

    @property
    def draws(self) -> bool:
        """Whether the training forward draws random numbers (then a second forward must restore the
        random state).

        Conservative: any module that holds a positive `p` or a positive number named like a dropout
        counts, also when that number would not be used.
        """
        return any(
            _is_positive(value) and (key == "p" or "drop" in key)
            for module in self.modules()
            for key, value in vars(module).items()
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


class Weights(Protocol):
    """What `LayerSpec.build` asks of a reader of pretrained weights
    (`models/weights/reading.py`)."""

    def given(self, layer: Layer) -> Collection[str]:
        """Return the local names of the tensors of this layer that `fill` sets; nothing is read."""

    def fill(self, layer: Layer) -> None:
        """Copy the pretrained tensors of this layer into it, in place."""


class LibraryModel:
    """First values of layers whose library initialises a model as a whole: its model is made real
    once, in fp32 on the CPU, and each layer copies its own tensors out of it.

    That takes the memory and the time of the whole tower on every rank, whatever its stage holds,
    for as long as layers are built; `library_models_kept` makes it once for all of them and frees
    it. Where pretrained weights give all parameters of a layer, the model is made without them, for
    its buffers (`without_parameters`).
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        """`make`: the library's constructor, on the ambient device, drawing from torch's CPU
        generator."""
        self._make = make

    def fill(self, layer: Layer, seed: int, given: Collection[str] = ()) -> None:
        """Copy the layer's tensors, those outside the state too, but for those that were `added` to
        the library's and those that are `given` otherwise, by their local names."""
        targets, copied = _tensors(layer), {}
        for local, name in layer.canonical_names.items():
            if local not in given and not (layer.added and local.startswith(layer.added[0])):
                copied[local] = name.split(".", 1)[1]
        if not copied and not layer.unsaved_names:
            return
        draws = any(isinstance(targets[local], nn.Parameter) for local in copied)
        found = self._model(seed if draws else None)
        for local, name in copied.items():
            targets[local].copy_(found[name])
        for local, name in layer.unsaved_names.items():
            # not copied: a forward on the meta device may have put one of another shape in its
            # place
            path, _, last = local.rpartition(".")
            layer.get_submodule(path)._buffers[last] = found[name].clone()

    def _model(self, seed: int | None) -> dict[str, Tensor]:
        """The model's tensors. None: its parameters are on the meta device."""
        kept = _KEPT.get()
        found = kept.get((id(self), seed)) if kept is not None else None
        if found is None:
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            model = self._make() if seed is not None else without_parameters(self._make)
            found = _tensors(model)
            if kept is not None:
                kept[id(self), seed] = found
        return found


def without_parameters(make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose parameters are on the meta device and whose buffers are real, as its library
    computes them (tables of positions, masks). No parameter is drawn.

    While the model is made, its parameters are on the CPU, because libraries put their buffers
    where they find them. Their memory is not written, so it takes no pages.
    """
    unwritten = _Unwritten()

    # Any: torch declares that a hook returns nothing, and takes the parameter that it returns
    def unset(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        return unwritten.like(parameter)

    hook = register_module_parameter_registration_hook(unset)
    try:
        with unwritten:
            model = make()
    finally:
        hook.remove()
    return model._apply(lambda t: t.to("meta") if isinstance(t, nn.Parameter) else t)


class _Unwritten(TorchDispatchMode):
    """Skips operations that write into the parameters that it made."""

    def __init__(self) -> None:
        super().__init__()
        # held, so that no other tensor gets the address of one that was freed
        self._storages: dict[int, torch.UntypedStorage] = {}

    def like(self, parameter: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
        self._storages[made.untyped_storage()._cdata] = made.untyped_storage()
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            if args[0].untyped_storage()._cdata in self._storages:
                return args[0]
        return func(*args, **(kwargs or {}))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """With all names of those that modules share."""
    return dict(
        [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    )


_KEPT: ContextVar[dict[tuple[int, int | None], dict[str, Tensor]] | None] = ContextVar(
    "kept", default=None
)


@contextlib.contextmanager
def library_models_kept() -> Iterator[None]:
    """Within it each `LibraryModel` is made once, however many layers are built; at its end they
    are freed. Without it, each layer makes its own."""
    token = _KEPT.set({} if _KEPT.get() is None else _KEPT.get())
    try:
        yield
    finally:
        _KEPT.reset(token)


@dataclass(frozen=True)
class LayerSpec:
    """The recipe of one layer. It costs no memory: `template` lives on the meta device until
    `build` makes a real copy.

    `initialise(layer)` applies the library's own initialisation to a layer with unset tensors,
    drawing from torch's CPU generator. With `original`, it does so for what was `added` to the
    library's model, and the rest is copied from there.
    """

    name: str  # such as image.layer1.0
    branch: str  # such as image or text
    template: Layer = field(repr=False, compare=False)
    # Any: a layer of the template's class
    initialise: Callable[[Any], None] = field(repr=False, compare=False)
    original: LibraryModel | None = field(default=None, repr=False, compare=False)

    @property
    def num_parameters(self) -> int:
        """Elements in all parameters (buffers not counted), without building."""
        return sum(parameter.numel() for parameter in self.template.parameters())

    @property
    def canonical_parameters(self) -> dict[str, torch.Size]:
        """The shapes of its parameters, by the names that they have in the run, without
        building."""
        return {
            self.template.canonical_names[local]: parameter.shape
            for local, parameter in self.template.named_parameters()
        }

    @property
    def tables(self) -> frozenset[str]:
        """Of these names those of tables of embeddings."""
        embeddings = {
            id(module.weight)
            for module in self.template.modules()
            if isinstance(module, nn.Embedding)
        }
        return frozenset(
            self.template.canonical_names[local]
            for local, parameter in self.template.named_parameters()
            if id(parameter) in embeddings
        )

    def build(self, seed: int, weights: Weights | None = None) -> Layer:
        """Make this layer, and no other, real: on the CPU, in fp32.

        Its initial weights depend on `seed` and `name` alone, not on the stage that it is built in,
        the layers built before it or torch's random state, which stays as it was. What a pretrained
        file holds is then read from `weights`. Of a layer whose parameters are all there no first
        value is drawn; of any other all are, so that those that are left are the same as without
        the file.
        """
        given = frozenset(() if weights is None else weights.given(self.template))
        layer = copy.deepcopy(self.template)
        draws = any(
            local not in given for local, _ in layer.named_parameters(remove_duplicate=False)
        )
        layer._apply(partial(_real, parameters=draws))
        _poison(layer)
        # only the CPU generator: torch.manual_seed would also reseed every GPU, which
        # fork_rng(devices=[]) does not restore
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(stable_seed(seed, self.name))
            self.initialise(layer)  # on the meta device it sets the buffers alone
            layer._apply(_real)
            if self.original is not None:  # the same for all layers of the branch
                self.original.fill(layer, stable_seed(seed, self.branch), given)
        if self.original is None:
            _remake_buffers(layer, self.name)
        _refuse_unset(layer, self.name, given)
        if weights is not None:
            weights.fill(layer)
        return layer


def _real(tensor: Tensor, parameters: bool = True) -> Tensor:
    """A tensor of the meta device in unset memory, and others as they are; without `parameters`,
    these too."""
    if not tensor.is_meta or (isinstance(tensor, nn.Parameter) and not parameters):
        return tensor
    return torch.empty_like(tensor, device="cpu")


@dataclass(frozen=True)
class Tower:
    """One branch's network. `width`: size of the pooled features; `config`: how it was made,
    JSON-able, for the run's record."""

    branch: str
    name: str
    width: int
    specs: tuple[LayerSpec, ...]
    config: dict[str, Any] = field(compare=False)
    example: Callable[[int], dict[str, Tensor]] | None = field(
        default=None, repr=False, compare=False
    )
    """Of so many samples what enters the first layer, on the meta device. Images and texts: as
    their `config` says."""

    @property
    def num_parameters(self) -> int:
        return sum(spec.num_parameters for spec in self.specs)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that its layers read and none of them makes: what has to be loaded, and what
        may be."""
        made: set[str] = set()
        inputs: dict[str, None] = {}
        for layer in (spec.template for spec in self.specs):
            inputs |= dict.fromkeys(
                name for name in (*layer.reads, *layer.reads_if_given) if name not in made
            )
            made |= set(layer.makes)
        return tuple(inputs)


def runs(specs: Iterable[LayerSpec], tensors: dict[str, Tensor]) -> bool:
    """Do the layers run on these tensors, which are on the meta device?"""
    try:
        with torch.no_grad():
            for spec in specs:
                tensors = spec.template(tensors)
    except Exception:  # whatever code of a library raises
        return False
    return True


def stable_seed(seed: int, name: str) -> int:
    """A 63-bit seed from (seed, layer name), the same in every process and Python version (Python's
    own hash is salted)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def cut(
    branch: str,
    model: nn.Module,
    layers: list[tuple[str, Layer]],
    initialise: Callable[[Layer], None],
    dropped: tuple[str, ...] = (),
    state: Mapping[str, Tensor] | None = None,
    original: LibraryModel | None = None,
) -> tuple[LayerSpec, ...]:
    """Name the layers' tensors after the library model they share them with, and make their
    recipes; `original` as in `LayerSpec`.

    `state`: the model's own tensors by the names that they get; None: `model.state_dict()`. Each
    must be in exactly one layer, but for those whose names start with a prefix in `dropped`.
    """
    state = model.state_dict(keep_vars=True) if state is None else state
    # of several names of a tensor the first
    library_names = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    expected = sorted(
        name for name in library_names.values() if not name.startswith(dropped or ("\0",))
    )
    unsaved = {id(buffer): name for name, buffer in model.named_buffers()} if original else {}
    owned: list[str] = []
    for _, layer in layers:
        names = set()  # a tensor that modules of one layer share has several local names there
        for local, tensor in layer.state_dict(keep_vars=True).items():
            if layer.added and local.startswith(layer.added[0]):
                name = layer.added[1] + local.removeprefix(layer.added[0])
            else:
                name = library_names[id(tensor)]
                names.add(name)
            layer.canonical_names[local] = f"{branch}.{name}"
        owned += names
        layer.unsaved_names = {
            local: unsaved[id(buffer)]
            for local, buffer in layer.named_buffers()
            if local not in layer.canonical_names and id(buffer) in unsaved
        }
    if sorted(owned) != expected:
        raise RuntimeError(
            f"{type(model).__name__} was cut wrongly: "
            f"{sorted(set(owned) ^ set(expected)) or 'a tensor is in two layers'}"
        )
    return tuple(
        LayerSpec(f"{branch}.{name}", branch, layer, initialise, original) for name, layer in layers
    )


def reset(layer: nn.Module) -> None:
    """What each module in it draws when it is made; inner modules first, as constructors do."""
    for module in reversed(list(layer.modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        if reset is not None:
            reset()


UNSET = -1  # in buffers of integers, which hold indices


def _poison(layer: Layer) -> None:
    """Unset memory may look initialised; not-a-number does not."""
    persistent = layer.state_dict()
    for name, tensor in [*persistent.items(), *layer.named_buffers()]:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(0 if name in persistent else UNSET)


def _remake_buffers(layer: Layer, name: str) -> None:
    """Non-persistent buffers are in no file and not every library version sets them when it
    initialises."""
    persistent = set(layer.state_dict())
    for local, buffer in layer.named_buffers():
        if local in persistent:
            continue
        kind = local.rpartition(".")[2]
        if kind == "position_ids":
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))  # [1, positions]
        elif kind == "token_type_ids":
            buffer.zero_()  # [1, positions]
        elif (buffer.isnan() if buffer.is_floating_point() else buffer == UNSET).any():
            raise RuntimeError(
                f"layer {name}: no rule says how to fill the buffer {local!r}; add one in "
                "models/towers/layers.py"
            )


def _refuse_unset(layer: Layer, name: str, given: Collection[str]) -> None:
    for local, tensor in layer.state_dict().items():
        if local not in given and tensor.is_floating_point() and tensor.isnan().any():
            raise RuntimeError(
                f"layer {name}: the initialisation left {local!r} unset; give it a rule"
            )
