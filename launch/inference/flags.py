"""The command line of evaluate.py. Imports nothing that --help can do without."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from common.command_line import CommandParser
from common.options import Once, at_least
from data.index.roots import add_root_flag, from_anywhere, given_roots, with_roots
from data.modules import add_trust_flags
from data.spec_files import SPEC

NUM_ANSWERS = 20
OF_SPECS = ("val_data", "classify", "classify_train")
PRECISIONS = ("fp32", "bf16", "fp16")


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="evaluate.py",
        description="Zero-shot retrieval (R@1, R@5, R@10, median rank, both directions) of a "
        "checkpoint as a table and as JSON; or classes, embeddings, a search.",
    )
    add = parser.add_argument
    about = "folder of a run of train.py, or one that export.py wrote"
    add("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help=about)
    about = (
        "instead of RUN_DIR: a public model, its folder or ORGANISATION/MODEL on the Hugging Face "
    )
    add("--import", dest="imported", metavar="WHERE", help=about + "hub")
    about = "folder below RUN_DIR/checkpoints (default: the newest)"
    add("--checkpoint", metavar="NAME", help=about)
    about = "the moving average of the weights (the JSON's ema block) instead of the weights"
    add("--ema", action="store_true", help=about)
    about = "samples to evaluate, see data/README.md, or @FILE (default: those held out by the run)"
    add("--val-data", action=Once, type=SPEC, metavar="SPEC", help=about)
    about = (
        "also regions of images, by a model that learned none: by its last map (default: where it "
    )
    add("--regions", action="store_true", help=about + "learned them)")
    about = (
        "of each image, and phrases of each region (default: first, as a run evaluates, and all "
    )
    about += "of karpathy: data and refcoco: with candidates=annotated; published figures need all)"
    add("--captions", choices=("first", "all"), help=about)
    about = "instead: classes of images or sounds, such as imagefolder:DIR or audiofolder:DIR; its "
    about += "captions are the prompts"
    add("--classify", action=Once, type=SPEC, metavar="SPEC", help=about)
    about = "with it: train a linear probe and find neighbours in these"
    add("--classify-train", type=SPEC, metavar="SPEC", help=about)
    add_root_flag(parser, "--val-data, --classify and --classify-train")
    about = "instead: all sets in a folder in the layout of CLIP_benchmark (wds_*), as it measures "
    about += "them, and DataComp's averages; see launch/README.md"
    add("--benchmark", action=Once, metavar="DIR", help=about)
    about = "also put the K nearest candidates of each query in the order of the fusion's scores"
    add("--rerank", type=at_least(1), metavar="K", help=about)
    about = "write the embeddings to this folder; with --query: search in it"
    add("--embeddings", type=Path, metavar="OUT", help=about)
    about = "instead: what is most like a text, or like a file of another modality of the model"
    add("--query", metavar="TEXT_OR_FILE", help=about)
    about = "with it: what to find, such as image, text, audio, region, or window, where in each "
    about += "film (default: what the run compared first with the query's own modality)"
    add("--find", metavar="MODALITY", help=about)
    about = f"answers that --query shows (default: {NUM_ANSWERS})"
    add("--number", type=at_least(1), metavar="N", help=about)
    about = (
        "draw queries with their answers: .png, .svg or .pdf; a file for each of several held-out "
    )
    add("--picture", type=Path, metavar="FILE", help=about + "sets (default: none)")
    about = "of the towers: bf16 and fp16 by autocast; figures of fp32 differ in the last digits "
    about += "(default: fp32)"
    add("--precision", choices=PRECISIONS, default="fp32", help=about)
    about = (
        "compare the first N numbers of the embeddings alone, as a search may that keeps no more "
    )
    about += "(of a run with --prefixes; default: all)"
    add("--prefix", type=at_least(1), metavar="N", help=about)
    about = "where the towers run (default: auto, the first GPU if there is one)"
    add("--device", default="auto", metavar="cpu|cuda|cuda:N|auto", help=about)
    about = "samples at a time (default: 128)"
    add("--batch-size", type=at_least(1), default=128, metavar="N", help=about)
    about = "processes that load images (default: what the machine has to spare)"
    add("--workers", type=at_least(0), metavar="N", help=about)
    about = "where the numbers go (default: in RUN_DIR, with --import in the current folder, named "
    about += "after what was evaluated on what: evaluation-<checkpoint>.json, ...)"
    add("--json", type=Path, metavar="FILE", help=about)
    add_trust_flags(parser)
    return parser


def parse() -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args()
    try:
        return _settled(parser, arguments)
    except ValueError as error:
        parser.error(str(error))


def _settled(parser: CommandParser, arguments: argparse.Namespace) -> argparse.Namespace:
    refuse(parser, arguments)
    if _has_published_figures(arguments.val_data or "") and arguments.query is None:
        arguments.captions = arguments.captions or "all"  # as its figures are published
    # a spec then means the same folders wherever it is opened
    given = {name: getattr(arguments, name) for name in OF_SPECS if getattr(arguments, name)}
    roots = given_roots(parser, arguments.data_root, list(given.values()))
    for name, spec in given.items():
        setattr(arguments, name, with_roots(from_anywhere(spec), roots))
    return arguments


def _has_published_figures(spec: str) -> bool:
    """Of all captions, or phrases of regions."""
    of_regions = spec.startswith("refcoco:") and "candidates=annotated" in spec
    return of_regions or spec.startswith("karpathy:")


# flag that is given -> (others that do not go with it, why)
NOT_TOGETHER = {
    "classify": (
        ("query", "embeddings", "picture", "rerank", "val_data", "captions", "regions"),
        "--classify tells classes; {other} is of pairs, run it again for that",
    ),
    "benchmark": (
        ("classify", "query", "embeddings", "picture", "rerank", "val_data", "captions", "regions"),
        "--benchmark measures sets as they lie in a folder; {other} is of other samples, run it again "
        "for that",
    ),
    "query": (
        ("rerank", "captions", "json", "regions"),
        "--query searches; {other} is of retrieval, run it again for that",
    ),
    "prefix": (
        ("query", "embeddings", "rerank"),
        "--prefix measures retrieval and classes; take {other} out, and cut the rows of embeddings "
        "yourself",
    ),
    "imported": (
        ("checkpoint", "ema"),
        "--import has one set of weights; {other} is of a run's folder",
    ),
}


def refuse(parser: CommandParser, given: argparse.Namespace) -> None:
    """What does not go together, before anything is loaded."""
    if (given.run_dir is None) == (given.imported is None):
        parser.error(
            "give one model: RUN_DIR, the folder of a run or an export, or --import WHERE, a "
            "public model"
        )
    for flag, (others, why) in NOT_TOGETHER.items():
        there = [name for name in others if getattr(given, name) not in (None, False)]
        if getattr(given, flag) is not None and there:
            parser.error(why.format(other=f"--{there[0].replace('_', '-')}"))
    if given.classify_train and not given.classify:
        parser.error("--classify-train trains on what --classify is tested with; give that too")
    searched = given.query is not None and given.embeddings
    if given.imported and not (given.val_data or given.classify or given.benchmark or searched):
        parser.error(
            "--import: a public model has no samples of its own; give some with --val-data SPEC, "
            "--classify SPEC or --benchmark DIR"
        )
    if given.query is not None and not given.query.strip():
        parser.error("--query is empty; give a text or a file")
    for flag in ("number", "find"):
        if getattr(given, flag) is not None and given.query is None:
            parser.error(f"--{flag} is of --query; give a text or a file to search for")
    if given.picture and given.picture.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--picture {given.picture}: a name that ends in .png, .svg or .pdf is needed")
    if given.json and given.json.is_dir():
        parser.error(f"--json {given.json}: is a folder; give the name of a file")
    for flag in ("json", "picture", *(() if searched else ("embeddings",))):
        if path := getattr(given, flag):
            above = next(folder for folder in path.absolute().parents if folder.exists())
            if not (above.is_dir() and os.access(above, os.W_OK)):
                parser.error(
                    f"--{flag} {path}: nothing can be written in {above}; give another place"
                )
    # before a model is loaded for minutes
    from launch.inference.devices import chosen_device  # imports torch, as --help does not

    try:
        given.device = chosen_device(given.device)
    except ValueError as error:
        parser.error(f"argument --device: {error}")
