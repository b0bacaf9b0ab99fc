"""The first screen of a run: what is trained, on what, how it is divided and why, how long it will
take, and where it is written."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from common.cpus import usable_cpus
from common.output import plain
from common.sizes import sized
from data.annotations import Annotation
from data.bad_tables import count_bad
from data.batching.mixture import Mixture
from data.batching.stream_order import StreamOrder
from data.formats.specs import is_remote
from data.index.sources import IndexedSource, KnownSource, Source
from data.modalities.annotations import KEPT
from data.modalities.transforms import EvalTransform
from data.options import derived_of, loss_names
from data.prepared import PreparedData
from data.stored.kinds import annotations_of, files_of, several_of, text_of
from data.stored.record import StoredFile
from data.streams.several import streams_of, texts_alone
from engine.config.implied import precision_of
from engine.optimizer.preview import preview, unreached
from engine.planning.planner import RunPlan
from engine.topology import Stage
from launch.config.groups import flag_of
from launch.config.imported import branches_held, describe_own_left_out
from launch.config.options import Options, default_of
from launch.config.pixels import describe_pixels
from launch.setup.costing import NOMINAL
from launch.terminal.tables import REPORT, duration
from models.losses import PlainLoss, build_loss
from models.towers.layers import Tower
from models.weights.reading import published_weights

if TYPE_CHECKING:
    from launch.setup.prepare import PreparedRun
    from launch.setup.ranks import Ranks

DESCRIPTION = "tokenizer_config.json"  # of the tokenizer beside it
DUPLICATES = {
    "positives": "positives of each other",
    "masked": "left out of each other's loss",
    "negatives": "negatives of each other",
}
LABEL = 10  # columns of a label with its colon
FEW = 0.01  # repeated values, of all
REASONS_SHOWN = 5
SAMPLES_ASKED = 1000  # at least, where there are more, for what is said of their annotations
ROOM = 2.25  # times the shards that are mixed: these, the next ones, and what lies beside each
OTHER_PLANS = 3  # that are compared with the chosen one; `launch.tools.plan` lists all


def describe_ranks(num_ranks: int, num_nodes: int, device: str, host_gpus: int = 0) -> str:
    """Such as `16 ranks on 2 nodes, H100`. `host_gpus`: the GPUs of all ranks, where these
    communicate through host memory."""
    where = f" on {num_nodes} nodes" if num_nodes > 1 else ""
    said = f"{num_ranks} rank{'s' * (num_ranks > 1)}{where}, {device}"
    if not host_gpus:
        return said
    shared = f" share {host_gpus} GPU{'s' * (host_gpus > 1)} and" if num_ranks > host_gpus else ""
    return f"{said} (ranks{shared} communicate through host memory)"


def describe_device(device: torch.device) -> str:
    """Such as "NVIDIA H100 80GB HBM3" and "cpu (2 cores)"."""
    if device.type != "cpu":
        return torch.get_device_module(device).get_device_name(device)
    cores = usable_cpus()
    return f"{device.type} ({cores} core{'s' * (cores > 1)})"


def first_screen(run: PreparedRun, ranks: Ranks) -> list[tuple[str, str]]:
    """(label, text), a text may have several lines."""
    options, config, data, plan, model = run.options, run.config, run.data, run.plan, run.model
    total_steps = run.batching.total_steps
    zero = config.get("zero_optimization", {}).get("stage", 0)
    length = f"{total_steps:,} steps of {config['train_batch_size']:,} samples"
    further = [
        describe_pixels(options),
        *model.describe_cuts().splitlines(),
        model.describe_patches(),
        *model.describe_adapters().splitlines(),
        run.batching.describe_shapes(),
    ]
    screen = [
        ("data", "\n".join([_data(data), *_repeated(data, options)])),
        _annotations(data, options),
        ("stream", _streams(data, config["train_batch_size"], plan.graph.stages)),
        ("towers", _towers(options, model.towers, plan)),
        ("tokenizer", _tokenizer(options, data)),
        ("ranks", f"{ranks.described}; {precision_of(config)}, ZeRO stage {zero}"),
        ("plan", f"{plan.describe()}   {run.config_file.name}"),
        ("why", _why(plan, run.config_file)),
        ("preset", run.preset or f"{length}; {_given(run)}"),
        ("note", _seldom(run)),
        ("optimizer", preview(config, plan.optimizer_groups, total_steps)),
        ("note", unreached(config, plan.optimizer_groups, total_steps)),
        *(_split(line) for line in further if line),
        ("note", _published(options, model.towers)),
        ("note", _left_out_of_import(options)),
        ("predicted", _predicted(plan, total_steps)),
        ("folder", ranks.describe_folder(run.folder)),
    ]
    return [(label, text) for label, text in screen if text]


def _given(run: PreparedRun) -> str:
    """Why no preset has chosen a number."""
    if run.checkpoint is not None:
        return "every value is as the run began with it"
    return "every value is given, so no preset chooses any"


def _seldom(run: PreparedRun) -> str:
    """What comes less often than once an epoch, as epochs have few steps; empty: nothing does."""
    apart, steps = run.batching.epochs_apart, run.batching.order.steps_per_epoch
    given = {"checkpoint": run.options.save_every, "evaluation": run.options.eval_every}
    seldom = [what for what, every in given.items() if every is None]
    if apart == 1 or not seldom:
        return ""
    flags = " and ".join(f"--{'save' if what == 'checkpoint' else 'eval'}-every" for what in seldom)
    return (
        f"an epoch has {steps} step{'s' * (steps > 1)}: one {' and one '.join(seldom)} every {apart} "
        f"epochs ({apart * steps} steps), and at the end; {flags} N for another number of steps"
    )


def print_screen(screen: Sequence[tuple[str, str]]) -> None:
    """To stdout. In a terminal long lines are broken under their text; elsewhere each fact is one
    line, for `grep`."""
    terminal = sys.stdout.isatty()
    width = max(60, shutil.get_terminal_size().columns) - LABEL - 1 if terminal else None
    text = Text()
    for label, said in dict.fromkeys(screen):  # two branches may have the same tower
        text.append(f"{label}:".rjust(LABEL), style="bold")
        lines = [piece for line in plain(said).splitlines() for piece in _broken(line, width)]
        text.append(" " + ("\n" + " " * (LABEL + 1)).join(lines) + "\n")
    text.rstrip()
    Console(highlight=False, emoji=False, markup=False, soft_wrap=True).print(text)


def folder_to_watch(folder: Path) -> str:
    """A run's folder, and the page that shows its curves while it goes on."""
    return f"{folder}\nto watch it: open {folder / REPORT}, written at evaluations"


