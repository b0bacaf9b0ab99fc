"""Fill the cache of decoded images before training: python -m data.cache SPEC --image-size N."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.command_line import CommandParser
from common.cpus import usable_cpus
from common.output import outlive_output, plain, run_program
from common.sizes import GIB, sized
from data.cache import DEFAULT_LIMIT, default_folder, fill, open_cache
from data.index.roots import add_root_flag, given_roots, with_roots
from data.index.sources import open_source
from data.modalities.preprocessing import CLIP, INTERPOLATIONS
from data.modalities.transforms import TrainTransform
from data.modules import import_modules
from data.options import add_pairs_flags, compared
from data.spec_files import SPEC


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m data.cache", description="Fill the cache of decoded images before training."
    )
    parser.add_argument(
        "spec", type=SPEC, metavar="SPEC", help="the data set, as --data of train.py"
    )
    add_root_flag(parser, "SPEC")
    add_pairs_flags(parser)
    parser.add_argument(
        "--image-size",
        type=int,
        required=True,
        metavar="N",
        help="pixels, as --image-size of train.py",
    )
    parser.add_argument(
        "--image-resize",
        type=int,
        metavar="N",
        help="pixels, as --image-resize of the run (default: --image-size)",
    )
    parser.add_argument(
        "--image-interpolation",
        choices=INTERPOLATIONS,
        default=CLIP.interpolation,
        help="as in the run (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=usable_cpus(),
        metavar="N",
        help="processes; 0: none beside this (default: one per CPU that this process may use)",
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help=f"where it is (default: {default_folder()})"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=DEFAULT_LIMIT / GIB,
        metavar="GIB",
        help="most on disk (default: %(default).0f)",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(words)
    if arguments.workers < 0 or arguments.limit <= 0:
        parser.error("--workers must be >= 0 and --limit > 0")
    resize = arguments.image_resize or arguments.image_size
    preprocessing = replace(
        CLIP, interpolation=arguments.image_interpolation, crop_pct=arguments.image_size / resize
    )
    roots = given_roots(parser, arguments.data_root, [arguments.spec])
    start = time.monotonic()
    import_modules(arguments.import_module)
    pairs = compared(arguments.pairs)
    source = open_source(with_roots(arguments.spec, roots), pairs, progress=True)
    cache = open_cache(arguments.cache, int(arguments.limit * GIB))
    if cache is None:
        return 2
    done, examples = fill(
        source,
        TrainTransform((arguments.image_size, arguments.image_size), preprocessing).stored,
        cache,
        arguments.workers,
        progress=True,
    )
    stored, present, refused = (done.pop(name, 0) for name in ("stored", "present", "refused"))
    print(
        f"{cache.folder}: {stored:,} images stored, {present:,} were there, {done.total():,} "
        f"unreadable, {refused:,} not stored; {sized(cache.used_bytes())} of "
        f"{sized(cache.limit_bytes)}, {time.monotonic() - start:.1f} s"
    )
    for reason, number in done.most_common():
        print(f"  {reason}: {number:,}")
    for example in examples:
        print(f"  for example {plain(example)}")
    cache.close()
    return 0 if not refused else 1


if __name__ == "__main__":
    outlive_output()
    sys.exit(run_program("python -m data.cache", main))
