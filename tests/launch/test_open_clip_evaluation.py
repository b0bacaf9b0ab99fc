"""OpenCLIP's own evaluation of an exported model, on the embedded data, gives the numbers of
evaluate.py."""

import io
from types import SimpleNamespace

import open_clip
import pytest
import torch
from exports import trained_model
from PIL import Image

from data.index.sources import open_source
from data.prepared import HeldOut
from launch.exporting.writing import write_export
from launch.inference.classes import classification
from launch.inference.embedding import Embedder
from launch.inference.evaluation import retrieval
from launch.inference.trained import open_model_folder

SAMPLES, BATCH = 120, 32
TOWERS = "timm:test_convnext", "open_clip:ViT-B-32:layers=2,width=64,heads=2"
TEMPLATES = ("a photo of a {}", "one {}, seen from near")


def white(data):
    """As an image on a page: OpenCLIP's transform reads no transparency."""
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    page = Image.new("RGB", image.size, "white")
    page.paste(image, mask=image.getchannel("A"))
    return page


@pytest.fixture(scope="module")
def model(module_folder):
    """(ours, OpenCLIP's, its transform, its tokenizer): of towers that have not learned, whose
    similarities lie close together, so that ranks turn with the last digits."""
    folder = module_folder("model") / "out"
    write_export(trained_model(*TOWERS, "infonce"), folder, form="open_clip")
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    return open_model_folder(folder), theirs.eval(), transform, tokenizer


def embedder(trained):
    return Embedder(trained, "cpu", BATCH, 0)


def images(source, subset, transform):
    return torch.stack([transform(white(source.value("image", i))) for i in subset])


def test_retrieval(model):
    """`get_clip_metrics` of its trainer. Samples are of different names: where captions are equal,
    OpenCLIP's order of them is that of a sort."""
    metrics = pytest.importorskip("open_clip_train.train").get_clip_metrics
    trained, theirs, transform, tokenizer = model
    source = open_source("demo:en")
    first = {source.captions(i)[0]: i for i in reversed(source.usable().tolist())}
    subset = sorted(first.values())[::9][:SAMPLES]
    found = retrieval(embedder(trained).embedded(source, torch.tensor(subset).numpy()))
    captions = [source.captions(i)[0] for i in subset]
    with torch.no_grad():
        image = theirs.encode_image(images(source, subset, transform), normalize=True)
        text = theirs.encode_text(tokenizer(captions), normalize=True)
    expected = metrics(image, text, theirs.logit_scale.exp())
    for direction in ("image_to_text", "text_to_image"):
        for k in (1, 5, 10):
            assert found[f"{direction}_R@{k}"] == expected[f"{direction}_R@{k}"]
        # OpenCLIP rounds the mean of the middle two down
        assert int(found[f"{direction}_median_rank"]) == expected[f"{direction}_median_rank"]
    assert 0 < expected["image_to_text_R@10"] < 1


def accuracy(output, target, topk):
    """OpenCLIP's lines, which make a number of an array of one; new versions of numpy refuse that."""
    found = output.topk(max(topk), 1, True, True)[1].t()
    right = found.eq(target.view(1, -1).expand_as(found))
    return [float(right[:k].reshape(-1).float().sum()) for k in topk]


def test_zero_shot_classification(model, tmp_path, monkeypatch):
    """`build_zero_shot_classifier` and the zero-shot run of its trainer, with classes of emoji: the
    first words of their names."""
    zero_shot = pytest.importorskip("open_clip_train.zero_shot")
    monkeypatch.setattr(zero_shot, "accuracy", accuracy)
    trained, theirs, transform, tokenizer = model
    demo, folder = open_source("demo:en"), tmp_path / "classes"
    for i in demo.usable().tolist()[::7][: 2 * SAMPLES]:
        words = "".join(c if c.isalpha() else " " for c in demo.captions(i)[0]).split()
        (folder / words[0]).mkdir(parents=True, exist_ok=True)
        white(demo.value("image", i)).resize((150, 110)).save(folder / words[0] / f"{i}.png")
    (tmp_path / "templates.txt").write_text("\n".join(TEMPLATES))
    source = open_source(f"imagefolder:{folder}?templates={tmp_path / 'templates.txt'}")
    found = classification(embedder(trained), HeldOut(source, source.usable()), None)
    names = sorted(path.name for path in folder.iterdir())
    classifier = open_clip.build_zero_shot_classifier(theirs, tokenizer, names, list(TEMPLATES))
    files = [(name, file) for name in names for file in sorted((folder / name).iterdir())]
    pixels = torch.stack([transform(Image.open(file)) for _, file in files])
    labels = torch.tensor([names.index(name) for name, _ in files])
    arguments = SimpleNamespace(device="cpu", precision="fp32", batch_size=BATCH)
    loader = list(zip(pixels.split(BATCH), labels.split(BATCH)))
    top_1, top_5 = zero_shot.run(theirs, classifier, loader, arguments)
    assert (found["zero_shot_top_1"], found["zero_shot_top_5"]) == (top_1, top_5)
    assert 0 < top_5 < 1 and found["num_samples"] == len(files)