def _data(data: PreparedData) -> str:
    held_out = [f"{name} {len(h.subset):,}" for name, h in data.held_out.items()]
    said = f"{data.source.spec}: {len(data.train):,} samples to train on; held out: "
    said += (", ".join(held_out) or "none") + _left_out(data.source)
    others = {h.source.spec: _left_out(h.source) for h in data.held_out.values()}
    others.pop(data.source.spec, None)
    said += "".join(f"; of {spec}{left_out}" for spec, left_out in others.items() if left_out)
    sources = [data.source, *(h.source for h in data.held_out.values())]
    hints = dict.fromkeys(hint for source in sources for hint in source.hints())
    return "\n".join([said, *hints, *data.notes])


def _weights(options: Options) -> dict[str, str]:
    """By branch, of towers that start from pretrained ones: where these come from."""
    held = branches_held(options.imported, options.branches)
    return options.first_weights | dict.fromkeys(held, options.imported or "")


def _left_out_of_import(options: Options) -> str:
    """The towers of modalities of one's own in the model of --import that no run can begin from,
    because their module is not named; empty where there are none."""
    return (
        describe_own_left_out(Path(options.imported), "--import-module") if options.imported else ""
    )


def _published(options: Options, towers: Sequence[Tower]) -> str:
    """The options that start from published weights where there are some and none were asked for;
    empty where there are none. The demo's own text tower is to be small, not pretrained."""
    if options.demo is not None:
        demo = default_of("text_tower", options.demo)
        towers = [tower for tower in towers if tower.name.split(":")[0] != demo]
    asked = [tower for tower in towers if tower.branch not in _weights(options)]
    known = {tower.branch: published_weights(tower) for tower in asked}
    flags = [flag_of(branch, "weights", where) for branch, where in known.items() if where]
    words = "to start from published weights instead of random ones"
    return f"{words}: {' '.join(flags)}" if flags else ""


