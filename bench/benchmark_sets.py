"""CLIP_benchmark and evaluate.py --benchmark on the same sets with the same weights: are the figures
equal?

    pip install --no-deps --target FOLDER clip_benchmark==1.6.2 pycocoevalcap pycocotools 'numpy<2.4'
    python bench/benchmark_sets.py FOLDER

Both programs run unchanged, in fp32. The sets are of the demo's emoji, in the layout that
CLIP_benchmark writes: classes by the first word of a name, several classes of an image by its words,
and names as captions, five lines each. The model is a small one of OpenCLIP, trained on emoji that are in
no set, so that figures lie between chance and 1. The table goes to bench/out/benchmark_sets/.
clip_benchmark 1.6.2 makes a number of an array, which numpy 2.4 refuses. What else it needs is in
requirements-models.txt and requirements-test.txt.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# `import open_clip` would find the script beside this one, not the library
sys.path = [str(ROOT), *(folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench")]

import numpy as np
import torch

from bench import common
from bench.common import table, write
from bench.open_clip_data import flattened

OUT = common.OUT / "benchmark_sets"
SIZE, STEPS, BATCH, RATE = 64, 150, 64, 1e-3
LEAST, CLASSES, SHARDS = 8, 20, 2  # images of a class; classes of several; tars of a set
TEMPLATES = ("a picture of {c}.", "the emoji {c}", "{c} on white")
CAPTIONS = ("{}", "an emoji: {}", "this is {}", "{}, drawn", "a small picture of {}")
CONFIG = {
    "embed_dim": 64,
    "vision_cfg": {
        "image_size": SIZE,
        "layers": 3,
        "width": 96,
        "head_width": 32,
        "patch_size": 16,
    },
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 96, "heads": 3, "layers": 3},
}
TASKS = {"classes": "classification", "words": "classification", "captions": "retrieval"}
"""Set -> CLIP_benchmark's task, behind `zeroshot_`."""

Sample = tuple[Any, str]  # an image, its name


def samples() -> list[Sample]:
    """The emoji, each picture and each name once: ties would leave figures to the order of rows."""
    from data.index.sources import open_source

    source = open_source("demo:en")
    found: dict[bytes, Sample] = {}
    names = set[str]()
    for i in map(int, source.usable()):
        image, name = flattened(source.value("image", i)), source.captions(i)[0]
        if name not in names and image.tobytes() not in found:
            names.add(name)
            found[image.tobytes()] = (image, name)
    return [*found.values()]


# -- sets


