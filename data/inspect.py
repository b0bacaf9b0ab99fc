"""A look into a data set: counts, sizes, lengths, bad samples, and a sheet of images and
spectrograms with their captions.

    python -m data.inspect demo
    python -m data.inspect 'webdataset:/data/cc3m/{00000..00331}.tar' --sheet cc3m.png --count 48
    python -m data.inspect 'stream:s3://bucket/{00000..01242}.tar' --speed --gpus 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageOps
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.command_line import CommandParser
from common.cpus import usable_cpus
from common.files import make_folder, replacing
from common.options import at_least, positive
from common.output import outlive_output, plain, run_program
from data.bad_samples import REASONS, Absent, BadSample
from data.bad_tables import bad_values, count_bad
from data.decoding.films import strip_of
from data.decoding.images import decode_bytes, upright_8bit
from data.decoding.sounds import decode_audio
from data.index.roots import add_root_flag, given_roots, with_roots
from data.index.sources import IndexedSource, KnownSource, open_source
from data.modalities.fonts import columns_of, fonts_for, wrapped
from data.modules import import_modules
from data.options import add_pairs_flags, compared
from data.spec_files import SPEC
from data.speed import NEEDED, measured
from data.stored.kinds import STORED, annotations_of, files_of, is_own, several_of
from data.streams.opening import is_stream, open_stream
from data.streams.source import StreamSource

TILE = 160  # pixels a side
DOTS_PER_INCH, CELL_INCHES = 100, (1.8, 2.3)
CAPTION_LINES, LETTERS, LETTER_POINTS = 3, 26, 7.5
BAR = 30  # characters
COLOURS = "magma"  # of spectrograms, as evaluate.py draws them
BOX_COLOURS = "tab10"
STRIP = 3  # frames of a clip
COLUMNS = (
    ("width", "width, pixels"),
    ("height", "height, pixels"),
    ("num_captions", "captions per sample"),
    ("num_characters", "characters of the longest caption"),
    ("complexity", "complexity, encoded bytes per pixel"),
    ("audio_seconds", "seconds of the sound"),
    ("audio_rate", "rate of the sound, Hz"),
    ("audio_channels", "channels of the sound"),
    ("video_seconds", "seconds of the film"),
    ("video_rate", "frames a second"),
    ("video_width", "width of the film, pixels"),
    ("video_height", "height of the film, pixels"),
)


def histogram(values: np.ndarray, bins: int = 8) -> list[tuple[float, float, int]]:
    """(from, up to, count) of `bins` equal classes between the 1st and the 99th percentile; what
    lies outside is in the outer ones."""
    if not len(values):
        return []
    if values.dtype == bool:
        values = values.astype(np.int8)
    low, high = np.percentile(values, (1, 99))
    if low == high:
        return [(float(values.min()), float(values.max()), len(values))]
    if np.issubdtype(values.dtype, np.integer):
        bins = min(bins, int(high - low) + 1)
    counts, edges = np.histogram(values.clip(low, high), bins, (low, high))
    edges[0], edges[-1] = values.min(), values.max()
    return [(float(a), float(b), int(n)) for a, b, n in zip(edges, edges[1:], counts)]


def report(source: IndexedSource, most_bad: int = 10) -> list[Table]:
    """Tables to print."""
    usable, bad = source.usable(), count_bad(source)
    counts = Table(title=plain(source.spec), title_justify="left", show_header=False)
    counts.add_row("samples", f"{len(source):,}")
    counts.add_row("usable", f"{len(usable):,}")
    for kind in files_of(source.index.modalities):
        there = usable[~source.lacking(kind.name)[usable]]
        different = len(np.unique(source.keys(kind.name)[there]))
        counts.add_row(f"different {several_of(kind.name)}", f"{different:,}")
    for known in annotations_of(source.index.modalities):
        each, of = source.column(known.count)[usable], several_of(known.of)
        found = f"{each.sum(dtype=int):,} in {np.count_nonzero(each):,} {of}"
        counts.add_row(known.several, found)
    for modality in source.index.modalities:
        if lacking := int(source.lacking(modality)[usable].sum()):
            counts.add_row(f"usable, without {modality}", f"{lacking:,}")
    for reason, number in sorted(bad.items(), key=lambda item: -item[1]):
        counts.add_row(Text(reason, "red"), f"{number:,}   {REASONS[reason]}")
    for what, (number, where) in source.unused().items():
        counts.add_row(plain(f"unused: {what}"), plain(f"{number:,}   for example {where}"))
    for hint in source.hints():
        counts.add_row("to be checked", plain(hint))
    tables = [counts]
    shapes = Table(title="What they are like", title_justify="left")
    for name in ("", "from", "up to", "samples", ""):
        shapes.add_column(name, justify="right" if name else "left", no_wrap=True)
    for column, words in (*COLUMNS, *_own_columns(source.index.modalities)):
        values = source.column(column)[usable]
        there = np.isfinite(values) & (values != 0)  # 0: there is no image, sound or caption
        classes = histogram(values[there])
        most = max((count for _, _, count in classes), default=0)
        for n, (low, high, count) in enumerate(classes):
            shapes.add_row(
                words if n == 0 else "",
                _number(low),
                _number(high),
                f"{count:,}",
                "█" * round(BAR * count / most),
                end_section=n + 1 == len(classes),
            )
    tables.append(shapes)
    if bad:
        listed = Table(
            title=f"Bad samples, the first {min(most_bad, sum(bad.values()))}", title_justify="left"
        )
        for name in ("where", "reason", "what was found"):
            listed.add_column(name, overflow="fold")
        for (_, where, reason, detail), _ in zip(bad_values(source), range(most_bad)):
            listed.add_row(plain(where), reason, plain(detail))
        tables.append(listed)
    return tables


def _own_columns(modalities: Sequence[str]) -> list[tuple[str, str]]:
    """What is measured of modalities of one's own, without the keys of equal values: as `COLUMNS`."""
    return [
        (column, column.replace("_", " "))
        for kind in files_of(modalities)
        if is_own(kind)
        for column in kind.measured
        if column != f"{kind.name}_key"
    ]


