"""`evaluate.py --benchmark`: the figures of CLIP_benchmark's sets are those of its own definitions, in
plain torch here, and by the package where it is installed."""

import json
import re

import numpy as np
import pytest
import torch
from embedders import make_embedder
from exports import trained_model
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch.nn import functional as F
from wds_sets import NAMES, caption, of_captions, of_classes, of_several, picture, write_set

from data.index.sources import open_source
from launch.exporting.writing import write_export
from launch.inference.benchmarks import measure_sets, open_sets, tables_of
from launch.inference.datacomp import AVERAGES, TASKS, averages_of, refuse_same_tasks, task_of
from launch.inference.embedding import Embedder
from launch.inference.trained import open_model_folder
from launch.terminal.tables import show


@pytest.fixture(scope="module")
def embedder():
    """With weights so large that texts and images differ."""
    made = make_embedder(open_source("demo"))
    disturb(made.trained)
    return made


@torch.no_grad()
def disturb(trained):
    draw = torch.Generator().manual_seed(0)
    for layer in trained.layers:
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)


def measured(embedder, folder):
    """The record of the only set in a folder, with its samples."""
    (opened,), notes = open_sets(str(folder))
    record = measure_sets(embedder, [opened], lambda own: None)
    (own,) = record["sets"].values()
    return own, opened, record


def embeds(embedder, opened):
    return embedder.rows("image", opened.source, np.arange(len(opened.samples))).embeds


def class_weights(embedder, opened):
    """[C, D], as zero_shot_classifier of CLIP_benchmark: a class after the other."""
    found = []
    for name in opened.given.classes.names:
        texts = [t.replace("{}", name) for t in opened.given.classes.templates]
        mean = F.normalize(embedder.texts(texts), dim=-1).mean(0)
        found.append(mean / mean.norm())
    return torch.stack(found)


def test_classes(embedder, tmp_path):
    """All names are candidates, also of a class that no image has."""
    own, opened, _ = measured(embedder, of_classes(tmp_path / "wds_things_test", 90))
    logits = 100.0 * embeds(embedder, opened) @ class_weights(embedder, opened).T
    label = torch.tensor(opened.samples.judged_by)
    top = logits.topk(5).indices
    right = top == label[:, None]
    assert own["metrics"] == {
        "acc1": right[:, 0].sum().item() / 90,
        "acc5": right.sum().item() / 90,
        "mean_per_class_recall": pytest.approx(
            balanced_accuracy_score(label, top[:, 0]), abs=1e-15
        ),
    }
    assert own["metrics_at_best"] == {} and 0 < own["metrics"]["acc1"] < own["metrics"]["acc5"] < 1
    assert own["counts"][""] == {"queries": 90, "candidates": 10, "answers": 1}
    assert own["left_out"] == 0 and own["class_names"].endswith("things_test/classnames.txt")


def test_fewer_than_five_classes_have_no_acc5(embedder, tmp_path):
    samples = [{"png": picture(i), "cls": b"0"} for i in range(3)]
    files = {"classnames": "cat\ndog", "zeroshot_classification_templates": "a {c}"}
    own, _, _ = measured(embedder, write_set(tmp_path / "set", samples, **files))
    assert np.isnan(own["metrics"]["acc5"]) and own["metrics"]["acc1"] <= 1


def test_classes_that_tie(embedder, tmp_path):
    """Names that the tokenizer does not tell apart: no image finds its class, but with ties behind it."""
    names = [*NAMES[:5], *map(str.upper, NAMES[:5])]
    own, best = (
        measured(embedder, of_classes(tmp_path / "set", names=names))[0][key]
        for key in ("metrics", "metrics_at_best")
    )
    assert own["acc1"] == own["mean_per_class_recall"] == 0 < best["acc1"]
    assert own["acc5"] < best["acc5"]


