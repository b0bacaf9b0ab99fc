"""evaluate.py and export.py on a run that compares regions of images with phrases."""

import base64
import io
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from launched import SMALL, fork_flags, run_to_end
from matplotlib.image import imread
from PIL import Image
from torchvision.ops import box_iou

import evaluate
from common.boxes import WHOLE
from data.index.sources import open_source
from data.stored.derived import REGIONS
from launch.inference.embedding import Embedder
from launch.inference.folders import (
    forget_embeddings,
    read_embeddings,
    refuse_other_data,
    write_embeddings,
)
from launch.inference.gallery import Cell, draw_rows
from launch.inference.trained import open_run
from launch.views import ImageView

PAIRS = "image:text,region:text"
NUMBER, WIDE = 40, 3  # samples; the one of which the tower sees the middle half


def write_scenes(folder):
    """The spec of a JSONL of scenes: boxes that overlap an earlier one of another phrase, some at
    an edge that the tower does not see, samples without regions and without a caption."""
    folder.mkdir()
    scenes = open_source("demo:scenes:100", [("image", "text"), ("image", "region")])
    with (folder / "scenes.jsonl").open("w") as lines:
        for i in range(NUMBER):
            picture = Image.open(io.BytesIO(scenes.value("image", i)))
            part = 0.5 if i == WIDE else 1.0  # of the width
            wide = Image.new("RGB", (round(picture.width / part), picture.height))
            wide.paste(picture)
            wide.save(folder / f"{i}.bmp")
            regions = [
                {
                    "xyxy": [part * x1, y1, part * x2, y2],
                    "unit": "relative",
                    "text": [*region.phrases, "a thing"],
                }
                for region in scenes.value("region", i)
                for x1, y1, x2, y2 in [region.extent]
            ]
            x1, y1, x2, y2 = regions[0]["xyxy"]
            shifted = [x1, y1, x2, y1 + 0.7 * (y2 - y1)]
            regions.insert(1, {"xyxy": shifted, "unit": "relative", "text": f"number {i}"})
            row = {"image_path": f"{i}.bmp", "id": str(i), "text": scenes.captions(i)}
            row |= {"regions": regions} if i % 7 else {}
            if i % 7 == 1:
                del row["text"]
            lines.write(json.dumps(row) + "\n")
    return f"jsonl:{folder / 'scenes.jsonl'}"


@pytest.fixture(scope="module")
def run(module_folder):
    """(the folder of a run, what it is evaluated on)"""
    folder = module_folder("regions")
    spec, run_dir = write_scenes(folder / "data"), folder / "run"
    words = ["--data", "demo:scenes:100", "--val-data", spec, "--on-leak", "drop", *SMALL]
    words += ["--pairs", PAIRS, "--steps", "2", "--workers", "0"]
    words += ["--run-dir", run_dir, *fork_flags(folder), "--image-resize-mode", "shortest"]
    status, output = run_to_end("train.py", *words, ranks=2)
    assert status == 0, output[-3000:]
    assert "regions: " in output and "--image-resize-mode shortest: the view shows all" in output
    said = " ".join(output.split())
    (learned,) = re.findall(r"trained on [\d,]+ captions and the phrases of (\d+) regions, ", said)
    assert f"regions: {learned} in " in said
    return run_dir, spec


def evaluated(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words), "--workers", "0"])
    evaluate.main(evaluate.parse())