def contact_sheet(
    source: KnownSource, count: int = 24, seed: int = 0, columns: int = 6
) -> tuple[Figure, str | None]:
    """`count` usable samples drawn at random, each with its first caption below, cut after three
    lines; and what to say of characters that no font has."""
    usable = source.usable()
    drawn = np.random.default_rng(seed).choice(usable, min(count, len(usable)), replace=False)
    captions = {i: (source.captions(i) or [""])[0] for i in sorted(drawn.tolist())}
    fonts = fonts_for(captions.values())
    rows = -(-len(captions) // columns)
    sheet = Figure((columns * CELL_INCHES[0], rows * CELL_INCHES[1]), DOTS_PER_INCH)
    sheet.subplots_adjust(left=0.02, right=0.98, bottom=0, top=1 - 0.02 / rows, hspace=0)
    cells = sheet.subplots(rows, columns, squeeze=False).ravel()
    for cell in cells:
        cell.set(xticks=[], yticks=[], box_aspect=1, adjustable="datalim", visible=False)
    with rc_context({"font.family": fonts.families, "font.size": LETTER_POINTS}):
        for cell, (i, caption) in zip(cells, captions.items()):
            cell.set(visible=True)
            try:
                cell.imshow(np.asarray(_tile(source, i)), aspect="equal")
            except Absent:
                cell.text(0.03, 0.9, "no image, no sound", color="grey")
            except BadSample as problem:  # of what only a full decoding shows
                cell.text(0.03, 0.9, problem.reason, color="red")
            lines = wrapped(
                fonts.drawable(caption), CAPTION_LINES, lambda line: columns_of(line) <= LETTERS
            )
            below = cell.transAxes
            cell.text(0, -0.02, "\n".join(lines), va="top", parse_math=False, transform=below)
    return sheet, fonts.notice()


def _tile(source: KnownSource, i: int) -> Image.Image:
    """RGBA, at most `TILE` a side: the image, frames of the film and the spectrogram of the sound,
    as far as it has them, one above the other. Raises Absent where it has none, BadSample."""
    there = [m for m in _PICTURES if not source.lacking(m)[i]] or ["image"]
    sides = (TILE, TILE // len(there))
    shown = [_PICTURES[modality](source.value(modality, i), sides) for modality in there]
    for kind in annotations_of(STORED):
        if kind.of in there and not source.lacking(kind.name)[i]:
            boxes = [kind.box(source, i, each) for each in source.value(kind.name, i)]
            _draw_boxes(shown[there.index(kind.of)], boxes)
    tile = Image.new("RGBA", (TILE, sum(image.height for image in shown)))
    top = 0
    for image in shown:
        tile.paste(image, ((TILE - image.width) // 2, top))
        top += image.height
    return tile


def _draw_boxes(image: Image.Image, boxes: Sequence[Sequence[float]]) -> None:
    """x1, y1, x2, y2 of each in fractions of the sides, in a colour of its own, as far as these go."""
    draw, colours = ImageDraw.Draw(image), colormaps[BOX_COLOURS]
    for number, (x1, y1, x2, y2) in enumerate(boxes):
        corners = [x1 * image.width, y1 * image.height, x2 * image.width, y2 * image.height]
        draw.rectangle(corners, outline=colours(number % colours.N, bytes=True), width=2)


def _spectrogram(sound: bytes) -> Image.Image:
    """RGBA: time from left to right, low tones at the bottom. Raises BadSample."""
    from data.modalities.audio.picture import spectrogram_of  # reads torch

    decibels = spectrogram_of(decode_audio(sound)).decibels[::-1]
    low, high = float(decibels.min()), float(decibels.max())
    levels = (decibels - low) / max(high - low, 1e-6)
    return Image.fromarray(colormaps[COLOURS](levels, bytes=True))


_PICTURES: dict[str, Callable[[Any, tuple[int, int]], Image.Image]] = {
    "image": lambda data, sides: ImageOps.contain(
        upright_8bit(decode_bytes(data, at_least=sides)).convert("RGBA"), sides
    ),
    "audio": lambda data, sides: _spectrogram(data).resize(sides),
    "video": lambda clip, sides: ImageOps.contain(
        Image.fromarray(strip_of(clip, STRIP)).convert("RGBA"), sides
    ),
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.2f}"


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m data.inspect",
        description="What is in a data set: counts, histograms, bad samples, a sheet of images and "
        "spectrograms.",
    )
    parser.add_argument("spec", type=SPEC, metavar="SPEC", help="as --data of train.py")
    add_root_flag(parser, "SPEC")
    add_pairs_flags(parser)
    parser.add_argument(
        "--sheet",
        type=Path,
        default=Path("inspect.png"),
        metavar="FILE",
        help="where the sheet goes (default: inspect.png)",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=24,
        metavar="N",
        help="samples on the sheet; 0: none (default: 24)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which ones (default: 0)")
    parser.add_argument(
        "--bad", type=int, default=10, metavar="N", help="bad samples to list (default: 10)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that read images and sounds (default: one per core)",
    )
    parser.add_argument(
        "--speed",
        action="store_true",
        help="measure instead how fast samples are fetched, read and decoded, and what limits it; "
        "also of a stream:",
    )
    parser.add_argument(
        "--needs",
        type=positive,
        default=NEEDED,
        metavar="X",
        help="samples/s of one GPU (default: %(default)s, a ViT-B-32 on an H200)",
    )
    parser.add_argument("--gpus", type=at_least(1), default=1, metavar="N", help="(default: 1)")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=15.0,
        metavar="S",
        help="for which --speed measures (default: 15)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    return run_program("python -m data.inspect", lambda: _inspect(arguments))


def _inspect(arguments: Sequence[str] | None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    roots = given_roots(parser, options.data_root, [options.spec])
    import_modules(options.import_module)
    spec, pairs = with_roots(options.spec, roots), compared(options.pairs)
    # a name with brackets is no markup
    width = max(100, Console().width)
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    if options.speed and is_stream(spec):
        stream, _ = open_stream(spec, pairs, progress=True)
        _show_speed(console, stream, options)
        return
    source = open_source(spec, pairs, workers=options.workers, progress=True)
    if options.speed:
        _show_speed(console, source, options)
        return
    for table in report(source, options.bad):
        console.print(table)
    if options.count > 0:
        sheet, notice = contact_sheet(source, options.count, options.seed)
        make_folder(options.sheet.parent)
        kind = options.sheet.suffix.lower()[1:]
        if kind not in sheet.canvas.get_supported_filetypes():
            raise ValueError(f"--sheet {options.sheet}: end its name in that of a picture, as .png")
        with replacing(options.sheet) as beside:
            sheet.savefig(beside, format=kind)
        if notice:
            print(notice)
        print(options.sheet)


def _show_speed(
    console: Console, source: IndexedSource | StreamSource, options: argparse.Namespace
) -> None:
    speed = measured(source, options.seconds, options.seed)
    console.print(speed.table(source.spec))
    cores = usable_cpus()
    console.print(speed.verdict(options.needs, options.gpus, cores), soft_wrap=True)


if __name__ == "__main__":
    outlive_output()
    sys.exit(main())
