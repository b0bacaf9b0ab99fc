"""Writes a file of keys, whose rows a stream leaves out by `&unseen=FILE`.

python -m data.streams.unseen karpathy:dataset_coco.json?split=test --by caption --out coco.seen
python -m data.streams.unseen 'stream:s3://bucket/{000..012}.tar' --by url --out seen
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common.command_line import CommandParser
from common.output import outlive_output, run_program
from data.index.sources import open_source
from data.modules import import_modules
from data.options import IMAGE_TEXT, add_pairs_flags, compared
from data.spec_files import SPEC
from data.streams.bloom import CAPTION, key_of, write_unseen
from data.streams.filters import keys_in
from data.streams.opening import is_stream, named_shards


def unseen_keys(spec: str, by: str, pairs: str = IMAGE_TEXT) -> list[bytes]:
    """Of all samples of a data set that a run with these `--pairs` would use; of a stream from its
    metadata alone, of those rows that its `where` keeps. Errors: ValueError, OSError."""
    if is_stream(spec):
        names, options = named_shards(spec)
        if options.keys() & {"unseen", "unseen_by"}:
            raise ValueError(f"{spec}: keys are taken by --by; leave unseen and unseen_by out")
        return keys_in(names, by, options.get("where"), options.get("text"))
    if by != CAPTION:
        raise ValueError(
            f"--by {by}: only streams have columns of metadata; give stream:SHARDS, or --by {CAPTION}"
        )
    source = open_source(spec, compared(pairs), progress=True)
    return [key_of(by, text) for i in source.usable() for text in source.captions(int(i))]


def main(words: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m data.streams.unseen",
        description="Write a file of keys, whose rows a stream leaves out by &unseen=FILE.",
    )
    parser.add_argument("spec", type=SPEC, metavar="SPEC", help="a data set, as --data of train.py")
    add_pairs_flags(parser)
    parser.add_argument(
        "--by",
        default=CAPTION,
        metavar="COLUMN",
        help="what is compared: a column of a stream's metadata, or the captions, in which case and "
        "spaces make no difference (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument(
        "--rate",
        type=float,
        default=0.001,
        help="share of other rows that are left out by chance (default: %(default)s)",
    )
    options = parser.parse_args(words)
    if not 0 < options.rate < 1:
        parser.error(f"--rate {options.rate}: must be above 0 and below 1")
    import_modules(options.import_module)
    keys = unseen_keys(options.spec, options.by, options.pairs)
    write_unseen(options.out.absolute(), options.by, keys, options.rate)
    print(f"{len(keys):,} keys in {options.out}, {options.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    outlive_output()
    sys.exit(run_program("python -m data.streams.unseen", main))
