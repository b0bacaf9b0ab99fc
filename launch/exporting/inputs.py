"""What prepares texts, images and sounds for an exported model, as the libraries write it: their own
loaders are to do by default what `modeling_export.py` does."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from transformers import AutoTokenizer, ClapProcessor, CLIPImageProcessor, PreTrainedTokenizerBase

from common.files import write_text
from data.modalities.preprocessing import Preprocessing
from data.modalities.tokenizer_open_clip import PREFIX, is_clips, text_config
from launch.exporting.loading import feature_extractor
from launch.inference.trained import Trained
from models.towers.layers import Tower

CLAP = "ClapModel"
THIS_FOLDER = "."  # a name is asked for, and read only where the model is not in a folder
PIPELINE_TOKENS = 64  # to which transformers' pipeline and processor pad the texts of SigLIP
WORDS_A_TEXT, MOST_TEXTS = 16, 200  # of those that two tokenizers are compared by


def reads_padding(text: Tower) -> bool:
    """Does the tower read texts of its full length, padding as any other token, as SigLIP does?"""
    return text.config["pool"] == "head"


def is_padded_otherwise(text: Tower, max_text_tokens: int) -> bool:
    """Do transformers' pipeline and processor pad texts to another length than the tower reads?"""
    return reads_padding(text) and max_text_tokens != PIPELINE_TOKENS


def write_inputs(trained: Trained, kind: str, beside: Path) -> None:
    """The tokenizer, and what prepares sounds and images, of a model of that `kind`."""
    towers = trained.by_branch
    tokenizer = exported_tokenizer(trained)
    tokenizer.save_pretrained(str(beside))
    if sounds := towers.get("audio"):
        extractor = feature_extractor(sounds)
        extractor.save_pretrained(beside / "audio")
        if kind == CLAP:  # in both files, for all versions of transformers
            extractor.save_pretrained(beside)
            ClapProcessor(extractor, tokenizer).save_pretrained(beside)
    # it cannot fill up what is too short; `pixel_values` of modeling_export.py does
    if towers.get("image") and trained.preprocessing.resize_mode != "longest":
        size = trained.options["image_size"]
        image_processor(trained.preprocessing, size).save_pretrained(beside)


def exported_tokenizer(trained: Trained) -> PreTrainedTokenizerBase:
    """The run's, whose files say what the text tower reads: a mask only where it hides padding, on
    which side padding is, and of which length texts are."""
    tokenizer = copy.deepcopy(trained.text_tokenizer)
    most = tokenizer.model_max_length = trained.options["max_text_tokens"]
    full_length = reads_padding(trained.by_branch["text"])
    # without a mask among its names, no library hides the padding that the tower reads
    names = ["input_ids"] if full_length else ["input_ids", "attention_mask"]
    # as in training, whatever its class does by itself; files are written from `init_kwargs`
    for name, value in {"model_input_names": names, "padding_side": "right"}.items():
        setattr(tokenizer, name, value)
        tokenizer.init_kwargs[name] = value
    if tokenizer.is_fast:  # for programs that read tokenizer.json alone
        backend = tokenizer.backend_tokenizer
        backend.enable_truncation(most)
        backend.no_padding()
        if full_length:
            pad = {"pad_id": tokenizer.pad_token_id, "pad_token": tokenizer.pad_token}
            backend.enable_padding(length=most, **pad)
    return tokenizer


def is_read_otherwise(tokenizer: PreTrainedTokenizerBase, model_type: str) -> bool:
    """Whether transformers makes other tokens of texts than `tokenizer` does, once it lies in the
    folder of a model of that type: for SigLIP 2 it takes a class of its own, whatever the files say
    (and fails where the vocabulary does not suit that)."""
    texts = list(_texts_of(tokenizer))
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        write_text(Path(folder) / "config.json", json.dumps({"model_type": model_type}))
        try:
            theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception:  # of many kinds; a library that cannot read it reads it otherwise
            return True
    found, expected = (each(texts, verbose=False)["input_ids"] for each in (theirs, tokenizer))
    return found != expected


def _texts_of(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Texts of its words, as they are and in capitals."""
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    for start in range(0, min(len(ids), WORDS_A_TEXT * MOST_TEXTS), WORDS_A_TEXT):
        text = tokenizer.decode(ids[start : start + WORDS_A_TEXT])
        yield text
        yield f"Two {text.title()}, 12 ½!"


def tokens_of_open_clip(trained: Trained) -> dict[str, object]:
    """What OpenCLIP's `text_cfg` says of the tokenizer, and `max_text_tokens`. Without any name of
    a tokenizer OpenCLIP has CLIP's; else it takes that of the folder of the model."""
    source = trained.options.get("tokenizer") or ""
    text = trained.by_branch["text"]
    named = {"hf_tokenizer_name": THIS_FOLDER}
    if source.startswith(PREFIX):  # as in the model that it came from
        texts = text_config(source.removeprefix(PREFIX))
        kept = ("hf_tokenizer_name", "tokenizer_kwargs")
        named = {key: texts[key] for key in kept if key in texts}
        if Path(named.get("hf_tokenizer_name", "")).is_absolute():
            named["hf_tokenizer_name"] = THIS_FOLDER
    elif text.config["library"] == "open_clip" and is_clips(trained.text_tokenizer):
        named = {}
    return {"max_text_tokens": trained.options["max_text_tokens"], **named}


def preprocess_cfg(preprocessing: Preprocessing) -> dict[str, object]:
    """OpenCLIP's."""
    if preprocessing.crop_pct != 1:
        raise ValueError(
            f"--format open_clip: OpenCLIP resizes images to the tower's input, and this model was "
            f"evaluated with {preprocessing.crop_pct:.3g} of what they were resized to "
            "(--image-resize); export a state dict"
        )
    return {
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "interpolation": preprocessing.interpolation,
        "resize_mode": preprocessing.resize_mode,
    }


def image_processor(preprocessing: Preprocessing, image_size: int) -> CLIPImageProcessor:
    """transformers' nearest to `data.modalities.transforms.EvalTransform`. Other are transparent
    images, grey ones of more than 8 bits, and those where the margin around the centre is odd."""
    resize = preprocessing.options(image_size)["image_resize"]
    squashed = preprocessing.resize_mode == "squash"
    return CLIPImageProcessor(
        size={"height": resize, "width": resize} if squashed else {"shortest_edge": resize},
        crop_size={"height": image_size, "width": image_size},
        resample=Image.Resampling[preprocessing.interpolation.upper()],
        image_mean=list(preprocessing.mean),
        image_std=list(preprocessing.std),
    )
