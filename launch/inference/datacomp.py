"""DataComp's evaluation: 38 sets, the figure of each that counts, and its averages.

Source: tasklist.yml, eval_utils/ and aggregate_scores.py of github.com/mlfoundations/datacomp (Gadre
et al. 2023). FairFace and UTKFace have no figure of their own there, and are in no average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

ACC1, PER_CLASS, RECALL = "acc1", "mean_per_class_recall", "mean_recall@1"
SHIFTS, VTAB, RETRIEVAL = "ImageNet dist. shifts", "VTAB", "Retrieval"


@dataclass(frozen=True)
class Grouped:
    """A figure of groups of samples. `column`: of `data.benchmarks.BenchmarkSamples.groups`, with the
    group of each; a sample is right where its class is among the first `k`. The figure is that of
    the worst group."""

    column: int
    k: int = 1


@dataclass(frozen=True)
class Task:
    """A set. `names`: its folder's, as `key_of` has them; none: it has no layout that is read here.
    `metric`: the figure that counts; `average`: the group that it belongs to; `grouped`: how the
    metric is made, where it is of groups."""

    title: str
    names: tuple[str, ...]
    metric: str = ACC1
    average: str = ""
    grouped: Grouped | None = None


TASKS = (
    Task("Caltech-101", ("vtab-caltech101",), PER_CLASS, VTAB),
    Task("CIFAR-10", ("cifar10", "vtab-cifar10")),
    Task("CIFAR-100", ("vtab-cifar100",), average=VTAB),
    Task("CLEVR Counts", ("vtab-clevr_count_all",), average=VTAB),
    Task("CLEVR Distance", ("vtab-clevr_closest_object_distance",), average=VTAB),
    Task("Country211", ("country211",)),
    Task("Describable Textures", ("vtab-dtd",), average=VTAB),
    Task("EuroSAT", ("vtab-eurosat",), average=VTAB),
    Task("FGVC Aircraft", ("fgvc_aircraft",), PER_CLASS),
    Task("Food-101", ("food101",)),
    Task("GTSRB", ("gtsrb",)),
    Task("ImageNet 1k", ("imagenet1k",)),
    Task("ImageNet Sketch", ("imagenet_sketch",), average=SHIFTS),
    Task("ImageNet v2", ("imagenetv2",), average=SHIFTS),
    Task("ImageNet-A", ("imagenet-a",), average=SHIFTS),
    Task("ImageNet-O", ("imagenet-o",), average=SHIFTS),
    Task("ImageNet-R", ("imagenet-r",), average=SHIFTS),
    Task("KITTI Vehicle Distance", ("vtab-kitti_closest_vehicle_distance",), average=VTAB),
    Task("MNIST", ("mnist",)),
    Task("ObjectNet", ("objectnet",), average=SHIFTS),
    Task("Oxford Flowers-102", ("vtab-flowers",), PER_CLASS, VTAB),
    Task("Oxford-IIIT Pet", ("vtab-pets",), PER_CLASS, VTAB),
    Task("Pascal VOC 2007", ("voc2007",)),
    Task("PatchCamelyon", ("vtab-pcam",), average=VTAB),
    Task("Rendered SST2", ("renderedsst2",)),
    Task("RESISC45", ("vtab-resisc45",), average=VTAB),
    Task("Stanford Cars", ("cars",)),
    Task("STL-10", ("stl10",)),
    Task("SUN397", ("sun397",), average=VTAB),
    Task("SVHN", ("vtab-svhn",), average=VTAB),
    Task("Flickr", ("flickr_1k_test_image_text_retrieval", "flickr30k"), RECALL, RETRIEVAL),
    Task(
        "MSCOCO",
        ("mscoco_2014_5k_test_image_text_retrieval", "mscoco_captions"),
        RECALL,
        RETRIEVAL,
    ),
    Task("WinoGAViL", (), "jaccard_score_10-12", RETRIEVAL),
    Task("iWildCam", ("wilds-iwildcam",), "F1-macro_all"),
    Task("Camelyon17", ("wilds-camelyon17",)),
    Task("FMoW", ("wilds-fmow",), "acc_worst_region", grouped=Grouped(0)),
    Task("Dollar Street", ("dollar_street",), "acc_top5_wg", grouped=Grouped(0, 5)),
    Task("GeoDE", ("geode",), "acc_wg", grouped=Grouped(0)),
)
BY_NAME = {name: task for task in TASKS for name in task.names}
WITHOUT_FIGURE = ("fairface", "utkface")
"""Sets that are measured by several questions of their own, with no figure that counts."""
AVERAGES = {
    "ImageNet": [task for task in TASKS if task.title == "ImageNet 1k"],
    **{name: [t for t in TASKS if t.average == name] for name in (SHIFTS, VTAB, RETRIEVAL)},
    "Average": [*TASKS],
}


def key_of(name: str) -> str:
    """A folder's name without what CLIP_benchmark and DataComp put around it: wds_cars_test."""
    return name.lower().removeprefix("wds_").removesuffix("_test")


def task_of(name: str) -> Task | None:
    """The task that a set is, by its folder's name."""
    return BY_NAME.get(key_of(name))


def refuse_same_tasks(names: Sequence[str]) -> None:
    """Raise ValueError where two sets are the same task."""
    known: dict[Task, str] = {}
    for name in names:
        if (task := task_of(name)) and (other := known.setdefault(task, name)) != name:
            raise ValueError(
                f"--benchmark: {other} and {name} are both DataComp's {task.title}; move one away"
            )


def scores_of(metrics: Mapping[str, Mapping[str, float]]) -> dict[Task, float]:
    """Of each task that is there. `metrics`: of the sets, by name."""
    tasks = {name: task_of(name) for name in metrics}
    return {
        t: metrics[name][t.metric] for name, t in tasks.items() if t and t.metric in metrics[name]
    }


def averages_of(scores: Mapping[Task, float]) -> dict[str, tuple[float, int, int]]:
    """Name -> (mean of the tasks that are there, how many these are, how many there should be)."""
    found = {}
    for name, tasks in AVERAGES.items():
        there = [scores[task] for task in tasks if task in scores]
        found[name] = (fmean(there) if there else math.nan, len(there), len(tasks))
    return found


def record_of(scores: Mapping[Task, float]) -> dict[str, Any]:
    """For the JSON. An average is a number only where all of its sets are there."""
    averages = averages_of(scores)
    return {
        "tasks": {task.title: {"metric": task.metric, "score": scores.get(task)} for task in TASKS},
        "averages": {
            name: {
                "score": mean if there == of else None,
                "mean_of_those_there": mean,
                "there": there,
                "of": of,
            }
            for name, (mean, there, of) in averages.items()
        },
        "missing": {task.title: why_missing(task) for task in TASKS if task not in scores},
    }


def why_missing(task: Task) -> str:
    if not task.names:
        return "is no set of tar shards, and is not read"
    return f"no folder wds_{task.names[0]}_test"
