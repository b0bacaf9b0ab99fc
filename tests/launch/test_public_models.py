"""evaluate.py on a public model, without a run: its numbers are those of the library's own model."""

import json
import sys

import numpy as np
import pytest
import torch
from exports import SIZE, TOKENS, sample_image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

import evaluate
from data.modalities.tokenizer import train_tokenizer

WORDS = ("apple", "bird", "snow", "river", "house", "stone", "glass", "train")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = "a public model"


@pytest.fixture(scope="module")
def place(module_folder):
    """A folder with a CLIP of random weights, and a data set of eight images in two classes, with
    a caption of their own each."""
    root = module_folder("public")
    torch.manual_seed(0)
    tokenizer = train_tokenizer([f"one {word} of a kind" for word in WORDS])
    tokenizer.eos_token, tokenizer.model_max_length = "[SEP]", TOKENS
    text = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **SIZES}
    text |= {"pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": TOKENS}
    image = {"patch_size": 16, "image_size": SIZE, **SIZES}
    config = CLIPConfig(text_config=text, vision_config=image, projection_dim=24)
    model = CLIPModel(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(root / MODEL)
    tokenizer.save_pretrained(root / MODEL)
    size = {"height": SIZE, "width": SIZE}
    CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=size).save_pretrained(root / MODEL)
    lines = []
    for i, word in enumerate(WORDS):
        path = root / "set" / ("odd" if i % 2 else "even") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        sample_image((SIZE, SIZE + i)).save(path)
        relative = str(path.relative_to(root))
        lines.append(json.dumps({"image_path": relative, "text": f"one {word}"}))
    (root / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return root


def run(place, monkeypatch, *arguments):
    """The numbers that evaluate.py writes."""
    monkeypatch.setenv("WYE_CACHE", str(place / "cache"))
    monkeypatch.chdir(place)
    output = place / "numbers.json"
    always = ["--device", "cpu", "--workers", "0", "--json", str(output)]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments), *always])
    evaluate.main(evaluate.parse())
    return json.loads(output.read_text())


def by_library(place):
    """[8, 8] similarities of images and captions."""
    from transformers import AutoTokenizer

    model = CLIPModel.from_pretrained(place / MODEL).eval()
    tokens = AutoTokenizer.from_pretrained(place / MODEL)(
        [f"one {word}" for word in WORDS], return_tensors="pt", padding=True
    )
    processor = CLIPImageProcessor.from_pretrained(place / MODEL)
    images = [sample_image((SIZE, SIZE + i)) for i in range(8)]
    with torch.no_grad():
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        ids = {key: tokens[key] for key in ("input_ids", "attention_mask")}
        return model(pixel_values=pixels, **ids).logits_per_image.numpy()


def test_retrieval_of_a_public_model(place, monkeypatch):
    values = run(place, monkeypatch, "--import", MODEL, "--val-data", "jsonl:pairs.jsonl")
    similarity = by_library(place)
    for scores, ours, theirs in (
        (similarity, "image_to_text", "text_retrieval"),
        (similarity.T, "text_to_image", "image_retrieval"),
    ):
        ranks = (scores >= np.diag(scores)[:, None]).sum(1) - 1
        for k in (1, 5):
            expected = pytest.approx(np.mean(ranks < k), abs=1e-12)
            assert values[f"validation/{ours}_R@{k}"] == expected
            assert values["metrics"][f"{theirs}_recall@{k}"] == expected
        assert 0 < np.mean(ranks < 5) < 1  # else nothing is told apart
    assert values["model"] == MODEL and values["task"] == "zeroshot_retrieval"


def test_classes_of_a_public_model_in_half_precision(place, monkeypatch):
    """bf16 runs in bf16: embeddings differ from those of fp32, and by no more than bf16 does."""
    spec = "imagefolder:set?templates=one {}"
    values = run(place, monkeypatch, "--import", MODEL, "--classify", spec, "--precision", "bf16")
    assert values["precision"] == "bf16" and values["num_classes"] == 2
    assert values["metrics"]["acc1"] == values["zero_shot_top_1"]
    assert values["metrics"]["acc5"] is None  # of fewer than five classes
    found = {}
    for precision in ("fp32", "bf16"):
        out = ("--embeddings", place / precision, "--precision", precision)
        run(place, monkeypatch, MODEL, "--val-data", "jsonl:pairs.jsonl", *out)
        found[precision] = np.load(place / precision / "image.npy")
    difference = np.abs(found["fp32"] - found["bf16"]).max()
    assert 1e-5 < difference < 0.05 and found["bf16"].dtype == np.float32


