"""What a checkpoint can do, on one device, whatever topology it was trained on.

python evaluate.py RUN_DIR                              retrieval of the run's held-out samples
python evaluate.py RUN_DIR --checkpoint step-00000100   by another checkpoint than the newest
python evaluate.py RUN_DIR --ema                        by the average of its weights
python evaluate.py RUN_DIR --val-data coco:IMAGES:CAPTIONS.json --captions all --picture queries.png
python evaluate.py RUN_DIR --rerank 32                  of a run with --fusion: the nearest 32 in
                                                        the order of the matching scores, too
python evaluate.py RUN_DIR --prefix 64                  by the first 64 numbers of each embedding
python evaluate.py RUN_DIR --classify imagefolder:TEST --classify-train imagefolder:TRAIN
python evaluate.py RUN_DIR --classify 'audiofolder:TEST?templates=the sound of {}'
python evaluate.py RUN_DIR --benchmark DIR              all sets of CLIP_benchmark's layout in DIR
python evaluate.py RUN_DIR --embeddings OUT             values as memory-mapped arrays
python evaluate.py RUN_DIR --embeddings OUT --query "a red apple" --picture apples.png
python evaluate.py RUN_DIR --query bark.wav --find image   the images most like a sound
python evaluate.py RUN_DIR --query "a red apple" --find region --picture apples.png
python evaluate.py RUN_DIR --query "a dog runs" --find window   where it is seen in films
                                                        of a run with region:text: the boxes
python evaluate.py --import openai/clip-vit-base-patch32 --precision bf16 \\
    --classify "imagefolder:IMAGENET/val?templates=openai"
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.output import outlive_output, run_program
from launch.inference.flags import NUM_ANSWERS, parse

# before torch is imported, which takes seconds: --help and mistakes do not wait
if __name__ == "__main__":
    outlive_output()
    ARGUMENTS = parse()

# The processes that load data import this file, too, under another name, and need nothing of it.
if __name__ != "__mp_main__":
    import torch
    from rich.table import Table

    from common.cpus import usable_cpus
    from common.files import make_folder
    from common.secrets import redact
    from data.index.sources import KnownSource
    from data.loader import resolve_workers
    from data.modules import import_named
    from data.stored.derived import REGIONS
    from launch.inference.annotations import annotation_figures, annotation_rows, protocol
    from launch.inference.annotations import title as title_of
    from launch.inference.benchmarks import measure_sets, open_sets, tables_of
    from launch.inference.classes import (
        benchmark_metrics,
        classification,
        classification_table,
        made_of,
        modality_to_classify,
    )
    from launch.inference.clips import PROTOCOL as CLIPS_PROTOCOL
    from launch.inference.clips import clip_figures, clip_rows, in_time
    from launch.inference.embedding import Embedded, Embedder
    from launch.inference.evaluation import (
        DUAL_SOFTMAX_PROTOCOL,
        by_language,
        examples,
        retrieval,
        write_numbers,
    )
    from launch.inference.evaluation import benchmark_metrics as retrieval_metrics
    from launch.inference.folders import forget_embeddings, refuse_other_content, write_embeddings
    from launch.inference.gallery import draw_rows
    from launch.inference.querying import find
    from launch.inference.reranking import fusion_of, reranked_retrieval
    from launch.inference.samples import held_out, left_out, opened
    from launch.inference.seen import seen_of
    from launch.inference.trained import Trained, open_model_folder, public_model
    from launch.modalities import part_seen
    from launch.terminal.tables import Table as PrintedTable
    from launch.terminal.tables import retrieval_table, show
    from models.metrics.retrieval import TIES

NUM_EXAMPLES = 8


def main(arguments: argparse.Namespace) -> None:
    import_named(arguments)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if arguments.embeddings and arguments.query is None:
        refuse_other_content(arguments.embeddings)
    # before the model: what is wrong with a set is said at once
    sets, notes = open_sets(arguments.benchmark) if arguments.benchmark else ([], [])
    device, results = arguments.device, arguments.run_dir
    if arguments.imported:
        arguments.run_dir, results = public_model(arguments.imported), Path()
    trained = open_model_folder(arguments.run_dir, arguments.checkpoint, device, arguments.ema)
    name = name_of(arguments, trained)
    workers = "auto" if arguments.workers is None else arguments.workers
    cpus = usable_cpus()
    workers = resolve_workers(workers, 1, cpus, device.type != "cpu")
    torch.set_num_threads(min(torch.get_num_threads(), cpus))  # torch sees no container's limit
    if arguments.regions or arguments.find == REGIONS.name:
        trained = trained.with_regions()
    how = (arguments.precision, arguments.prefix)
    embedder = Embedder(trained, device, arguments.batch_size, workers, *how)
    # what embeddings are of
    model = {"checkpoint": name, "run": str(arguments.run_dir)}
    if arguments.query is not None or arguments.embeddings:
        model["checksum"] = trained.checksum()
    if arguments.query is not None:
        find(arguments, embedder, model, arguments.number or NUM_ANSWERS)
        return
    numbers = {"step": trained.step, "precision": arguments.precision}
    numbers |= {"model": arguments.imported} if arguments.imported else {}
    if arguments.prefix:
        numbers["prefix"] = arguments.prefix
        model["checkpoint"] = f"{name}, first {arguments.prefix} numbers"
    pictures: list[Callable[[], None]] = []
    output = arguments.json or results / output_name(arguments, name)
    if arguments.benchmark:
        numbers |= {"benchmark": arguments.benchmark, "ties": TIES, "notes": notes}
        found = measure_sets(embedder, sets, lambda own: write_numbers(output, {**numbers, **own}))
        tables = tables_of(found, model["checkpoint"], arguments.precision, notes)
    elif arguments.classify:
        found, *tables = of_classes(arguments, embedder, model["checkpoint"])
    else:
        found, tables, pictures = of_pairs(arguments, embedder, model)
    write_numbers(output, {**numbers, **found})
    for table in tables:
        show(table)
    print(output)
    for draw in pictures:  # last: what cannot be drawn costs no number
        draw()


def name_of(arguments: argparse.Namespace, trained: Trained) -> str:
    """What results and files call the model."""
    if arguments.imported and not Path(arguments.imported).expanduser().exists():
        return Path(arguments.imported).name  # its folder of the hub's cache is called by a hash
    return trained.checkpoint.resolve().name + ("-ema" if arguments.ema else "")


def output_name(arguments: argparse.Namespace, name: str) -> str:
    """A name for each kind of question, so that no answer is written over another."""
    kinds = {"benchmark": arguments.benchmark, "classes": arguments.classify}
    parts = [next((kind for kind, given in kinds.items() if given), "evaluation"), name]
    for spec in filter(None, (*kinds.values(), arguments.val_data)):
        parts.append(re.sub(r"\W+", "-", redact(spec)).strip("-"))
        if redact(spec) != spec:  # addresses may differ in what is hidden alone
            parts.append(_short_hash(spec))
    parts += ["all-captions"] if arguments.captions == "all" else []
    parts += [arguments.precision] if arguments.precision != "fp32" else []
    parts += [f"prefix-{arguments.prefix}"] if arguments.prefix else []
    whole = "-".join(parts)
    # names of files end at 255 bytes; what is cut off must still tell one question from another
    return (whole if len(whole) <= 200 else f"{whole[:190]}-{_short_hash(whole)}") + ".json"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:9]


def of_classes(
    arguments: argparse.Namespace, embedder: Embedder, name: str
) -> tuple[dict[str, Any], Table]:
    test = opened(arguments.classify, embedder.trained)
    learned = arguments.classify_train
    train = opened(learned, embedder.trained) if learned else None
    seen = seen_of(arguments, embedder.trained, test)
    results = classification(embedder, test, train)
    classes = made_of(test.source) or {}
    if classes:
        show(f"class names: {classes['class_names']}; prompts of a class: {classes['prompts']}")
    about = {
        "data": arguments.classify,
        **classes,
        "train_data": learned,
        "left_out": left_out(test),
        "ties": TIES,
        "task": "zeroshot_classification",
        "metrics": benchmark_metrics(results),
    }
    about |= seen.record() if seen else {}
    words = seen.words if seen else ""
    table = classification_table(results, f"Classes of {arguments.classify}, {name}{words}")
    if part := part_seen(modality_to_classify(embedder, test), embedder.trained.options):
        about["frames"] = table.caption = part
    return {**about, **results}, table


def of_pairs(
    arguments: argparse.Namespace, embedder: Embedder, model: Mapping[str, str]
) -> tuple[dict[str, Any], list[Table], list[Callable[[], None]]]:
    """Retrieval among each set of samples, and with the same embeddings what else was asked for;
    what draws its pictures."""
    rerank, name = arguments.rerank, model["checkpoint"]
    if rerank and fusion_of(embedder) is None:
        raise ValueError(
            f"--rerank: {arguments.run_dir} scores no pairs; it needs a run of train.py with "
            "--fusion, or an export of one"
        )
    parts = held_out(arguments, embedder.trained)
    seen = seen_of(arguments, embedder.trained, next(iter(parts.values())))
    words = seen.words if seen else ""
    pictures: list[Callable[[], None]] = []
    # by held-out set
    sizes, metrics = {}, {}
    languages: dict[str, dict[str, Any]] = {}
    results: dict[str, float] = {}
    after: dict[str, float] = {}  # reranked
    of_annotations: list[dict[str, str]] = []
    views: list[Mapping[str, float]] = []
    of_clips: list[dict[str, str]] = []
    if arguments.embeddings:
        forget_embeddings(arguments.embeddings)
    for part_name, part in parts.items():
        embedded = embedder.embedded(part.source, part.subset, arguments.captions == "all")
        sizes[part_name] = len(embedded.samples)
        found = retrieval(embedded.with_annotations())
        metrics[part_name] = retrieval_metrics(found)
        if embedded.annotated is not None and (figures := annotation_figures(embedded.annotated)):
            of_annotations += annotation_rows(embedded.annotated.kind, figures, part_name)
            views.append(figures)
            found |= figures
        of_windows = clip_figures(embedder, embedded, part.source)
        of_clips += clip_rows(of_windows, part_name)
        found |= of_windows
        results |= {f"{part_name}/{key}": value for key, value in found.items()}
        for language, own in by_language(embedded, part.source).items():
            found = {"num_samples": len(own.samples), **retrieval(own)}
            languages.setdefault(part_name, {})[language] = found
        if rerank:
            again = reranked_retrieval(embedder, embedded, part.source, rerank)
            after |= {f"{part_name}/{key}": value for key, value in again.items()}
        beside = part_name if len(parts) > 1 else ""
        if arguments.embeddings:
            folder = make_folder(arguments.embeddings / beside, within=arguments.embeddings)
            write_embeddings(folder, embedded.rows, part.source, model, embedded.annotated)
            print(folder)
        if file := arguments.picture:
            file = file.with_stem(f"{file.stem}-{beside}") if beside else file
            title = f"{part_name}: queries and their first answers by embeddings, {name}"
            pictures.append(partial(draw_examples, embedded, part.source, title, file))
    how = f", by embeddings → the nearest {rerank} by matching" if rerank else ""
    table = retrieval_table(
        f"{'Retrieval' if words else 'Zero-shot retrieval'}, {name}{how}{words}",
        [results, after] if rerank else [results],
        sizes,
        {} if rerank else languages,
    )
    numbers: dict[str, Any] = {
        "data": arguments.val_data or "held out by the run",
        "captions": arguments.captions or "first",
        "num_samples": sizes,
        "ties": TIES,
        "task": "zeroshot_retrieval",
        "metrics": metrics if len(parts) > 1 else next(iter(metrics.values())),
    }
    numbers |= {"languages": languages} if languages else {}
    derived, note = embedder.trained.derived, ""
    if derived and views:
        note = protocol(derived, views, arguments.captions == "all", embedder.pooled is not None)
        numbers[f"protocol_of_{derived.name}s"] = note
    if branch := in_time(embedder.branches):
        part_of_film = part_seen(branch, embedder.trained.options)
        numbers["protocol_of_clips"] = f"{part_of_film}; {CLIPS_PROTOCOL}; {DUAL_SOFTMAX_PROTOCOL}"
    numbers |= {"left_out": left_out(parts["validation"])} if arguments.val_data else {}
    numbers |= seen.record() if seen else {}
    numbers |= results
    numbers |= {"reranked": {"candidates": rerank, **after}} if rerank else {}
    tables = [table]
    if derived and views:
        title = f"{title_of(derived)}, {name}"
        tables.append(PrintedTable.of(title, of_annotations, note).for_terminal())
    if of_clips:
        title = f"Clips in time, {name}"
        said = numbers["protocol_of_clips"]
        tables.append(PrintedTable.of(title, of_clips, said).for_terminal())
    for each in tables if words else ():
        for first in each.columns[:1]:
            first.header = "samples"  # not called held out
    return numbers, tables, pictures


def draw_examples(embedded: Embedded, source: KnownSource, title: str, file: Path) -> None:
    draw_rows(examples(embedded, source, NUM_EXAMPLES), title, file)


if __name__ == "__main__":
    sys.exit(run_program("evaluate.py", lambda: main(ARGUMENTS)))
