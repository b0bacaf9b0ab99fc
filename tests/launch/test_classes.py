"""Zero-shot classes as published figures have them: OpenCLIP's classifier, names and prompts."""

import argparse
import io
import json
import tarfile

import numpy as np
import pytest
import torch
from embedders import make_embedder
from PIL import Image

import evaluate
from data.index.sources import open_source
from data.prepared import HeldOut
from launch.inference.classes import benchmark_metrics, classification, made_of

open_clip = pytest.importorskip("open_clip", reason="class names and prompts are taken from it")


@pytest.fixture(scope="module")
def embedder():
    """With weights so large that texts and images differ."""
    made, draw = make_embedder(open_source("demo")), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in made.trained.layers:
            for parameter in layer.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    return made


@pytest.fixture
def imagenet(tmp_path, monkeypatch):
    """Six of ImageNet's folders, among them both that are called "missile", with three images
    each."""
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    wnids = ("n01440764", "n01443537", "n01484850", "n03773504", "n04008634", "n15075141")
    for folder, wnid in enumerate(wnids):
        (tmp_path / "val" / wnid).mkdir(parents=True)
        for i in range(3):
            draw = np.random.default_rng(3 * folder + i)
            image = Image.fromarray(draw.integers(0, 256, (32, 40, 3), dtype=np.uint8))
            image.save(tmp_path / "val" / wnid / f"{i}.JPEG")
    return tmp_path / "val"


class _Texts(list):
    def to(self, device):
        return self


class _AsOpenClip:
    """Our text tower with the one method that OpenCLIP's classifier calls."""

    def __init__(self, embedder):
        self.embedder = embedder

    def encode_text(self, texts, normalize):
        return self.embedder.texts(texts)


def test_imagenet_by_name(imagenet, embedder):
    """Folders get OpenAI's names and prompts; classes of the same name stay two."""
    source = open_source(f"imagefolder:{imagenet}?templates=openai")
    names = open_clip.IMAGENET_CLASSNAMES
    of_index = {0: 0, 3: 1, 6: 2, 9: 657, 12: 744, 15: 999}  # sample -> class of ImageNet
    for sample, number in of_index.items():
        expected = [template(names[number]) for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
        assert source.captions(sample) == expected and len(expected) == 80
    assert [source.label(i) for i in (0, 9, 12)] == ["n01440764", "n03773504", "n04008634"]
    values = classification(embedder, HeldOut(source, source.usable()), None)
    assert values["num_classes"] == 6 and names[657] == names[744] == "missile"
    classes = open_clip.build_zero_shot_classifier(
        _AsOpenClip(embedder),
        _Texts,
        [names[number] for number in of_index.values()],
        open_clip.OPENAI_IMAGENET_TEMPLATES,
    )
    classes[:, 4] = classes[:, 3]  # "missile" twice: the same prompts, rounding apart
    image = embedder.rows("image", source, source.usable()).embeds
    label = np.arange(18) // 3
    logits = (image @ classes).numpy()
    first = logits.argmax(1)
    assert values["zero_shot_top_1"] == pytest.approx((first == label).mean(), abs=1e-12)
    metrics = benchmark_metrics(values)
    assert metrics["acc1"] == metrics["mean_per_class_recall"] == values["zero_shot_top_1"]
    assert metrics["acc5"] == values["zero_shot_top_5"] < 1


def test_classes_of_tar_shards_are_those_of_folders(imagenet, embedder, tmp_path, capsys):
    """As CLIP_benchmark lays them out; its numbers keep classes of one name apart."""
    root = tmp_path / "wds"
    (root / "test").mkdir(parents=True)
    folders = sorted(imagenet.iterdir())
    with tarfile.open(root / "test" / "0.tar", "w") as tar:
        for n, image in enumerate(sorted(imagenet.glob("*/*"))):
            tar.add(image, f"s{n:07}.jpg")
            member = tarfile.TarInfo(f"s{n:07}.cls")
            content = str(folders.index(image.parent)).encode()
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    names = ["tench", "goldfish", "great white shark", "missile", "missile", "toilet paper"]
    (root / "classnames.txt").write_text("\n".join(names))
    templates = root / "zeroshot_classification_templates.txt"
    templates.write_text("a bad photo of a {c}.\na {c}.\n")
    (tmp_path / "names.json").write_text(json.dumps(dict(zip([f.name for f in folders], names))))
    own = open_source(f"webdataset:{root}/test/{{0..0}}.tar")
    theirs = open_source(
        f"imagefolder:{imagenet}?names={tmp_path}/names.json&templates={templates}"
    )
    values, expected = (
        classification(embedder, HeldOut(each, each.usable()), None) for each in (own, theirs)
    )
    assert values == pytest.approx(expected, abs=1e-6) and values["num_classes"] == 6
    assert made_of(own) == {"class_names": f"{root}/classnames.txt", "prompts": f"2 of {templates}"}
    arguments = argparse.Namespace(classify=own.spec, classify_train=None, imported="a model")
    found, _ = evaluate.of_classes(arguments, embedder, "model")
    assert found["metrics"]["acc1"] == values["zero_shot_top_1"]
    assert found["class_names"] == f"{root}/classnames.txt"
    said = "".join(capsys.readouterr().out.split())
    assert f"classnames:{root}/classnames.txt;promptsofaclass:2of{templates}" in said
    assert made_of(theirs)["prompts"] == f"2 of {templates}"
    assert made_of(open_source("demo")) is None


def test_names_and_templates_in_a_spec(imagenet, tmp_path):
    names = {folder.name: f"fish {i}" for i, folder in enumerate(sorted(imagenet.iterdir()))}
    (tmp_path / "names.json").write_text(json.dumps(names))
    for options, caption, number in (
        ("templates=simple", "itap of a tench.", 7),
        ("names=imagenet", "a photo of a tench", 5),
        ("classnames=imagenet&templates=a {} in the wild", "a tench in the wild", 1),
        (f"classnames={tmp_path}/names.json&templates=openai", "a bad photo of a fish 0.", 80),
    ):
        captions = open_source(f"imagefolder:{imagenet}?{options}").captions(0)
        assert captions[0] == caption and len(captions) == number
    (imagenet / "n00000001").mkdir()
    none = "1 of 7 folders are none of ImageNet's 1,000 .*n00000001"
    for options, error, message in (
        ("names=imagenet", ValueError, none),
        ("names=imagenet&classnames=imagenet", ValueError, "names and classnames are the same"),
        ("templates=opneai", FileNotFoundError, "sentences with {}; or openai, simple"),
    ):
        with pytest.raises(error, match=message):
            open_source(f"imagefolder:{imagenet}?{options}")