def test_the_figures_are_those_of_the_last_evaluation(run, monkeypatch, capfd):
    """Of every name that the run wrote; and those beside them are of the protocol that is
    printed."""
    run_dir, _ = run
    evaluated(monkeypatch, run_dir, "--batch-size", "7")
    said = capfd.readouterr().out
    found = json.loads((run_dir / "evaluation-step-00000002.json").read_text())
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    *_, last = (line for line in lines if "held_out" in line)
    figures = {name: value for name, value in last.items() if "_" in name and name != "held_out"}
    assert len(figures) > 40 and "phrase_to_box_R@1" in figures
    for name, value in figures.items():
        assert found[f"validation/{name}"] == pytest.approx(value, abs=1e-5), name
    of_boxes = {
        name.removeprefix("validation/phrase_to_box_"): value
        for name, value in found.items()
        if "phrase_to_box" in name
    }
    assert of_boxes["same_right"] == of_boxes["R@1"]
    # the shifted box is right by overlap, and no other box's phrase is equal
    assert of_boxes["iou_0.5_chance"] > of_boxes["same_chance"] > 0.1
    assert found["validation/box_to_name_top_1"] == found["validation/region_to_phrase_R@1"]
    assert "among those given" in found["protocol_of_regions"] and "phrase → box" in said
    total, out = (found[f"validation/num_regions{of}"] for of in ("", "_not_in_view"))
    assert 0 < out < 5 and total > 100  # of the one image that is wide
    assert f"{out} of {total} regions were not in the view" in " ".join(said.split())


def test_data_that_was_trained_on_is_not_called_zero_shot(run, monkeypatch, capfd, tmp_path):
    words = (run[0], "--val-data", "demo:scenes:100", "--json", tmp_path / "a.json")
    evaluated(monkeypatch, *words)
    said = " ".join(capfd.readouterr().out.split())
    found = json.loads((tmp_path / "a.json").read_text())["trained_on"]
    assert 50 <= found["samples"] <= found["of"] == 100
    assert f"{found['samples']} of 100 samples were trained on" in said
    assert "Retrieval, step" in said and "held-out set" not in said and "Zero-shot" not in said


def test_of_a_run_on_streams_nobody_knows_what_was_trained_on(run, monkeypatch, capfd, tmp_path):
    """Nothing says then that the samples are new to it."""
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    record = json.loads((copy / "config.json").read_text())
    record["options"]["data"] = ["stream:https://here.invalid/{0..9}.tar"]
    (copy / "config.json").write_text(json.dumps(record))
    evaluated(monkeypatch, copy, "--val-data", "demo:scenes:100", "--json", tmp_path / "a.json")
    said = " ".join(capfd.readouterr().out.split())
    found = json.loads((tmp_path / "a.json").read_text())["trained_on"]
    why = "samples of streams are not compared"
    assert found == {"samples": None, "of": 100, "why": why}
    assert f"whether samples were trained on could not be checked: {why}" in said
    assert "Retrieval, step" in said and "held-out set" not in said and "Zero-shot" not in said


def read_regions(run, max_regions=16):
    trained = open_run(run[0])
    trained.options["max_regions"] = max_regions
    source = open_source(run[1], trained.read)
    return Embedder(trained, "cpu", 5, 0).embedded(source, source.usable()).annotated


def test_regions_are_embedded_with_their_boxes_and_phrases(run):
    """By the towers alone, of the boxes that the index has; of all, not of the `--max-regions` that
    a step has."""
    run_dir, spec = run
    trained = open_run(run_dir)
    source = open_source(spec, trained.read)
    regions = read_regions(run, max_regions=2)
    assert regions.num_given == source.column("num_regions").sum() > 2 * NUMBER
    assert len(regions.of) == len(regions.rows.sample) > 100
    assert set(regions.of.tolist()) == {i for i in range(NUMBER) if i % 7}
    for row in (0, 50, len(regions.of) - 1):
        i = int(regions.of[row])
        first = int((regions.of == i).nonzero()[0])
        own = source.value("region", i)[row - first]
        assert regions.extent[row].tolist() == pytest.approx(own.extent)
        assert regions.phrase.texts[row] == own.phrases[0]
        boxes = (torch.tensor([own.extent]) * WHOLE).round().int()
        given = {"region_boxes": boxes, "region_row": torch.zeros(1, dtype=torch.int64)}
        ((batch, _),) = Embedder(trained, "cpu", 1, 0).outputs("image", source, np.array([i]))
        embeds = Embedder(trained, "cpu", 1, 0)._run("image", batch | given)["region_embeds"]
        torch.testing.assert_close(regions.rows.embeds[row], embeds[0], rtol=0, atol=1e-4)


