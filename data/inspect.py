"""What is in a data set: counts, sizes, lengths, bad samples, and a sheet of images and
spectrograms with their captions.

    python -m data.inspect demo
    python -m data.inspect 'webdataset:/data/cc3m/{00000..00331}.tar' --sheet cc3m.png --count 48
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont, ImageOps
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.files import make_folder, replacing
from common.output import outlive_output, plain, run_program
from data.index.bad_samples import REASONS, Absent, BadSample
from data.index.roots import add_root_flag, given_roots, with_roots
from data.index.sources import IndexedSource, Source, open_source
from data.modalities.audio.decoding import decode_audio
from data.modalities.decoding import decode_bytes, upright_8bit
from data.modalities.fonts import Font, Fonts, fonts_for, wrapped
from data.modules import import_modules
from data.options import add_pairs_flags, compared
from data.prepare import bad_values, count_bad

TILE, CAPTION_LINES, LINE, GAP, LETTER_SIZE = (
    160,
    3,
    15,
    10,
    11,
)  # pixels, but for the number of lines
BAR = 30  # characters
COLOURS = "magma"  # of spectrograms, as evaluate.py draws them
SEVERAL = {"image": "images", "audio": "sounds"}
COLUMNS = (
    ("width", "width, pixels"),
    ("height", "height, pixels"),
    ("num_captions", "captions per sample"),
    ("num_characters", "characters of the longest caption"),
    ("complexity", "complexity, encoded bytes per pixel"),
    ("audio_seconds", "seconds of the sound"),
    ("audio_rate", "rate of the sound, Hz"),
    ("audio_channels", "channels of the sound"),
)


def histogram(values: np.ndarray, bins: int = 8) -> list[tuple[float, float, int]]:
    """(from, up to, count) of `bins` equal classes between the 1st and the 99th percentile; what
    lies outside is in the outer ones."""
    if not len(values):
        return []
    low, high = np.percentile(values, (1, 99))
    if low == high:
        return [(float(values.min()), float(values.max()), len(values))]
    if np.issubdtype(values.dtype, np.integer):
        bins = min(bins, int(high - low) + 1)
    edges = np.linspace(low, high, bins + 1)
    counts = np.bincount(
        np.clip(np.searchsorted(edges, values, side="right") - 1, 0, bins - 1), minlength=bins
    )
    edges[0], edges[-1] = values.min(), values.max()
    return [(float(a), float(b), int(n)) for a, b, n in zip(edges, edges[1:], counts)]


def report(source: IndexedSource, most_bad: int = 10) -> list[Table]:
    """Tables to print."""
    usable, bad = source.usable(), count_bad(source)
    counts = Table(title=plain(source.spec), title_justify="left", show_header=False)
    counts.add_row("samples", f"{len(source):,}")
    counts.add_row("usable", f"{len(usable):,}")
    for modality, kind in (("image", "content"), ("audio", "audio")):
        if modality in source.index.modalities:
            there = usable[~source.lacking(modality)[usable]]
            different = len(np.unique(source.keys(kind)[there]))
            counts.add_row(f"different {SEVERAL[modality]}", f"{different:,}")
    for modality in source.index.modalities:
        if lacking := int(source.lacking(modality)[usable].sum()):
            counts.add_row(f"usable, without {modality}", f"{lacking:,}")
    for reason, number in sorted(bad.items(), key=lambda item: -item[1]):
        counts.add_row(Text(reason, "red"), f"{number:,}   {REASONS[reason]}")
    for what, (number, where) in source.unused().items():
        counts.add_row(plain(f"unused: {what}"), plain(f"{number:,}   for example {where}"))
    tables = [counts]
    shapes = Table(title="What they are like", title_justify="left")
    for name in ("", "from", "up to", "samples", ""):
        shapes.add_column(name, justify="right" if name else "left", no_wrap=True)
    for column, words in COLUMNS:
        values = source.column(column)[usable]
        classes = histogram(values[values > 0])  # 0: there is no image, sound or caption
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


def contact_sheet(
    source: Source, count: int = 24, seed: int = 0, columns: int = 6
) -> tuple[Image.Image, str | None]:
    """`count` usable samples drawn at random, each with its first caption below, cut after three
    lines; and what to say of characters that no font has."""
    usable = source.usable()
    drawn = np.sort(
        np.random.default_rng(seed).choice(usable, min(count, len(usable)), replace=False)
    )
    rows = -(-len(drawn) // columns)
    height = TILE + CAPTION_LINES * LINE + GAP
    sheet = Image.new("RGB", (columns * (TILE + GAP) + GAP, rows * (height + GAP) + GAP), "white")
    captions = [(source.captions(i) or [""])[0] for i in drawn.tolist()]
    draw, fonts = ImageDraw.Draw(sheet), fonts_for(captions)
    for place, (i, caption) in enumerate(zip(drawn.tolist(), captions)):
        left, top = GAP + place % columns * (TILE + GAP), GAP + place // columns * (height + GAP)
        draw.rectangle((left - 1, top - 1, left + TILE, top + TILE), outline="lightgrey")
        try:
            image = _tile(source, i)
            sheet.paste(
                image,
                (left + (TILE - image.width) // 2, top + (TILE - image.height) // 2),
                image,
            )
        except Absent:
            _draw_line(draw, (left + 4, top + 4), "no image, no sound", fonts, "grey")
        except BadSample as problem:  # of what only a full decoding shows
            _draw_line(draw, (left + 4, top + 4), problem.reason, fonts, "red")
        for number, line in enumerate(
            wrapped(caption, CAPTION_LINES, lambda text: _width(draw, text, fonts) <= TILE)
        ):
            _draw_line(draw, (left, top + TILE + 2 + number * LINE), line, fonts)
    return sheet, fonts.notice()


def _tile(source: Source, i: int) -> Image.Image:
    """RGBA, at most `TILE` a side: the image, the spectrogram of the sound, or one above the
    other. Raises Absent where the sample has neither, BadSample."""
    has_sound = source.column("audio_seconds")[i] > 0
    sides = (TILE, TILE // 2 if has_sound else TILE)
    try:
        found = upright_8bit(decode_bytes(source.image_bytes(i), at_least=sides)).convert("RGBA")
        shown = [ImageOps.contain(found, sides)]
    except Absent:
        if not has_sound:
            raise
        shown, sides = [], (TILE, TILE)
    if not has_sound:
        return shown[0]
    shown.append(_spectrogram(source.value("audio", i)).resize(sides))
    tile = Image.new("RGBA", (TILE, sum(image.height for image in shown)))
    top = 0
    for image in shown:
        tile.paste(image, ((TILE - image.width) // 2, top))
        top += image.height
    return tile


def _spectrogram(sound: bytes) -> Image.Image:
    """RGBA: time from left to right, low tones at the bottom. Raises BadSample."""
    from data.modalities.audio.picture import spectrogram_of  # reads torch

    decibels = spectrogram_of(decode_audio(sound)).decibels[::-1]
    low, high = float(decibels.min()), float(decibels.max())
    levels = (decibels - low) / max(high - low, 1e-6)
    return Image.fromarray(colormaps[COLOURS](levels, bytes=True))


def _draw_line(
    draw: ImageDraw.ImageDraw,
    place: tuple[float, float],
    line: str,
    fonts: Fonts,
    fill: str = "black",
) -> None:
    """On one base line, whatever the fonts. `place`: left, top."""
    left, top = place
    baseline = top + _at_size(fonts.fonts[0]).getmetrics()[0]
    for text, font in fonts.runs(line):
        draw.text((left, baseline), text, fill=fill, font=_at_size(font), anchor="ls")
        left += draw.textlength(text, font=_at_size(font))


def _width(draw: ImageDraw.ImageDraw, line: str, fonts: Fonts) -> float:
    return sum(draw.textlength(text, font=_at_size(font)) for text, font in fonts.runs(line))


@lru_cache(maxsize=64)
def _at_size(font: Font) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font.path, LETTER_SIZE, index=font.index)


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.2f}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.inspect",
        description="What is in a data set: counts, histograms, bad samples, a sheet of images and "
        "spectrograms.",
    )
    parser.add_argument("spec", metavar="SPEC", help="as --data of train.py")
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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    return run_program("python -m data.inspect", lambda: _inspect(arguments))


def _inspect(arguments: Sequence[str] | None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    roots = given_roots(parser, options.data_root, [options.spec])
    import_modules(options.import_module)
    source = open_source(
        with_roots(options.spec, roots),
        compared(options.pairs),
        workers=options.workers,
        progress=True,
    )
    # a name with brackets is no markup
    width = max(100, Console().width)
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for table in report(source, options.bad):
        console.print(table)
    if options.count > 0:
        sheet, notice = contact_sheet(source, options.count, options.seed)
        make_folder(options.sheet.parent)
        kind = Image.registered_extensions().get(options.sheet.suffix.lower())
        if kind is None:
            raise ValueError(f"--sheet {options.sheet}: end its name in that of a picture, as .png")
        with replacing(options.sheet) as beside:
            sheet.save(beside, kind)
        if notice:
            print(notice)
        print(options.sheet)


if __name__ == "__main__":
    outlive_output()
    sys.exit(main())
