"""Run in a fresh process by `exports.embed_by_pages`, on exported folders: the code of each one's
page, and what the libraries make of it by their own defaults. Nothing of the project can be
imported."""

import os
import sys

import torch
from torch.nn import functional as F

# The scores of the libraries are those of the page to rounding: the same modules on the same
# inputs, in batches of other sizes.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def main(captions, root, *folders):
    sys.path[0] = ""  # the folder that is tried, and not the one of this file
    texts = captions.split("|")
    for folder in folders:
        os.chdir(folder)
        names = {}
        with open("page.py") as page:
            exec(page.read(), names)
        model = names["model"]
        assert type(names.get("library_model")) is type(model.whole), folder
        found = by_page(names, model, texts, root)
        torch.save(found, "result.pt")
        os.chdir(root)  # from here the folder is known by its path alone
        if "tokenizer" in names:
            by_open_clip(names, found, texts, root)
        elif "library_model" in names and "PeftModel" not in names:
            by_transformers(names, folder, texts, root)
        if "clips" in names:
            by_clips(names)


def by_page(names, model, texts, root):
    found = {}
    if model.record["images"]:
        pixels = torch.stack([model.pixel_values(f"{root}/{i}.image") for i in range(7)])
        found["pixel_values"], found["image_embeds"] = pixels, model.embed_images(pixels)
    if model.record["sounds"]:
        found["input_features"] = model.input_features(f"{root}/sound.wav")[None]
        found["audio_embeds"] = model.embed_sounds(found["input_features"])
    found["text_embeds"] = model.embed_texts(texts)
    if "clips" in names:
        found |= {name: names[name] for name in ("frames", "video_embeds")}
    return found


@torch.no_grad()
def by_open_clip(names, found, texts, root):
    """Beside OpenCLIP no code of the folder is needed."""
    from PIL import Image

    library = names["library_model"]
    image = library.encode_image(found["pixel_values"], normalize=True)
    text = library.encode_text(names["tokenizer"](texts), normalize=True)
    assert torch.equal(image, found["image_embeds"]) and torch.equal(text, found["text_embeds"])
    pixels = names["preprocess"](Image.open(f"{root}/0.image"))
    torch.testing.assert_close(pixels, found["pixel_values"][0], rtol=1e-5, atol=1e-5)
    found["logit_scale"] = library.logit_scale.data.view(1)
    if library.logit_bias is not None:
        found["logit_bias"] = library.logit_bias.data.view(1)
    torch.save(found, names["model"].folder / "result.pt")


def by_transformers(names, folder, texts, root):
    """The snippet of the page; and where the library's own classes prepare what the model reads,
    AutoModel on what AutoProcessor makes, and the pipeline."""
    from transformers import AutoModel, AutoProcessor, AutoTokenizer

    model, here = names["model"], os.getcwd()
    os.chdir(folder)  # where the page has its files
    one = {"text": model.embed_texts(["a red apple"])}
    if "image" in names:
        one["image"] = model.embed_images(model.pixel_values("apple.jpg")[None])
    if "audio" in names:
        one["audio"] = model.embed_sounds(model.input_features("apple.wav")[None])
    if "classify" in names:
        by_pipeline(names, one)
    os.chdir(here)
    assert len(one) == 2, folder
    for modality, embeds in one.items():
        theirs = F.normalize(names[modality].pooler_output, dim=-1)
        same_rows(theirs, embeds)
    how = model.record["texts"]
    padding = {key: value for key, value in how["padding"].items() if key == "padding"}
    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, truncation=True, return_tensors="pt", **padding
    )
    assert set(tokens) == {"input_ids", *(["attention_mask"] if how["masked"] else [])}
    library = AutoModel.from_pretrained(folder)
    assert library.dtype == torch.float32
    with torch.no_grad():
        output = library.get_text_features(**tokens)
    output = F.normalize(getattr(output, "pooler_output", output), dim=-1)
    same_rows(output, model.embed_texts(texts))
    if model.record["images"] and not model.record["images"]["patch_size"]:
        by_processor(AutoProcessor.from_pretrained(folder), library, model, texts, root, padding)


@torch.no_grad()
def by_processor(processor, library, model, texts, root, padding):
    from PIL import Image

    # of the size to which all are resized, in which libraries round otherwise
    side = model.options["image_resize"]
    image = Image.open(f"{root}/0.image").resize((side, side))
    # else transformers' SigLIP 2 pads to a length of its own
    given = {"truncation": True, "return_tensors": "pt", **padding}
    logits = library(**processor(text=texts, images=image, **given)).logits_per_image
    torch.testing.assert_close(logits, expected_logits(library, model, image, texts), **CLOSE)


def expected_logits(library, model, image, texts):
    """[1, T] by the code of the folder and the scalars of the library's model."""
    images = model.embed_images(model.prepared(image)[None])
    logits = images @ model.embed_texts(texts).T * library.logit_scale.exp()
    return logits + getattr(library, "logit_bias", torch.zeros(1))


@torch.no_grad()
def by_pipeline(names, one):
    library, scores = names["library_model"], names["scores"]
    labels = [each["label"] for each in scores]
    logits = one["image"] @ names["model"].embed_texts(labels).T * library.logit_scale.exp()
    sigmoid = hasattr(library, "logit_bias")
    expected = (logits + library.logit_bias).sigmoid() if sigmoid else logits.softmax(-1)
    theirs = torch.tensor([[each["score"] for each in scores]])
    torch.testing.assert_close(theirs, expected, **CLOSE)


def by_clips(names):
    """The clip by the library alone is that of the folder's code."""
    if "video" in names:
        same_rows(names["video"], names["video_embeds"])


def same_rows(found, expected):
    """By the norm of a row, 1: as tests/rounding.py, which cannot be imported in this process."""
    assert float((found - expected).norm(dim=-1).max()) <= 1e-5


if __name__ == "__main__":
    main(*sys.argv[1:])