def test_several_classes(embedder, tmp_path):
    own, opened, _ = measured(embedder, of_several(tmp_path / "wds_several_test", 60))
    scores = embeds(embedder, opened) @ class_weights(embedder, opened).T
    target = np.stack(opened.samples.judged_by)
    expected = []
    for k in range(10):
        truth = target[scores[:, k].argsort(descending=True).numpy(), k]
        precision = truth.cumsum() / np.arange(1, 61)
        expected.append(precision[truth].sum() / max(1, truth.sum()))
    assert expected[-1] == 0 < own["metrics"]["mean_average_precision"] < 1
    assert own["metrics"]["mean_average_precision"] == pytest.approx(np.mean(expected), abs=1e-12)
    assert own["counts"][""]["answers"] == target.sum(1).mean()


def recalls(text, image, owner, k):
    """(image_retrieval, text_retrieval): `owner` [m], the image of each text."""
    scores = text @ image.T
    by_text = (scores.topk(k).indices == owner[:, None]).any(1)
    by_image = owner[scores.T.topk(k).indices] == torch.arange(len(image))[:, None]
    return by_text.sum().item() / len(text), by_image.any(1).sum().item() / len(image)


def test_captions_and_equal_images(embedder, tmp_path):
    """Every row by itself, as CLIP_benchmark has it; equal images as one are named apart. Where images
    are equal, a figure of hers lies between ours and ours at best."""
    for equal in (0, 15):
        root = of_captions(tmp_path / f"wds_captions{equal}_test", 40, 5, equal)
        own, opened, _ = measured(embedder, root)
        image = embeds(embedder, opened)
        owner = torch.arange(40).repeat_interleave(5)
        lines = [line for captions in opened.samples.judged_by for line in captions]
        text = embedder.texts(lines)
        for k in (1, 5, 10):
            for name, expected in zip(
                ("image_retrieval", "text_retrieval"), recalls(text, image, owner, k)
            ):
                metric = f"{name}_recall@{k}"
                found = own["metrics"][metric]
                best = own["metrics_at_best"].get(metric, found)
                assert found <= expected <= best
                assert equal or found == best == own["equal_as_one"][metric]
        counts = own["counts"]
        assert counts["image_retrieval"] == {"queries": 200, "candidates": 40, "answers": 1}
        assert counts["text_retrieval"] == {"queries": 40, "candidates": 200, "answers": 5}
        assert counts["image_retrieval_equal_as_one"]["candidates"] == 40 - equal
        ones = counts["text_retrieval_equal_as_one"]
        assert ones["queries"] == 40 - equal and ones["answers"] == 200 / (40 - equal)
    assert own["metrics_at_best"], "equal images tie"
    first = [own[key]["image_retrieval_recall@1"] for key in ("metrics", "equal_as_one")]
    assert first[0] <= first[1] <= own["metrics_at_best"].get("image_retrieval_recall@1", first[0])


def test_texts_are_read_as_open_clip_reads_them(embedder, tmp_path):
    """Repaired, and an empty line is a caption, which is said."""
    basic_clean = pytest.importorskip("open_clip").tokenizer.basic_clean
    texts = [
        "two o\u2019clock",
        "Tom &amp;amp; Jerry ",
        "",
        "caf\u00c3\u00a9",
        " plain, with 'quotes'",
    ]
    texts += ["".join(map(chr, range(32, 127))), "a\tb"]
    samples = [{"png": picture(0), "txt": "\n".join(texts).encode()}]
    samples += [{"png": picture(1), "txt": b"another"}]
    write_set(tmp_path / "set", samples, dataset_type="retrieval")
    (opened,), notes = open_sets(str(tmp_path))
    assert opened.samples.captions(0) == [basic_clean(text) or " " for text in texts]
    assert notes == ["set: 1 captions are empty lines, and count as captions"]
    own = measured(embedder, tmp_path)[0]
    assert own["counts"]["image_retrieval"]["queries"] == len(texts) + 1


