"""What a checkpoint can do, on one device, whatever topology it was trained on.

python evaluate.py RUN_DIR                              retrieval of the held-out samples of the run by its newest checkpoint
python evaluate.py RUN_DIR --checkpoint step-00000100   by another one; --ema: by the average of its weights
python evaluate.py RUN_DIR --val-data coco:IMAGES:CAPTIONS.json --captions all --picture queries.png
python evaluate.py RUN_DIR --rerank 32                  of a run with --fusion: the nearest 32 in the order of the matching scores, too
python evaluate.py RUN_DIR --classify imagefolder:TEST --classify-train imagefolder:TRAIN
python evaluate.py RUN_DIR --classify 'audiofolder:TEST?templates=the sound of {}'
python evaluate.py RUN_DIR --embeddings OUT             images, texts and sounds as memory-mapped arrays
python evaluate.py RUN_DIR --embeddings OUT --query "a red apple" --picture apples.png
python evaluate.py RUN_DIR --query bark.wav --find image   the images most like a sound
python evaluate.py --import openai/clip-vit-base-patch32 --classify "imagefolder:IMAGENET/val?templates=openai" --precision bf16
"""

import argparse
import hashlib
import logging
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from common.files import make_folder
from common.options import Once
from common.output import outlive_output, run_program
from common.secrets import redact
from data.index.roots import add_root_flag, from_anywhere, given_roots, with_roots
from data.loader import resolve_workers
from data.modules import add_trust_flags, import_named
from launch.inference.classes import benchmark_metrics, classification, classification_table
from launch.inference.embedding import (
    PRECISIONS,
    Embedder,
    chosen_device,
    forget_embeddings,
    refuse_other_content,
    write_embeddings,
)
from launch.inference.evaluation import benchmark_metrics as retrieval_metrics
from launch.inference.evaluation import by_language, examples, retrieval, write_numbers
from launch.inference.gallery import Row, draw_rows
from launch.inference.querying import find
from launch.inference.reranking import reranked_retrieval
from launch.inference.samples import held_out, left_out, opened
from launch.inference.trained import Trained, open_model_folder, public_model
from launch.run.report import retrieval_table, show

NUM_EXAMPLES, NUM_ANSWERS = 8, 20
OF_SPECS = ("val_data", "classify", "classify_train")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description="Zero-shot retrieval (R@1, R@5, R@10, median rank, both directions) of a checkpoint as a table and as JSON; or classes, "
        "embeddings, a search.",
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="folder of a run of train.py, or one that export.py wrote",
    )
    parser.add_argument(
        "--import",
        dest="imported",
        metavar="WHERE",
        help="instead of RUN_DIR: a public model, its folder or ORGANISATION/MODEL on the Hugging Face hub",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="folder below RUN_DIR/checkpoints (default: the newest)",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="the moving average of the weights (the JSON's ema block) instead of the weights",
    )
    parser.add_argument(
        "--val-data",
        action=Once,
        metavar="SPEC",
        help="samples to evaluate, see data/README.md (default: the held-out samples of the run)",
    )
    parser.add_argument(
        "--captions",
        choices=("first", "all"),
        help="of each image (default: first, as a run evaluates, and all of karpathy: data; figures published for COCO need all)",
    )
    parser.add_argument(
        "--classify",
        action=Once,
        metavar="SPEC",
        help="instead: classes of images or sounds, such as imagefolder:DIR or audiofolder:DIR; its captions are the prompts",
    )
    parser.add_argument(
        "--classify-train",
        metavar="SPEC",
        help="with it: train a linear probe and find neighbours in these",
    )
    add_root_flag(parser, "--val-data, --classify and --classify-train")
    parser.add_argument(
        "--rerank",
        type=int,
        metavar="K",
        help="also put the K nearest candidates of each query in the order of the fusion's scores",
    )
    parser.add_argument(
        "--embeddings",
        type=Path,
        metavar="OUT",
        help="write the embeddings to this folder; with --query: search in it",
    )
    parser.add_argument(
        "--query",
        metavar="TEXT_OR_FILE",
        help="instead: what is most like a text, or like the file of an image or a sound",
    )
    parser.add_argument(
        "--find",
        metavar="MODALITY",
        help="with it: what to find, such as image, text or audio (default: what the run compared first with the query's own modality)",
    )
    parser.add_argument(
        "--number",
        type=int,
        metavar="N",
        help=f"answers that --query shows (default: {NUM_ANSWERS})",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw queries with their answers: .png, .svg or .pdf; a file for each of several held-out sets (default: none)",
    )
    parser.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        default="fp32",
        help="of the towers: bf16 and fp16 by autocast; figures of fp32 differ in the last digits (default: fp32)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="cpu|cuda|cuda:N|auto",
        help="where the towers run (default: auto, the first GPU if there is one)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=128, metavar="N", help="samples at a time (default: 128)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that load images (default: what the machine has to spare)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where the numbers go (default: in RUN_DIR, with --import in the current folder, named after what was evaluated on what: evaluation-<checkpoint>.json, ...)",
    )
    add_trust_flags(parser)
    return parser


