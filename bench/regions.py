"""What regions cost a run, and what they teach: train.py with and without them.

python bench/regions.py cost                              tables to bench/out/
python bench/regions.py learn --seeds 3 --epochs 15
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.compare import Column, Figures, Study, Way, main
from bench.plain_regions import train, write_maps
from bench.runs import call, learned, read_metrics, settings, train_command

MIB = 2**20
SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0}
WORDS = "red green blue small large old new left right round wooden wet".split()
THINGS = "dog cat car tree cup chair bird boat hat shoe lamp book".split()
NUMBERS = (0, 4, 16)
SKIPPED = 2  # steps, in which files are read for the first time


def cost(steps: int = 12, images: int = 512, batch_size: int = 64, image_size: int = 96) -> Study:
    """Regions of each image: 16 cost the text branch 16 phrases of three words, so a step where
    texts wait 2 to 3 × the time; the planner within 10 %."""
    folder = tempfile.mkdtemp(prefix="regions-")
    write_images(Path(folder), images)
    ways = {
        f"{number} an image": Way(
            partial(measured, folder, number, steps, batch_size, image_size), exact=False
        )
        for number in NUMBERS
    }
    return Study(
        "Regions of each image",
        ways,
        (
            Column("samples_per_s", "samples/s", "{:.1f}"),
            Column("samples_per_s", "÷ without"),
            Column("step_s", "step, s", "{:.2f}"),
            Column("predicted", "predicted ÷ measured", "{:.2f}"),
            Column("peak_bytes", "most memory of a rank, MiB", "{:,.0f}", 1 / MIB),
        ),
        f"{images} images, {batch_size} a step, two ranks, a fork whose layers were measured",
        reference="0 an image",
    )


def learn(seeds: int = 3, epochs: int = 15, scenes: int = 1000) -> Study:
    """With regions phrases find their box at least 3 × as often above chance as without, where the
    last map is all there is; images find their captions no worse."""
    given = {"data": f"demo:scenes:{scenes}", "epochs": epochs, "workers": 0}
    both = {"pairs": "image:text,region:text"}
    local = {"import_module": "bench.local_loss", "loss": "image:text=infonce,region:text=local"}
    ways = {
        "with regions": Way(partial(learned, given | both, seeds, "--regions")),
        "among a rank's own": Way(partial(learned, given | both | local, seeds, "--regions")),
        "without": Way(partial(learned, given | {"pairs": "image:text"}, seeds, "--regions")),
    }
    columns = (
        Column("composition/phrase_to_box_R@1", "phrase → box, %", "{:.1f}", 100),
        Column("composition/phrase_to_box_same_chance", "by chance, %", "{:.1f}", 100),
        Column("concept/phrase_to_box_R@1", "of unseen emoji, %", "{:.1f}", 100),
        Column("concept/phrase_to_box_same_chance", "by chance, %", "{:.1f}", 100),
        Column("composition/image_to_text_R@1", "image → text R@1, %", "{:.1f}", 100),
        Column("composition/text_to_image_R@1", "text → image R@1, %", "{:.1f}", 100),
    )
    how = f"{scenes} scenes, {epochs} epochs, medians of {seeds} seeds"
    return Study("Scenes", ways, columns, how, rounds=1)


def views(
    seeds: int = 3, steps: int = 300, maps: int = 154, cells: tuple[int, ...] = (8, 2)
) -> Study:
    """How wide images are brought to a square, by a plain loop: squashed, more phrases find their
    box than in crops or filled up."""
    folder, (wide, high) = Path(tempfile.mkdtemp(prefix="maps-")), cells
    files = (
        write_maps(folder / "train", maps, (wide, high)),
        write_maps(folder / "test", 48, (wide, high), seed=1),
    )
    given = [("squash", "squash"), ("pad", "pad"), ("crop", "crop"), ("keep", "crop")]
    given += [("crop", "squash"), ("keep", "squash")]
    ways = {
        f"{trained}, tested {tested}": Way(partial(_seen, files, trained, tested, steps, seeds))
        for trained, tested in given
    }
    columns = (
        Column("boxes_a_step", "boxes a step", "{:.0f}"),
        Column("right", "right of all phrases, %", "{:.1f}", 100),
        Column("of_seen", "right of those in the view, %", "{:.1f}", 100),
        Column("seen", "boxes in the view, %", "{:.1f}", 100),
    )
    how = f"{maps} maps of {wide} × {high} cells, 12 boxes each, 24 maps a step, {steps} steps, "
    how += f"{seeds} seeds."
    return Study("Views of wide images", ways, columns, how, rounds=1)


def _seen(files: tuple[Path, Path], trained: str, tested: str, steps: int, seeds: int) -> Figures:
    found = [train(*files, trained, steps, seed=seed, tested=tested) for seed in range(seeds)]
    return {key: [each[key] for each in found] for key in found[0]}


STUDIES = (cost, learn, views)


def write_images(folder: Path, number: int) -> None:
    """Images of noise with 16 boxes each, and a phrase for each box."""
    import numpy as np
    from PIL import Image

    random, lines = np.random.default_rng(0), []
    for i in range(number):
        noise = random.integers(0, 256, (12, 12, 3)).astype(np.uint8)
        Image.fromarray(noise).resize((128, 128)).save(folder / f"{i}.jpg")
        corners = np.sort(random.random((16, 2, 2)), 1) * 0.8
        corners[:, 1] += 0.2
        regions = [
            {"xyxy": box, "unit": "relative", "text": phrase(random)}
            for box in corners.reshape(16, 4).round(3).tolist()
        ]
        row = {"image_path": f"{i}.jpg", "text": f"a {phrase(random)} and {phrase(random)}"}
        lines.append(json.dumps(row | {"regions": regions}))
    (folder / "data.jsonl").write_text("\n".join(lines))


def phrase(random: Any) -> str:
    return f"a {random.choice(WORDS)} {random.choice(THINGS)}"


def measured(folder: str, number: int, steps: int, batch_size: int, image_size: int) -> Figures:
    pairs = "image:text,region:text" if number else "image:text"
    more = {"max_regions": number} if number else {}
    with tempfile.TemporaryDirectory() as run_dir:
        log = Path(run_dir) / "log"
        given = settings(
            "deepspeed_config=ds_configs/cpu_fp32.json workers=0 trace_every=0 wandb=disabled",
            "eval_every=1000000 image_tower=resnet18:layers=1-1-1-1 text_tower=bert-mini",
            "branches.layout=auto embed_dim=256",
            {"data": f"jsonl:{folder}/data.jsonl", "pairs": pairs, "train_batch_size": batch_size},
            {"steps": steps, "image_size": image_size, "run_dir": f"{run_dir}/run", **more},
        )
        peaks = call(train_command(2, given), log, f"{number} regions", 2)
        took = [line["step_s"] for line in read_metrics(Path(run_dir) / "run")[0]][SKIPPED:]
        found = re.search(r"predicted: ([\d.]+) (\w+) a step", log.read_text())
        step_s = statistics.median(took)
        predicted = float(found[1]) * SECONDS[found[2]] if found else float("nan")
    return {
        "samples_per_s": batch_size / step_s,
        "step_s": step_s,
        "predicted": predicted / step_s,
        "peak_bytes": float(max(peaks)),
    }


if __name__ == "__main__":
    main("bench.regions")