def test_ties_do_not_follow_the_order_of_samples(embedder, tmp_path):
    """The same set with its samples in another order, in other batches."""
    root = of_captions(tmp_path / "wds_captions_test", 24, 2, 6)
    forward = measured(embedder, root)[0]
    given = [
        {
            "jpg": picture(i % 18, "jpeg"),
            "txt": "\n".join(caption(i, k) for k in range(2)).encode(),
        }
        for i in range(24)
    ]
    turned = write_set(tmp_path / "turned", given[::-1], shards=5, dataset_type="retrieval")
    backward = measured(embedder, turned)[0]
    assert forward["metrics"] == backward["metrics"]
    assert forward["metrics_at_best"] == backward["metrics_at_best"] != {}


def test_images_that_cannot_be_decoded_are_said(embedder, tmp_path, capsys):
    for write in (of_classes, of_several, of_captions):
        root = write(tmp_path / write.__name__ / "wds_set_test")
        (file,) = root.glob("test/0.tar")
        kind = {of_classes: "png", of_several: "webp", of_captions: "jpeg"}[write]
        good, content = picture(0, kind), file.read_bytes()
        file.write_bytes(content.replace(good, b"?" * len(good)))
        own, opened, record = measured(embedder, root)
        assert own["left_out"] == 1 and own["num_samples"] == len(opened.samples) - 1
        assert "1 of" in (said := capsys.readouterr().out) and "not-an-image" in said
        queries = own["counts"].get("", own["counts"].get("text_retrieval"))["queries"]
        assert queries == own["num_samples"]
        for table in tables_of(record, "model", "fp32", []):
            show(table)
        assert "left out" in capsys.readouterr().out


def test_datacomp_and_what_is_missing(embedder, tmp_path, capsys):
    """Its figures of groups, its averages over what is there, and each set that is not."""
    root, groups = tmp_path / "sets", [i % 3 for i in range(30)]
    of_classes(root / "wds_wilds-fmow_test", groups=groups)
    of_classes(root / "wds_dollar_street_test", groups=groups)
    of_classes(root / "wds_wilds-iwildcam_test")
    of_classes(root / "wds_vtab-pets_test")
    of_captions(root / "wds_flickr_1k_test_image_text_retrieval_test")
    write_set(root / "wds_fairface_test", [{"png": picture(0), "npy": b""}], shards=1)
    opened, notes = open_sets(str(root))
    written = []
    record = measure_sets(embedder, opened, lambda own: written.append(json.dumps(own)))
    sets = record["sets"]
    assert len(written) == len(sets) == 5 and notes == [
        "wds_fairface_test: not measured, it has no figure that counts in DataComp"
    ]
    fmow = next(each for each in opened if "fmow" in each.given.name)
    logits = embeds(embedder, fmow) @ class_weights(embedder, fmow).T
    label = torch.tensor(fmow.samples.judged_by)
    top, of = logits.topk(5).indices, torch.tensor(groups)[[*range(0, 30, 2), *range(1, 30, 2)]]
    right = top == label[:, None]
    by_group = [
        min(found[of == g].double().mean().item() for g in range(3))
        for found in (right[:, 0], right.any(1))
    ]
    scores = {task: each["score"] for task, each in record["datacomp"]["tasks"].items()}
    assert [scores["FMoW"], scores["Dollar Street"]] == by_group
    f1 = f1_score(label, top[:, 0], labels=label.unique(), average="macro")
    assert scores["iWildCam"] == pytest.approx(f1, abs=1e-12)
    assert (
        scores["Oxford-IIIT Pet"] == sets["wds_vtab-pets_test"]["metrics"]["mean_per_class_recall"]
    )
    flickr = sets["wds_flickr_1k_test_image_text_retrieval_test"]["metrics"]
    first = [flickr[f"{name}_retrieval_recall@1"] for name in ("text", "image")]
    assert scores["Flickr"] == sum(first) / 2 and scores["ImageNet 1k"] is None
    average = record["datacomp"]["averages"]["Average"]
    there = [score for score in scores.values() if score is not None]
    assert average == {
        "score": None,
        "mean_of_those_there": pytest.approx(np.mean(there)),
        "there": 5,
        "of": 38,
    }
    assert len(record["datacomp"]["missing"]) == 33
    for table in tables_of(record, "a model", "fp32", notes):
        show(table)
    said = capsys.readouterr().out
    assert re.search(r"WinoGAViL +jaccard_score_10-12 +– +is no set of tar shards", said)
    assert re.search(r"mean: VTAB +13 sets +– +1 of 13 sets are there, whose mean is 0\.", said)
    assert "5 of DataComp's 38 sets" in said and notes[0] in said and "precision fp32" in said