def write_set(
    root: Path, name: str, rows: Sequence[tuple[Any, dict[str, bytes]]], files: dict[str, str]
) -> None:
    """`rows`: an image and members beside it, by ending. `files`: beside the shards, by name."""
    folder = root / f"wds_{name}_test"
    (folder / "test").mkdir(parents=True)
    for file, text in {**files, "test/nshards.txt": str(SHARDS)}.items():
        (folder / file).write_text(f"{text}\n")
    for shard, part in enumerate(np.array_split(np.arange(len(rows)), SHARDS)):
        with tarfile.open(folder / "test" / f"{shard}.tar", "w") as tar:
            for i in part.tolist():
                image, members = rows[i]
                file = io.BytesIO()
                image.save(file, "webp", lossless=True)
                for ending, content in {"webp": file.getvalue(), **members}.items():
                    member = tarfile.TarInfo(f"s{i:07}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def write_sets(root: Path, given: Sequence[Sample]) -> None:
    prompts = {"zeroshot_classification_templates.txt": "\n".join(TEMPLATES)}
    firsts = Counter(name.split()[0] for _, name in given)
    classes = sorted(word for word, number in firsts.items() if number >= LEAST)
    rows = [
        (image, {"cls": str(classes.index(word)).encode()})
        for image, name in given
        if (word := name.split()[0]) in classes
    ]
    write_set(root, "classes", rows, {"classnames.txt": "\n".join(classes), **prompts})
    words = Counter(word for _, name in given for word in {*name.split()} if len(word) > 2)
    most = sorted(word for word, _ in words.most_common(CLASSES))
    rows = []
    for image, name in given:
        target, file = np.array([word in name.split() for word in most], np.int64), io.BytesIO()
        np.save(file, target)
        rows += [(image, {"npy": file.getvalue()})] if target.any() else []
    marks = {"classnames.txt": "\n".join(most), "dataset_type.txt": "multilabel"}
    write_set(root, "words", rows, {**marks, **prompts})
    rows = [
        (image, {"txt": "\n".join(each.format(name) for each in CAPTIONS).encode()})
        for image, name in given
    ]
    write_set(root, "captions", rows, {"dataset_type.txt": "retrieval"})


# -- the model


def write_model(folder: Path, given: Sequence[Sample]) -> None:
    """A model of OpenCLIP in the folder that `local-dir:` and --import read."""
    import open_clip
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": CONFIG, "preprocess_cfg": {"size": SIZE}})
    )
    torch.manual_seed(0)
    model = open_clip.CLIP(**CONFIG)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    _, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    pixels = torch.stack([transform(image) for image, _ in given])
    ids = open_clip.get_tokenizer(f"local-dir:{folder}")([name for _, name in given])
    loss = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        rows = torch.randperm(len(given))[:BATCH]
        found = loss(*model(pixels[rows], ids[rows]))
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {found.item():.3f}", flush=True)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")


# -- both programs


def theirs(clip_benchmark: Path, model: Path, sets: Path) -> dict[str, dict[str, float]]:
    found = {}
    for name, task in TASKS.items():
        output = OUT / f"{name}.json"
        command = [sys.executable, "-m", "clip_benchmark.cli", "eval", "--no_amp"]
        command += ["--model", f"local-dir:{model}", "--pretrained", "", "--num_workers", "0"]
        command += ["--dataset", f"wds/{name}", "--dataset_root", f"{sets}/wds_{{dataset}}_test"]
        command += ["--task", f"zeroshot_{task}", "--recall_k", "1", "5", "10"]
        path = os.pathsep.join([str(clip_benchmark), *os.environ.get("PYTHONPATH", "").split()])
        subprocess.run(
            [*command, "--output", str(output)], check=True, env={**os.environ, "PYTHONPATH": path}
        )
        found[name] = json.loads(output.read_text())["metrics"]
    return found


def ours(model: Path, sets: Path) -> dict[str, dict[str, Any]]:
    output = OUT / "ours.json"
    command = [sys.executable, "evaluate.py", "--import", str(model), "--benchmark", str(sets)]
    subprocess.run([*command, "--json", str(output)], check=True, cwd=ROOT)
    return {
        name.removeprefix("wds_").removesuffix("_test"): own
        for name, own in json.loads(output.read_text())["sets"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("clip_benchmark", type=Path, help="folder that the package is in")
    folder = parser.parse_args().clip_benchmark.resolve()
    shutil.rmtree(OUT, ignore_errors=True)
    model, sets, every = OUT / "model", OUT / "sets", samples()
    print(f"{len(every):,} emoji", flush=True)
    write_model(model, every[1::2])
    write_sets(sets, every[::2])
    expected, found = theirs(folder, model, sets), ours(model, sets)
    rows = []
    for name, metrics in expected.items():
        for metric, value in metrics.items():
            own = found[name]["metrics"][metric]
            best = found[name]["metrics_at_best"].get(metric, own)
            shown = [f"{each:.10f}" for each in (value, own, best)]
            rows.append([name, metric, found[name]["num_samples"], *shown, f"{own - value:.0e}"])
    header = ("set", "figure", "samples", "CLIP_benchmark", "ours", "ours at best", "difference")
    text = table(header, rows)
    write(OUT / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
