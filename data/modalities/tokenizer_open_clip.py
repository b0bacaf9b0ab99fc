"""OpenCLIP's tokenizers as tokenizers of transformers: `open_clip:MODEL` and `open_clip:FOLDER`.

A model whose configuration names a tokenizer of the Hugging Face hub has that one, from its folder
where there is one. All others have CLIP's own, which is made of the vocabulary inside of OpenCLIP's
package and needs no network. What OpenCLIP does to a text before (`clean` in the configuration)
becomes the tokenizer's normalizer, but for ftfy's repair of broken encodings and HTML entities, which
`repaired` is.
"""

from __future__ import annotations

import html
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerBase

from common.files import read_json
from common.output import brief

PREFIX, CONFIG = "open_clip:", "open_clip_config.json"
START, END = "<|startoftext|>", "<|endoftext|>"  # as transformers spells CLIP's two special tokens


def open_clip_tokenizer(where: str) -> PreTrainedTokenizerBase:
    """`where` begins with `PREFIX`. Errors: ImportError, ValueError for a model that OpenCLIP does
    not have and for what is not built, OSError where transformers finds no tokenizer."""
    model = where.removeprefix(PREFIX)
    folder = Path(model).expanduser()
    texts = text_config(model)
    if not texts.get("hf_tokenizer_name"):
        return clip_tokenizer()
    options = texts.get("tokenizer_kwargs") or {}
    unknown = sorted(set(options) - {"clean"}) or texts.get("tokenizer_mode")
    if unknown:
        raise ValueError(
            f"tokenizer {where!r}: its configuration asks for {unknown}, which is not built; give "
            "--tokenizer, a tokenizer of transformers that makes the same tokens"
        )
    source = str(folder) if folder.is_dir() else texts["hf_tokenizer_name"]
    tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False)
    tokenizer.padding_side = "right"
    cleaned = _normalizers(options.get("clean", "whitespace"))
    own = tokenizer.backend_tokenizer.normalizer
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [*cleaned, *([own] if own is not None else [])]
    )
    return tokenizer


def repaired(text: str) -> str:
    """A text as all tokenizers of OpenCLIP read it (`basic_clean` of its tokenizer.py): encodings,
    curled quotes and HTML entities repaired. Errors: ImportError where that may change it and ftfy
    is not installed."""
    if text.isascii() and text.isprintable() and "&" not in text:
        return text.strip()
    try:
        from ftfy import fix_text
    except ImportError as error:
        raise ImportError(
            f"the text {brief(text)} is read by OpenCLIP's tokenizers as the package ftfy repairs it; "
            "install it with pip install -r requirements-models.txt"
        ) from error
    # twice, as there: &amp;amp; is &
    return html.unescape(html.unescape(fix_text(text))).strip()


def text_config(model: str) -> dict[str, Any]:
    """The `text_cfg` of a model of OpenCLIP, or of one in a folder. Errors: as above."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        config = read_json(folder / CONFIG)
        return config.get("model_cfg", config)["text_cfg"]
    config = _library().get_model_config(model)
    if config is None:
        raise ValueError(
            f"tokenizer {PREFIX + model!r}: OpenCLIP has no such model; open_clip.list_models() "
            "lists them"
        )
    return config["text_cfg"]


def clip_tokenizer() -> PreTrainedTokenizerBase:
    """CLIP's, of OpenCLIP's `SimpleTokenizer`. It pads with the token that ends a text."""
    vocabulary, merges = clip_vocabulary()
    return CLIPTokenizer(
        vocab=dict(vocabulary),
        merges=merges,
        unk_token=END,
        bos_token=START,
        eos_token=END,
        pad_token=END,
    )


def clip_vocabulary() -> tuple[Mapping[str, int], list[tuple[str, str]]]:
    """(token -> number, the pairs that are joined, in order)."""
    simple = _library().SimpleTokenizer()
    names = {simple.sot_token_id: START, simple.eot_token_id: END}
    vocabulary = {names.get(number, token): number for token, number in simple.encoder.items()}
    return vocabulary, sorted(simple.bpe_ranks, key=simple.bpe_ranks.__getitem__)


def is_clips(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer makes CLIP's tokens."""
    return tokenizer.get_vocab() == dict(clip_vocabulary()[0])


def _normalizers(clean: str) -> list[normalizers.Normalizer]:
    """The normalizers that do what OpenCLIP's `get_clean_fn` does."""
    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    if clean == "whitespace":
        return spaces
    if clean == "lower":
        return [*spaces, normalizers.Lowercase()]
    if clean == "canonicalize":
        signs = "".join("\\" + sign for sign in string.punctuation)
        return [
            normalizers.Replace("_", " "),
            normalizers.Replace(Regex(f"[{signs}]"), ""),
            normalizers.Lowercase(),
            *spaces,
        ]
    raise ValueError(f"tokenizer: OpenCLIP's clean={clean!r} is not known")


def _library():
    try:
        import open_clip
    except ImportError as error:
        raise ImportError(
            "tokenizers open_clip:MODEL need the package open_clip_torch; install it with "
            "pip install -r requirements-models.txt"
        ) from error
    return open_clip