def test_averages_of_all_sets():
    scores = {task: n / 100 for n, task in enumerate(TASKS)}
    averages = averages_of(scores)
    assert averages["Average"] == (pytest.approx(37 / 200), 38, 38)
    assert {name: own[1:] for name, own in averages.items()} == {
        name: (len(tasks), len(tasks)) for name, tasks in AVERAGES.items()
    }
    assert [len(tasks) for tasks in AVERAGES.values()] == [1, 6, 13, 3, 38]
    assert averages["ImageNet"][0] == scores[task_of("wds_imagenet1k_test")]
    with pytest.raises(
        ValueError, match="cifar10 and wds_vtab-cifar10 are both DataComp's CIFAR-10"
    ):
        refuse_same_tasks(["wds_cifar10_test", "cifar10", "wds_vtab-cifar10"][1:])


def test_groups_that_are_not_there(embedder, tmp_path):
    of_classes(tmp_path / "wds_geode_test")
    with pytest.raises(ValueError, match="GeoDE by its name, .* in .npy, and these have none"):
        measured(embedder, tmp_path)


def accuracy(output, target, topk):
    """Its lines, which make a number of an array of one; new versions of numpy refuse that."""
    pred = output.topk(max(topk), 1, True, True)[1].t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    return [float(correct[:k].reshape(-1).float().sum()) / len(target) for k in topk]


@pytest.mark.parametrize("write", (of_classes, of_several, of_captions))
def test_by_the_package_itself(tmp_path, write, monkeypatch):
    """Its own reading and its own metrics of a model of OpenCLIP that was exported here."""
    pytest.importorskip("clip_benchmark", reason="pip install --no-deps clip_benchmark==1.6.2")
    open_clip = pytest.importorskip("open_clip")
    from clip_benchmark.datasets.builder import build_dataset
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval

    monkeypatch.setattr(zeroshot_classification, "accuracy", accuracy)
    towers = "timm:test_convnext", "open_clip:ViT-B-32:layers=2,width=64,heads=2"
    trained = trained_model(*towers, "infonce")
    disturb(trained)
    write_export(trained, tmp_path / "out", form="open_clip")
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}/out")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path}/out")
    root = write(tmp_path / "wds_set_test", 60)
    task = "zeroshot_retrieval" if write is of_captions else "zeroshot_classification"
    dataset = build_dataset("wds/set", str(root), transform, task=task)
    loader = torch.utils.data.DataLoader(dataset.batched(16), batch_size=None)
    of_task = (theirs.eval(), loader, tokenizer)
    if write is of_captions:
        more = {"recall_k_list": [1, 5, 10]}
        expected = zeroshot_retrieval.evaluate(*of_task, "cpu", amp=False, **more)
    else:
        words = (dataset.classes, dataset.templates, "cpu")
        expected = zeroshot_classification.evaluate(*of_task, *words, amp=False)
    ours = Embedder(open_model_folder(tmp_path / "out"), "cpu", 16, 0)
    own = measured(ours, root)[0]
    for name, value in expected.items():  # its figures are of float32
        found = own["metrics"][name]
        best = own["metrics_at_best"].get(name, found)
        assert found - 1e-7 <= value <= best + 1e-7, name
    assert 0 < min(expected.values()) < 1 and len(own["metrics_at_best"]) < len(expected)
