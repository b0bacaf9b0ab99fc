"""Exports as the libraries' own defaults load them: moved to another folder, in a fresh process,
without the project."""

import json
import sys
from pathlib import Path

import pytest
import torch
from exports import (
    CAPTIONS,
    SIZE,
    SIZES,
    TOKENS,
    assert_same,
    embed_by_pages,
    embeddings,
    started_from,
    texts,
)
from PIL import Image
from rounding import assert_equal_rows
from transformers import AutoTokenizer, CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from data.decoding.films import FilmReader, even_times
from data.modalities.preprocessing import NORMALIZATIONS, Preprocessing
from data.modalities.tokenizer import load_tokenizer, train_tokenizer
from data.modalities.transforms import EvalTransform, normalise, stacked
from launch.config.options import parse_options
from launch.exporting.inputs import image_processor, is_read_otherwise
from launch.exporting.writing import write_export
from launch.inference.trained import Trained, open_model_folder, with_named_towers
from launch.setup.model import RunModel

pytest.importorskip("av", reason="clips are decoded by PyAV")
sys.path.append(str(Path(__file__).parents[1] / "data"))
from bad_films import film  # noqa: E402

PIXELS = Preprocessing(*NORMALIZATIONS["half"])
IMAGES = {**SIZES, "patch_size": 16, "image_size": SIZE}
FRAMES, RATE, SECONDS = 4, 30, 2


def published(folder, sigmoid, length, side="right"):
    """A model of transformers in `folder`, with texts of `length` tokens, whose tokenizer pads on
    that side by itself."""
    torch.manual_seed(3)
    tokenizer = train_tokenizer(CAPTIONS)
    tokenizer.eos_token = "[SEP]"
    text = texts(tokenizer, max_position_embeddings=length)
    if sigmoid:
        text["projection_size"] = 32
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=IMAGES))
    else:
        sizes = {"text_config": text, "vision_config": IMAGES, "projection_dim": 24}
        model = CLIPModel(CLIPConfig(**sizes))
    for parameter in model.parameters():  # no bias is zero
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    tokenizer.model_max_length, tokenizer.padding_side = length, side
    tokenizer.init_kwargs["padding_side"] = side
    tokenizer.save_pretrained(folder)
    image_processor(PIXELS, SIZE).save_pretrained(folder)
    return open_model_folder(folder)


def of_clips(folder):
    """A model of clips and texts that begins as the model of images in `folder`."""
    flags = ["--pairs", "video:text", "--video-frames", str(FRAMES)]
    options = with_named_towers(started_from(folder, *flags), None)
    tokenizer = load_tokenizer(options.tokenizer)
    model = RunModel.of(options, tokenizer)
    layers = [model.build_layer(spec).eval() for specs in model.layers.values() for spec in specs]
    found = {key: value for key, value in vars(options).items() if key not in ("data", "sources")}
    return Trained({"options": found}, folder / "step-00000003", 3, tokenizer, model.towers, layers)


@pytest.fixture(scope="module")
def exports(module_folder):
    """name -> (the model, its export, what a fresh process made by the export's page)."""
    root = module_folder("exports")
    models = {
        "SigLIP": (published(root / "siglip", True, 64, "left"), "auto"),
        "SigLIP, short texts": (published(root / "short", True, TOKENS), "auto"),
        "CLIP": (published(root / "clip", False, TOKENS), "auto"),
        "SigLIP's towers": (open_model_folder(root / "siglip"), "state_dict"),
        "clips": (of_clips(root / "clip"), "auto"),
        "clips' towers": (of_clips(root / "clip"), "state_dict"),
    }
    outs = [root / f"out {number}" for number in range(len(models))]
    for (trained, form), out in zip(models.values(), outs):
        write_export(trained, out, form=form)
    seen = film(number=RATE * SECONDS, rate=RATE, rotation=90)
    found = embed_by_pages(root, outs, film=seen)
    pairs = zip(models.items(), outs, found)
    return seen, {name: (trained, out, own) for (name, (trained, _)), out, own in pairs}


def test_the_libraries_score_as_evaluation_does(exports, subtests):
    """The fresh process compares AutoModel, AutoProcessor and the pipeline with the page's code."""
    for name, (trained, _, found) in exports[1].items():
        with subtests.test(name):
            if "clips" not in name:
                assert_same(trained, found)


def test_the_tokenizer_names_what_the_tower_reads(exports, subtests):
    """A mask where it hides padding, and none where padding is read."""
    for name, (trained, out, _) in exports[1].items():
        reads_padding = "SigLIP" in name
        with subtests.test(name):
            written = json.loads((out / "tokenizer_config.json").read_text())
            names = ["input_ids"] if reads_padding else ["input_ids", "attention_mask"]
            assert written["model_input_names"] == names
            tokenizer = AutoTokenizer.from_pretrained(out)
            most = trained.options["max_text_tokens"]
            given = {"padding": "max_length", "truncation": True}  # the length is the files'
            assert set(tokenizer(CAPTIONS, **given)) == set(names)
            assert {len(ids) for ids in tokenizer(CAPTIONS, **given)["input_ids"]} == {most}
            in_file = json.loads((out / "tokenizer.json").read_text())
            assert in_file["truncation"]["max_length"] == most
            assert (in_file["padding"] is not None) == reads_padding
            page = (out / "README.md").read_text()
            assert ("pad the texts of SigLIP to 64" in page) == (name == "SigLIP, short texts")
            assert parse_options(["--import", str(out)]).max_text_tokens == most


def test_a_page_embeds_a_film_as_evaluation_does(exports, subtests):
    """Its frames, from the middles of equal parts, upright; and the mean of their features."""
    seen, made = exports
    with FilmReader() as reader:
        frames = reader.frames(seen, even_times(0, SECONDS, FRAMES))
    row = torch.zeros(FRAMES, dtype=torch.int64)
    for name in ("clips", "clips' towers"):
        trained, out, found = made[name]
        with subtests.test(name):
            transform = EvalTransform((SIZE, SIZE), PIXELS)
            images = [Image.fromarray(frame.transpose(1, 2, 0)) for frame in frames]
            stored = [transform(transform.stored.of(image)) for image in images]
            pixels = normalise(stacked(stored), preprocessing=PIXELS)
            # fp32 at values of about 1
            torch.testing.assert_close(found["frames"], pixels, rtol=1e-5, atol=1e-5)
            given = {"video_frames": pixels, "video_row": row, "video_time": row}
            expected = embeddings(trained.layers_of("video"), given)["video_embeds"]
            assert_equal_rows(found["video_embeds"], expected)
            assert (
                "library_model.get_image_features(frames)" in (out / "README.md").read_text()
            ) == ("towers" not in name)


def test_a_tokenizer_that_the_library_replaces_is_found():
    """SigLIP 2's models have a tokenizer of their own in transformers, whatever the files say."""
    tokenizer = train_tokenizer(CAPTIONS)
    assert [is_read_otherwise(tokenizer, kind) for kind in ("siglip2", "siglip")] == [True, False]