def _repeated(data: PreparedData, options: Options) -> list[str]:
    """A line for each modality of which values stand in several training samples, not just a
    few."""
    lines: list[str] = []
    meaning = f"{DUPLICATES[options.duplicates]} (--duplicates {options.duplicates})"
    losses = map(build_loss, loss_names(options.loss, options.pairs))
    if any(isinstance(loss, PlainLoss) for loss in losses):
        meaning = f"what '{options.loss}' makes of them: --duplicates is for other losses"
    for kind in files_of(options.branches):
        values = _known_values(data, kind)
        if (different := _num_different(values)) < (1 - FEW) * len(values[0]):
            lines.append(
                f"{len(values[0]):,} samples have {different:,} different {several_of(kind.name)}; "
                f"in a batch those with the same are {meaning}"
            )
    return lines


def _known_values(data: PreparedData, kind: StoredFile) -> list[np.ndarray]:
    """Arrays [n] that are equal where values are: their keys, and what rows say of them beside, of
    the training samples that have one, of all data sets but streams, whose values nobody has looked
    at."""
    if not data.shards:
        known: list[tuple[KnownSource, np.ndarray]] = [(data.known, data.train[:])]
    else:
        sources = data.source.sources if isinstance(data.source, Mixture) else ()
        known = [(each, each.usable()) for each in sources if isinstance(each, IndexedSource)]
    found = [[np.zeros(0, np.uint64), *(np.zeros(0) for _ in kind.beside)]]
    for source, index in known:
        own = source.keys(kind.name)[index]
        has = index[own != 0]
        beside = [source.numbers(f"{kind.name}_{key}", has) for key in kind.beside]
        found.append([own[own != 0], *beside])
    return [np.concatenate(parts) for parts in zip(*found)]


def _num_different(values: Sequence[np.ndarray]) -> int:
    """How many rows of some arrays [n] differ."""
    number, label = 1, np.zeros(len(values[0]), np.int64)
    for column in values:
        own = np.unique(column, return_inverse=True)[1].reshape(-1)
        different, label = np.unique(own + label * len(own), return_inverse=True)
        number, label = len(different), label.reshape(-1)
    return number