def parse() -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args()
    refuse(parser, arguments)
    if (arguments.val_data or "").startswith("karpathy:") and arguments.query is None:
        arguments.captions = arguments.captions or "all"  # as its figures are published
    given = {name: getattr(arguments, name) for name in OF_SPECS if getattr(arguments, name)}
    roots = given_roots(parser, arguments.data_root, list(given.values()))
    for name, spec in given.items():
        setattr(arguments, name, with_roots(from_anywhere(spec), roots))
    return arguments


def refuse(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """What does not go together, before anything is loaded."""
    refuse_other_models(parser, given)
    if given.classify_train and not given.classify:
        parser.error("--classify-train trains on what --classify is tested with; give that too")
    of_pairs = {
        "--query": given.query is not None,
        "--embeddings": given.embeddings,
        "--picture": given.picture,
        "--rerank": given.rerank,
    }
    of_pairs |= {"--val-data": given.val_data, "--captions": given.captions}
    ignored = [flag for flag, is_given in of_pairs.items() if is_given]
    if given.classify and ignored:
        parser.error(f"--classify tells classes; {ignored[0]} is of pairs, run it again for that")
    not_searched = {"--rerank": given.rerank, "--captions": given.captions, "--json": given.json}
    ignored = [flag for flag, is_given in not_searched.items() if is_given]
    if given.query is not None and ignored:
        parser.error(f"--query searches; {ignored[0]} is of retrieval, run it again for that")
    if given.query is not None and not given.query.strip():
        parser.error("--query is empty; give a text or a file")
    for flag, value in (("--number", given.number), ("--find", given.find)):
        if value is not None and given.query is None:
            parser.error(f"{flag} is of --query; give a text or a file to search for")
    for flag, least in (("batch_size", 1), ("number", 1), ("rerank", 1), ("workers", 0)):
        if getattr(given, flag) is not None and getattr(given, flag) < least:
            parser.error(
                f"--{flag.replace('_', '-')} {getattr(given, flag)}: at least {least} is needed"
            )
    if given.picture and given.picture.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--picture {given.picture}: a name that ends in .png, .svg or .pdf is needed")
    if given.json and given.json.is_dir():
        parser.error(f"--json {given.json}: is a folder; give the name of a file")
    for flag, path in (
        ("--json", given.json),
        ("--picture", given.picture),
        ("--embeddings", None if given.query else given.embeddings),
    ):
        there = path and next(folder for folder in path.absolute().parents if folder.exists())
        if there and not (there.is_dir() and os.access(there, os.W_OK)):
            parser.error(f"{flag} {path}: nothing can be written in {there}; give another place")


def refuse_other_models(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """One model is given, in one way, and a device for it."""
    if (given.run_dir is None) == (given.imported is None):
        parser.error(
            "give one model: RUN_DIR, the folder of a run or an export, or --import WHERE, a public "
            "model"
        )
    of_runs = {"--checkpoint": given.checkpoint, "--ema": given.ema}
    ignored = [flag for flag, is_given in of_runs.items() if is_given]
    if given.imported and ignored:
        parser.error(f"--import has one set of weights; {ignored[0]} is of a run's folder")
    searched = given.query is not None and given.embeddings
    if given.imported and not (given.val_data or given.classify or searched):
        parser.error(
            "--import: a public model has no samples of its own; give some with --val-data SPEC or "
            "--classify SPEC"
        )
    try:
        given.device = chosen_device(given.device)
    except ValueError as error:
        parser.error(f"argument --device: {error}")


def main(arguments: argparse.Namespace) -> None:
    import_named(arguments)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if arguments.embeddings and arguments.query is None:
        refuse_other_content(arguments.embeddings)
    device, results = arguments.device, arguments.run_dir
    if arguments.imported:
        arguments.run_dir, results = public_model(arguments.imported), Path()
    trained = open_model_folder(arguments.run_dir, arguments.checkpoint, device, arguments.ema)
    name = name_of(arguments, trained)
    workers = "auto" if arguments.workers is None else arguments.workers
    workers = resolve_workers(workers, 1, len(os.sched_getaffinity(0)), device.type != "cpu")
    embedder = Embedder(trained, device, arguments.batch_size, workers, arguments.precision)
    if arguments.query is not None:
        model = model_of(arguments, embedder, name)
        find(arguments, embedder, model, arguments.number or NUM_ANSWERS)
        return
    found = (
        of_classes(arguments, embedder, name)
        if arguments.classify
        else of_pairs(arguments, embedder, name)
    )
    output = arguments.json or results / output_name(arguments, name)
    about = {"step": trained.step, "precision": arguments.precision}
    about |= {"model": arguments.imported} if arguments.imported else {}
    write_numbers(output, {**about, **found.numbers})
    show(found.table)
    notices = {
        notice
        for figure, (title, rows) in found.figures.items()
        if (notice := draw_rows(rows, title, figure))
    }
    for line in (*sorted(notices), *found.figures):
        print(line)
    print(output)


def name_of(arguments: argparse.Namespace, trained: Trained) -> str:
    """What results and files call the model."""
    if arguments.imported and not Path(arguments.imported).expanduser().exists():
        return Path(arguments.imported).name  # its folder of the hub's cache is called by a hash
    return trained.checkpoint.resolve().name + ("-ema" if arguments.ema else "")


@dataclass(frozen=True)
class Evaluated:
    """`numbers`: what they are of and what they are; `figures`: (title, rows) by file."""

    numbers: dict[str, Any]
    table: Table
    figures: dict[Path, tuple[str, list[Row]]] = field(default_factory=dict)


def output_name(arguments: argparse.Namespace, name: str) -> str:
    """A name for each kind of question, so that no answer is written over another."""
    parts = ["classes" if arguments.classify else "evaluation", name]
    for spec in filter(None, (arguments.classify, arguments.val_data)):
        parts.append(re.sub(r"\W+", "-", redact(spec)).strip("-"))
        if redact(spec) != spec:  # addresses may differ in what is hidden alone
            parts.append(hashlib.sha256(spec.encode()).hexdigest()[:9])
    parts += ["all-captions"] if arguments.captions == "all" else []
    parts += [arguments.precision] if arguments.precision != "fp32" else []
    whole = "-".join(parts)
    # names of files end at 255 bytes; what is cut off must still tell one question from another
    return (
        whole
        if len(whole) <= 200
        else f"{whole[:190]}-{hashlib.sha256(whole.encode()).hexdigest()[:9]}"
    ) + ".json"


def of_classes(arguments: argparse.Namespace, embedder: Embedder, name: str) -> Evaluated:
    test = opened(arguments.classify, embedder.trained)
    learned = arguments.classify_train
    train = opened(learned, embedder.trained) if learned else None
    results = classification(embedder, test, train)
    about = {
        "data": arguments.classify,
        "train_data": arguments.classify_train,
        "left_out": left_out(test),
        "task": "zeroshot_classification",
        "metrics": benchmark_metrics(results),
    }
    return Evaluated(
        {**about, **results},
        classification_table(results, f"Classes of {arguments.classify}, {name}"),
    )


def of_pairs(arguments: argparse.Namespace, embedder: Embedder, name: str) -> Evaluated:
    """Retrieval among each set of samples, and with the same embeddings what else was asked for."""
    if arguments.rerank and embedder.fusion is None:
        raise ValueError(
            f"--rerank: {arguments.run_dir} scores no pairs; it needs a run of train.py with "
            "--fusion, or an export of one"
        )
    parts = held_out(arguments, embedder.trained)
    sizes, metrics, figures = {}, {}, {}
    results: dict[str, float] = {}
    after: dict[str, float] = {}
    languages: dict[str, dict[str, dict[str, float]]] = {}
    if arguments.embeddings:
        forget_embeddings(arguments.embeddings)
    for part_name, part in parts.items():
        embedded = embedder.embedded(part.source, part.subset, arguments.captions == "all")
        sizes[part_name] = len(embedded.samples)
        found = retrieval(embedded)
        metrics[part_name] = retrieval_metrics(found)
        results |= {f"{part_name}/{key}": value for key, value in found.items()}
        for language, own in by_language(embedded, part.source).items():
            found = {"num_samples": len(own.samples), **retrieval(own)}
            languages.setdefault(part_name, {})[language] = found
        if arguments.rerank:
            again = reranked_retrieval(embedder, embedded, part.source, arguments.rerank)
            after |= {f"{part_name}/{key}": value for key, value in again.items()}
        beside = part_name if len(parts) > 1 else ""
        if arguments.embeddings:
            folder = make_folder(arguments.embeddings / beside, within=arguments.embeddings)
            write_embeddings(folder, embedded, part.source, model_of(arguments, embedder, name))
            print(folder)
        if arguments.picture:
            figure = (
                arguments.picture.with_stem(f"{arguments.picture.stem}-{beside}")
                if beside
                else arguments.picture
            )
            title = f"{part_name}: queries and their first answers by embeddings, {name}"
            figures[figure] = title, examples(embedded, part.source, NUM_EXAMPLES)
    how = (
        f", by embeddings → the nearest {arguments.rerank} by matching" if arguments.rerank else ""
    )
    table = retrieval_table(
        f"Zero-shot retrieval, {name}{how}",
        [results, after] if arguments.rerank else [results],
        sizes,
        languages if not arguments.rerank else {},
    )
    about = {
        "data": arguments.val_data or "held out by the run",
        "captions": arguments.captions or "first",
        "num_samples": sizes,
        "task": "zeroshot_retrieval",
        "metrics": metrics if len(parts) > 1 else next(iter(metrics.values())),
    }
    about |= {"languages": languages} if languages else {}
    about |= {"left_out": left_out(parts["validation"])} if arguments.val_data else {}
    reranked = {"reranked": {"candidates": arguments.rerank, **after}} if arguments.rerank else {}
    return Evaluated({**about, **results, **reranked}, table, figures)


def model_of(arguments: argparse.Namespace, embedder: Embedder, name: str) -> dict[str, str]:
    """What embeddings are of."""
    return {
        "checkpoint": name,
        "run": str(arguments.run_dir),
        "checksum": embedder.trained.checksum(),
    }


if __name__ == "__main__":
    outlive_output()
    sys.exit(run_program("evaluate.py", lambda: main(parse())))