def test_a_folder_of_embeddings_has_regions_and_phrases_with_their_boxes(run, tmp_path):
    """Each row beside its sample, which of its regions it is, and what the data says of it."""
    trained, model = open_run(run[0]), {"checkpoint": "c", "checksum": "s", "run": "r"}
    source = open_source(run[1], trained.read)
    embedded = Embedder(trained, "cpu", 5, 0).embedded(source, source.usable())
    write_embeddings(tmp_path, embedded.rows, source, model, embedded.annotated)
    rows = {"region": embedded.annotated.rows, "phrase": embedded.annotated.phrase}
    for name, own in rows.items():
        embeds, lines, _ = read_embeddings(tmp_path, model, name)
        assert np.array_equal(embeds, own.embeds.numpy()) and len(lines) == len(embeds) > 100
        for line in lines:
            region = source.value("region", line["index"])[line["region"]]
            assert (line["box"], line["text"]) == ([*region.extent], region.phrases[0])
            assert line["id"] == source.identity(line["index"])
        refuse_other_data(tmp_path, lines, source, name)
    assert {line["index"] for line in lines} == {i for i in range(NUMBER) if i % 7}
    # of the wide image only those that the view shows
    seen = [line["region"] for line in lines if line["index"] == WIDE]
    assert 0 < len(seen) < 4
    forget_embeddings(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.all("evaluates one more model")
def test_a_model_that_learned_no_regions_has_them_by_its_last_map(tmp_path, monkeypatch, capfd):
    """Of the samples that its run held out: a box of the whole image is what the image is."""
    spec, run_dir = write_scenes(tmp_path / "data"), tmp_path / "run"
    file = tmp_path / "data" / "scenes.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.setdefault("text", "nothing")
        for region in line.get("regions", ()):
            region["xyxy"] = [0, 0, 1, 1]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--data", spec, "--steps", "1", "--workers", "0", "--set", "train_batch_size=8"]
    status, output = run_to_end("train.py", *words, *SMALL, "--run-dir", run_dir, ranks=1)
    assert status == 0, output[-3000:]
    trained = open_run(run_dir).with_regions()
    source = open_source(spec, trained.read)
    found = Embedder(trained, "cpu", 5, 0).embedded(source, source.usable())
    images = dict(zip(found.rows["image"].sample.tolist(), found.rows["image"].embeds))
    expected = torch.stack([images[i] for i in found.annotated.of.tolist()])
    assert len(expected) > 100
    torch.testing.assert_close(found.annotated.rows.embeds, expected, rtol=1e-4, atol=1e-5)
    evaluated(monkeypatch, run_dir, "--regions")
    assert "learned no regions" in " ".join(capfd.readouterr().out.split())
    evaluation = json.loads((run_dir / "evaluation-step-00000001.json").read_text())
    assert "validation/phrase_to_box_R@1" in evaluation


def test_queries_of_the_report_are_phrases_and_boxes(run):
    """Each by its number of its image, also where boxes before it are not seen; with its box on the
    picture."""
    record = json.loads((run[0] / "queries.json").read_text())["sets"]["validation"]
    source, regions = open_source(run[1], open_run(run[0]).read), read_regions(run)
    own = {}
    for row, i in enumerate(regions.of.tolist()):
        boxes = [region.extent for region in source.value("region", i)]
        own[f"{i}.{boxes.index(tuple(regions.extent[row].tolist()))}"] = row
    embeds = {"region": regions.rows.embeds, "phrase": regions.phrase.embeds}
    for direction in ("region_to_phrase", "phrase_to_region"):
        asks, answers_with = direction.split("_to_")
        assert len(record[direction]) == 4
        for query in record[direction]:
            row = own[query["query"]]
            similarity = embeds[answers_with] @ embeds[asks][row]
            best = query["answers"][0]
            assert best["similarity"] == pytest.approx(float(similarity.max()), abs=1e-3)
            found = float(similarity[own[best["sample"]]])
            assert best["similarity"] == pytest.approx(found, abs=1e-3)
            shown = record["samples"][query["query"]]
            assert shown["text"] == regions.phrase.texts[row]
            if asks == "region":
                picture = Image.open(io.BytesIO(base64.b64decode(shown["region_picture"])))
                plain = ImageView(source.value("image", int(query["query"].split(".")[0])))
                assert np.abs(np.array(picture, float) - plain.small_picture()).max() > 60


def write_refcoco(folder):
    """(a spec of scenes as RefCOCO has them; by image its boxes in pixels, and the sentences of the
    first two of them)."""
    (folder / "images").mkdir(parents=True)
    scenes = open_source("demo:scenes:100", [("image", "text"), ("image", "region")])
    images, annotations, refs, every = [], [], [], []
    for i in range(12):
        picture = Image.open(io.BytesIO(scenes.value("image", i)))
        picture.save(folder / "images" / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png"})
        sides = np.tile(picture.size, 2)
        boxes = [np.array(region.extent) * sides for region in scenes.value("region", i)]
        names = [region.phrases[0] for region in scenes.value("region", i)]
        said = [[f"the {name}", f"{name} of image {i}"] for name in names[:2]]
        for k, (x1, y1, x2, y2) in enumerate(boxes):
            annotation = {"id": 100 * i + k, "image_id": i, "bbox": [x1, y1, x2 - x1, y2 - y1]}
            annotations.append(annotation)
        for k, texts in enumerate(said):
            ref = {"image_id": i, "ann_id": 100 * i + k, "split": "val"}
            refs.append(ref | {"sentences": [{"sent": text} for text in texts]})
        every.append((np.array(boxes), said))
    (folder / "instances.json").write_text(
        json.dumps({"images": images, "annotations": annotations})
    )
    (folder / "refs.json").write_text(json.dumps(refs))
    return f"refcoco:{folder}/images:{folder}/refs.json?split=val", every


def chosen_by_hand(embedder, source, every):
    """Of each sentence whether the box that it chooses among all of its image has an IoU of 0.5 with
    its own, and among how many."""
    regions = embedder.annotated(REGIONS, source, source.usable())[1]
    right = []
    for i, (boxes, said) in enumerate(every):
        embeds = regions.rows.embeds[regions.of == i]
        assert len(embeds) == len(boxes)
        overlaps = box_iou(torch.tensor(boxes), torch.tensor(boxes)) >= 0.5
        for k, texts in enumerate(said):
            for alike in (embedder.texts(texts) @ embeds.T).unbind():
                best, wrong = alike[overlaps[k]].max(), alike[~overlaps[k]]
                right.append((not (wrong >= best - 1e-6).any(), len(boxes)))
    return np.mean(right, axis=0)


def test_refcoco_is_measured_as_it_is_published(run, monkeypatch, capfd, tmp_path):
    """Every sentence of a referred object asks, among all annotated boxes; without `candidates`
    the first sentence of each, among the referred objects."""
    spec, every = write_refcoco(tmp_path / "refcoco")
    found, said = [], []
    for more in ("&candidates=annotated", ""):
        words = ("--val-data", f"{spec}{more}", "--json", tmp_path / "a.json")
        evaluated(monkeypatch, run[0], *words, "--embeddings", tmp_path / f"out{len(found)}")
        found.append(json.loads((tmp_path / "a.json").read_text()))
        said.append(" ".join(capfd.readouterr().out.split()))
    published, referred = found
    number = sum(len(texts) for _, of_image in every for texts in of_image)
    assert published["validation/phrase_to_box_queries"] == number == 48
    assert referred["validation/phrase_to_box_queries"] == 24
    assert referred["validation/phrase_to_box_same_candidates"] == 2
    trained = open_run(run[0])
    source = open_source(f"{spec}&candidates=annotated", trained.read)
    right, candidates = chosen_by_hand(Embedder(trained, "cpu", 5, 0), source, every)
    assert published["validation/phrase_to_box_iou_0.5_right"] == pytest.approx(right)
    assert published["validation/phrase_to_box_iou_0.5_candidates"] == pytest.approx(candidates)
    boxes = sum(len(of_image) for of_image, _ in every)
    alone = published["validation/num_regions_without_phrase"]
    assert published["validation/num_regions"] == boxes and alone == boxes - 24 > 24
    assert f"all annotated boxes of its image ({alone} of {boxes} have no phrase)" in said[0]
    assert "every phrase of a box asks" in said[0] and "the first phrase of a box asks" in said[1]
    assert "those given for its image" in said[1] and "annotated" not in said[1]
    lines = {
        name: [json.loads(line) for line in (tmp_path / "out0" / f"{name}.jsonl").open()]
        for name in ("region", "phrase")
    }
    assert len(lines["phrase"]) == 48 and len(lines["region"]) == boxes
    assert sum("text" in line for line in lines["region"]) == 24
    for line in lines["phrase"]:
        own = source.value("region", line["index"])[line["region"]]
        assert line["text"] in own.phrases and line["box"] == [*own.extent]


def test_a_query_finds_boxes_and_draws_them(run, monkeypatch, capfd, tmp_path):
    run_dir, _ = run
    picture = tmp_path / "found.png"
    words = ("--query", "number 3", "--find", "region", "--picture")
    evaluated(monkeypatch, run_dir, *words, picture, "--number", "3")
    regions = read_regions(run)
    embedder = Embedder(open_run(run_dir), "cpu", 5, 0)
    alike = (embedder.texts(["number 3"]) @ regions.rows.embeds.T)[0]
    best = alike.topk(3)
    said = capfd.readouterr().out
    assert all(f"{round(value, 4):.3f}" in said for value in best.values.tolist())
    assert regions.phrase.texts[best.indices[0]] in said
    assert imread(picture).std() > 0.1


def test_a_box_is_drawn_where_it_is(tmp_path):
    """Of a black picture its left upper quarter: a white line, with blue on it, is nowhere else."""
    picture = Image.new("RGB", (80, 40))
    file = io.BytesIO()
    picture.save(file, "PNG")
    drawn = []
    for box in (None, (0.0, 0.0, 0.5, 0.5)):
        draw_rows([[Cell(ImageView(file.getvalue()), "", 0.5, box=box)]], "", tmp_path / "a.png")
        drawn.append(imread(tmp_path / "a.png")[..., :3])
    rows, columns = np.nonzero(np.abs(drawn[0] - drawn[1]).sum(2) > 0.5)
    black = np.nonzero(drawn[0].sum(2) < 0.1)
    height, width = np.ptp(black[0]), np.ptp(black[1])
    assert abs(np.ptp(columns) / width - 0.5) < 0.1 and abs(np.ptp(rows) / height - 0.5) < 0.1
    assert (
        rows.max() < black[0].mean() + 0.1 * height
        and columns.max() < black[1].mean() + 0.1 * width
    )


def test_data_without_regions_has_the_other_figures(run, monkeypatch, tmp_path):
    """And data whose images have no caption those of regions."""
    run_dir, spec = run
    lines = [json.loads(line) for line in open(spec.removeprefix("jsonl:"))]
    for lacks, figure in (
        ("regions", "image_to_text_R@1"),
        ("text", "phrase_to_box_iou_0.5_right"),
    ):
        data = tmp_path / f"without_{lacks}.jsonl"
        rows = [{key: value for key, value in line.items() if key != lacks} for line in lines]
        for row in rows:
            row["image_path"] = f"{run_dir.parent}/data/{row['image_path']}"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        root = ("--data-root", run_dir.parent / "data")
        evaluated(
            monkeypatch,
            run_dir,
            "--val-data",
            f"jsonl:{data}",
            "--json",
            tmp_path / "a.json",
            *root,
        )
        found = json.loads((tmp_path / "a.json").read_text())
        assert f"validation/{figure}" in found
        assert ("validation/phrase_to_box_R@1" in found) == (lacks == "text")