def test_each_language_is_compared_with_itself(place, monkeypatch):
    """Half of the captions are of another language: the other half is no candidate."""
    lines = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line["language"] = "en" if i < 4 else "de"
    (place / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = run(place, monkeypatch, MODEL, "--val-data", "jsonl:two.jsonl")
    similarity = by_library(place)
    for language, own in (("en", slice(0, 4)), ("de", slice(4, 8))):
        scores = similarity[own, own]
        ranks = (scores >= np.diag(scores)[:, None]).sum(1) - 1
        found = values["languages"]["validation"][language]
        assert found["num_samples"] == 4
        assert found["image_to_text_R@1"] == pytest.approx(np.mean(ranks < 1), abs=1e-12)
        assert found["image_to_text_R@5"] == 1 > values["validation/image_to_text_R@5"]
    columns = "".join(f"{line['image_path']},{line['text']},{line['language']}\n" for line in lines)
    (place / "two.csv").write_text("filepath,title,tongue\n" + columns)
    spec = "csv:two.csv?language=tongue"
    assert run(place, monkeypatch, MODEL, "--val-data", spec)["languages"] == values["languages"]


def test_karpathys_split_counts_any_caption_of_an_image(place, monkeypatch):
    """Image to text: any of its captions; text to image: each caption by itself."""
    images = [
        {
            "filepath": "odd" if i % 2 else "even",
            "filename": f"{i}.png",
            "cocoid": 100 + i,
            "split": "train" if i == 7 else "test",
            "sentences": [{"raw": f"one {word}"}, {"raw": f"{word} of a kind"}],
        }
        for i, word in enumerate(WORDS)
    ]
    (place / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    spec = f"karpathy:dataset_coco.json?split=test&root={place / 'set'}"
    values = run(place, monkeypatch, MODEL, "--val-data", spec, "--embeddings", place / "seven")
    assert values["captions"] == "all" and values["num_samples"] == {"validation": 7}
    image, text = (np.load(place / "seven" / f"{name}.npy") for name in ("image", "text"))
    scores = image @ text.T  # [7, 14]
    first_two = np.repeat(np.eye(7, dtype=bool), 2, axis=1)
    top = scores.argsort(1)[:, ::-1]
    for k in (1, 5):
        by_image = np.mean([first_two[i, top[i, :k]].any() for i in range(7)])
        best = (-scores.T).argsort(1)[:, :k]  # [14, k]
        by_text = np.mean([j // 2 in best[j] for j in range(14)])
        assert values["metrics"][f"text_retrieval_recall@{k}"] == pytest.approx(by_image)
        assert values["metrics"][f"image_retrieval_recall@{k}"] == pytest.approx(by_text)


def test_refusals(monkeypatch, capsys):
    for arguments, words in (
        ([], "give one model: RUN_DIR"),
        (["a run", "--import", MODEL], "give one model: RUN_DIR"),
        (["--import", MODEL], "a public model has no samples of its own"),
        (["--import", MODEL, "--val-data", "demo", "--ema"], "--ema is of a run's folder"),
        (["a run", "--device", "gpu"], "'gpu'; give cpu, cuda, cuda:N or auto"),
        (["a run", "--device", "cuda:99"], "cuda:99; this machine has"),
        (["a run", "--precision", "int8"], "invalid choice: 'int8'"),
    ):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
        with pytest.raises(SystemExit) as exit:
            evaluate.parse()
        assert exit.value.code == 2 and words in capsys.readouterr().err, arguments


def test_a_file_of_weights_is_no_public_model(place, monkeypatch):
    with pytest.raises(ValueError, match="is a file, which does not say what towers"):
        run(place, monkeypatch, "--import", f"{MODEL}/model.safetensors", "--val-data", "demo")