def _annotations(data: PreparedData, options: Options) -> tuple[str, str]:
    """What they are called, and how many are trained on and how many the views of an evaluation
    leave out; empty without."""
    kind = derived_of(options.pairs)
    if kind is None or data.shards:
        return "", ""
    (known,), train = annotations_of((kind.name,)), data.train[:]
    numbers, most = data.source.numbers(known.count, train), getattr(options, kind.most)
    said = f"{numbers.sum(dtype=int):,} in {np.count_nonzero(numbers):,} {several_of(known.of)}"
    if most < numbers.max(initial=0):
        said += f", at most {most} of one in a step, its first {most} in an evaluation of the run"
    # evenly spread: an index of ten million samples is not read for one line
    drawn = train[numbers > 0][:: max(1, np.count_nonzero(numbers) // SAMPLES_ASKED)]
    found = [
        [each for each in data.source.value(kind.name, i) if each.phrases] for i in drawn.tolist()
    ]
    places = sum(map(len, found))
    phrases = sum(len(each.phrases) for own in found for each in own)
    said += f", {phrases / max(1, places):.2g} phrases each"
    if not kind.in_view:
        return known.several, said
    unseen, mode = _unseen(data, options, drawn, found), options.preprocessing.resize_mode
    left_out = f"{unseen:,} of {places:,} that were looked at are not in the view and are left out"
    shown = f"{left_out}; squash shows all" if unseen else "the view shows all of them"
    return known.several, f"{said}; --image-resize-mode {mode}: {shown}"


def _unseen(
    data: PreparedData,
    options: Options,
    drawn: np.ndarray,
    found: Sequence[Sequence[Annotation]],
) -> int:
    """How many regions of the images `drawn` an evaluation's view leaves out."""
    transform = EvalTransform((options.image_size, options.image_size), options.preprocessing)
    sides = (data.source.numbers(side, drawn).tolist() for side in ("height", "width"))
    unseen = 0
    for regions, *image in zip(found, *sides):
        boxes = np.array([each.extent for each in regions])
        _, inside = transform.placed((image[0], image[1])).boxes(boxes)
        unseen += int((inside < KEPT).sum())
    return unseen


def _streams(data: PreparedData, batch_size: int, stages: Sequence[Stage]) -> str:
    """How the samples of shards are mixed, which are read twice, and how many shards this machine
    keeps."""
    order = data.order(batch_size)
    if not isinstance(order, StreamOrder):
        return ""
    lines, mixing = [], order.mixing(order.steps_per_epoch // 2)
    for number, stream in streams_of(data.source).items():
        cache, table, mixed = stream.cache, stream.table, data.shards[number].mixed
        size = table.sizes.sum() / max(1, np.count_nonzero(table.sizes))
        room = f", {cache.limit_bytes / size:,.0f} shards" if size else ""
        lines.append(
            f"{len(table.names):,} shards, {min(mixed, len(table.names))} of them mixed; at most "
            f"{sized(cache.limit_bytes)}{room} in {cache.folder}"
        )
        own = mixing[number]
        lines.append(
            f"a global batch has samples of {own.shards_per_batch:,} of them; the order of training "
            f"and that of storage have a rank correlation of {own.rank_correlation:.2f} (0: fully "
            "mixed, 1: as stored)"
        )
        needed = ROOM * min(mixed, len(table.names)) * size
        if cache.limit_bytes < needed and any(map(is_remote, table.names)):
            lines.append(
                f"too little room to fetch the next {mixed} while these are read, so where all change "
                f"at once a step waits for them: {sized(int(needed))} of --stream-cache are enough, "
                "or fewer that are mixed (?mixed=K)"
            )
        if lost := [*table.gone, *(stream.shown[n] for n in np.flatnonzero(table.lost))]:
            samples = int(table.counts[table.lost != 0].sum())
            of = f", {samples:,} samples of this run's order" if samples else ""
            lines.append(
                f"{len(lost):,} shards are left out{of}, such as {lost[0]} (--on-bad-shard drop)"
            )
    lines += _read_twice(order, stages)
    if data.held_out:
        lines.append("samples of streams are not compared with those held out")
    return "\n".join(lines)


def _read_twice(order: StreamOrder, stages: Sequence[Stage]) -> Iterator[str]:
    """What replicas that read shards of their own have in common. Those with texts pack these over
    the whole global batch, so each reads all shards."""
    for stage in stages:
        alone = stage.loads and not text_of(stage.loads)
        if alone and not order.are_read_apart(stage.replicas):
            yield (
                f"replicas of {stage.name} read different shards, and neighbours have some in common, "
                f"which two machines fetch twice; where {stage.replicas} divides ?mixed=K and the "
                "samples that a global batch has of each data set, each replica has its own"
            )


def _left_out(source: Source) -> str:
    """What lies in a data set and is not used."""
    reasons, unused = count_bad(source), source.unused()
    bad = sum(source.bad_counts().values())
    in_part = sum(reasons.values()) - bad
    said = f"; {bad:,} cannot be used" if bad else ""
    said += f"; {in_part:,} are used in part" if in_part else ""
    said += f" ({_counted(reasons, '{0} {1:,}')})" if reasons else ""
    numbers = {what: number for what, (number, _) in unused.items()}
    return said + (
        f"; also there, and not read: {_counted(numbers, '{1:,} {0}')}" if unused else ""
    )


def _counted(numbers: Mapping[str, int], each: str) -> str:
    """The largest first, each of them written like `each`."""
    by_number = sorted(numbers.items(), key=lambda item: -item[1])
    listed = [each.format(*item) for item in by_number[:REASONS_SHOWN]]
    more = len(by_number) - len(listed)
    return f"{', '.join(listed)}{f' and {more} more' if more else ''}"


def _towers(options: Options, towers: Sequence[Tower], plan: RunPlan) -> str:
    """A line for each, and one for what is learned between them."""
    weights, lines = _weights(options), []
    for tower in towers:
        origin, learn = weights.get(tower.branch), plan.trainable.get(tower.branch, ())
        frozen = sum(not learns for learns in learn)
        lines.append(
            f"{tower.branch} {tower.name}, {tower.num_parameters / 1e6:,.1f} M parameters, "
            f"weights: {f'from {origin}' if origin else 'random'}"
            + (f"; {frozen} of {len(learn)} layers locked" if frozen else "")
        )
    further = [f"beside it {options.terms}"] if options.terms else []
    if options.views_per_image > 1:
        further.append(f"{options.views_per_image} views of each image")
    objective = [f"{options.loss} between embeddings of {options.embed_dim}", *further]
    return "\n".join([*lines, "; ".join(objective)])


def _tokenizer(options: Options, data: PreparedData) -> str:
    """Where it comes from and how many entries it has; empty where no pair has texts."""
    if data.tokenizer is None:
        return ""
    entries, source = f"{len(data.tokenizer):,} entries", options.tokenizer_source()
    if source is None:
        known = data.examples() if data.shards else data.train[:]
        captions = texts_alone(data.source).numbers("num_captions", known).sum(dtype=int)
        texts = f"{captions:,} captions"
        if kind := derived_of(options.pairs):
            (stored_kind,) = annotations_of((kind.name,))
            number = data.source.numbers(stored_kind.count, known).sum(dtype=int)
            texts += f" and the phrases of {number:,} {stored_kind.several}"
        return f"trained on {texts}, {entries}"
    is_described = not Path(source).is_dir() or (Path(source) / DESCRIPTION).is_file()
    assumed = f"; without {DESCRIPTION}, so transformers' special tokens and lower case are assumed"
    return f"of {source}, {entries}{'' if is_described else assumed}"


def _why(plan: RunPlan, config_file: Path) -> str:
    """The reasons of the planner without those of plans that are far behind."""
    lines = plan.reasons.splitlines()
    if not lines:
        return f"{config_file.name} gives the layout"
    if lines[0] == f"auto: {plan.describe()}":
        compared = lines[1].rpartition("; ")[2]
        return "\n".join([f"auto: {compared}", *map(str.strip, lines[2 : 2 + OTHER_PLANS])])
    return plan.reasons


def _predicted(plan: RunPlan, total_steps: int) -> str:
    step_s, machine = plan.predicted_step_s, plan.costs.machine
    peak = sized(max(stage.peak_bytes for stage in plan.predicted))
    if machine.name == NOMINAL["cpu"]:
        # CPUs differ by more than the times of a nominal one would be worth
        return (
            f"at most {peak} a rank; no time, because the layers were not measured "
            '("layout": "auto" measures them)'
        )
    basis = f"from counted operations on {machine.name}, nothing was measured"
    basis = "from layers measured here" if machine.measured else basis
    return (
        f"{duration(step_s)} a step, {duration(step_s * total_steps)} for {total_steps:,} steps "
        f"without evaluations, at most {peak} a rank ({basis})"
    )


def _split(line: str) -> tuple[str, str]:
    """Lines that begin with a word and a colon have it as their label."""
    label, _, text = line.partition(": ")
    return (label, text) if label.isalpha() and len(label) < LABEL else ("note", line)


def _broken(line: str, width: int | None) -> list[str]:
    if width is None:
        return [line]
    return textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False) or [""]
