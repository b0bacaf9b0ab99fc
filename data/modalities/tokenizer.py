"""Text -> token numbers: a tokenizer of transformers, loaded or trained on the captions at hand.

B: texts in the micro-batch, L: tokens of its longest text, rounded up.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from common.files import replacing_folder
from common.model_sizes import read_model_config
from common.output import brief
from data.modalities.tokenizer_open_clip import PREFIX, open_clip_tokenizer
from data.processes import ending_after

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in this order: [PAD] is 0
CONTINUES = "##"
# the files of a repository that a tokenizer is made of
HUB_FILES = "config.json tokenizer* special_tokens_map.json added_tokens.json vocab* merges.txt"
HUB_FILES += " *.model chat_template*"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")  # one of them, in a folder
TOKENIZE_LIMIT_S = 60.0  # of one call, for up to 1,000 texts; usual ones take a tenth of a second
# sides of half-precision products that tensor cores take without padding of their own
TENSOR_CORE_MULTIPLE = 8


def load_tokenizer(where: str) -> PreTrainedTokenizerBase:
    """The tokenizer at `where`: a local folder, a Hugging Face id, or `open_clip:MODEL`, the one of
    a model of OpenCLIP. Errors: ValueError, FileNotFoundError."""
    folder = Path(where)
    if not folder.is_dir() and (folder.is_absolute() or where.startswith((".", "~"))):
        raise FileNotFoundError(
            f"tokenizer '{where}': no such folder; give a folder with tokenizer.json, or a Hugging "
            "Face id"
        )
    refuse_no_vocabulary(where)
    if (folder / "config.json").is_file():
        read_model_config(
            folder / "config.json"
        )  # which transformers reads for the kind of tokenizer
    try:
        if where.startswith(PREFIX):
            tokenizer = open_clip_tokenizer(where)
        else:
            # asks the hub once; AutoTokenizer asks for each file, and waits a minute for a network
            place = (
                where
                if folder.is_dir()
                else snapshot_download(where, allow_patterns=HUB_FILES.split())
            )
            tokenizer = AutoTokenizer.from_pretrained(place, use_fast=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, TypeError and plain ones among them
        what = "is no folder here and cannot be had from the hub"
        if folder.is_dir():
            what = "holds no tokenizer that transformers can load"
        raise ValueError(
            f"tokenizer '{where}' {what}; give a folder with tokenizer.json, or a Hugging Face id "
            f"({error})"
        ) from error
    # A vocabulary of another type is passed over too. What transformers then makes up has special
    # tokens, and at most the mark that begins a word.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise _no_vocabulary(where)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"tokenizer '{where}' has neither a padding nor an end token; add \"pad_token\" to "
                "its tokenizer_config.json"
            )
        # as GPT-2 is commonly padded; attention_mask hides it
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_tokenizer(
    captions: Iterable[str], save_to: Path | None = None, vocab_size: int = 8192
) -> PreTrainedTokenizerFast:
    """A WordPiece trained on `captions`: a pure function of them and `vocab_size` (the most entries
    it may have; every character seen is always one). It is written to the folder `save_to`, which
    `load_tokenizer` reads again. Errors: ValueError."""
    captions = list(captions)
    # Accents stay: BERT's stripping would also take apart Hangul, kana with voicing marks and
    # Arabic vowel signs. NFC first, so that composed and decomposed spellings are one.
    normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.BertNormalizer(lowercase=True, strip_accents=False)]
    )
    splitter = pre_tokenizers.BertPreTokenizer()
    words = {
        word
        for text in set(captions)
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
    }
    if not words:
        raise ValueError(
            f"cannot train a tokenizer: {len(captions)} captions hold no word; give captions, or a "
            "tokenizer"
        )
    # The trainer numbers characters in the order of a hash map and breaks ties by number, so two
    # runs would differ. Declared beforehand they have fixed numbers, and training is deterministic.
    starts = sorted({char for word in words for char in word})
    continuations = sorted({CONTINUES + char for word in words for char in word[1:]})
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizer, splitter
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *starts, *continuations],
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )
    raw.train_from_iterator(captions, trainer)
    # a fresh one on the trained vocabulary, in which only the five BERT tokens are special
    vocabulary = raw.get_vocab()
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", continuing_subword_prefix=CONTINUES)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, SPECIAL_TOKENS)))
    if save_to is not None:
        with replacing_folder(save_to) as beside:
            made.save_pretrained(str(beside))
    return made


def has_vocabulary(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's vocabulary, in one of transformers' forms."""
    return any(any(folder.glob(name)) for name in VOCABULARIES)


def refuse_no_vocabulary(where: str) -> None:
    """Raise ValueError for a folder without a vocabulary, of which transformers 5 would make up a
    tokenizer by the type in its config.json (transformers#18570)."""
    if Path(where).is_dir() and not has_vocabulary(Path(where)):
        raise _no_vocabulary(where)


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of rows of an embedding table: the highest id + 1. Vocabularies may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def refuse_unknown_words(
    where: str, tokenizer: PreTrainedTokenizerBase, captions: Iterable[str]
) -> None:
    """Raise ValueError where the tokenizer at `where` makes the same tokens of all captions, though
    these differ: it knows none of their words, so no tower could tell them apart."""
    texts = list(dict.fromkeys(captions))
    if len(texts) < 2:
        return
    special = set(tokenizer.all_special_ids)  # the one for unknown words is among them
    encoded = tokenized(tokenizer, texts, add_special_tokens=False, verbose=False)["input_ids"]
    if len({tuple(t for t in tokens if t not in special) for tokens in encoded}) == 1:
        raise ValueError(
            f"tokenizer '{where}' makes the same tokens of {len(texts):,} different captions, such "
            f"as {texts[0]!r} and {texts[1]!r}: it does not know their words. Give --tokenizer and "
            "text weights of their language"
        )


def length_multiple(device_type: str) -> int:
    """The multiple to which the length of a micro-batch's texts is rounded up: 8 on a GPU, where
    odd sizes are slower than some padding; 1 on a CPU."""
    return TENSOR_CORE_MULTIPLE if device_type == "cuda" else 1


def batch_tokens(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_text_tokens: int,
    multiple: int = 1,
) -> tuple[dict[str, torch.Tensor], int]:
    """(`input_ids` and `attention_mask` (1 = keep), both int64 [B, L]; how many texts were cut).

    Texts are cut at `max_text_tokens` tokens, the special ones included. L is the longest of them,
    rounded up to a multiple of `multiple`, but at most `max_text_tokens`. Padding is on the right.
    A text of no tokens (an empty one, where the tokenizer adds no special tokens) keeps one token
    of padding, because a tower cannot pool over nothing.
    """
    encoded = _cut(tokenizer, texts, max_text_tokens)
    rows = [tokens or [tokenizer.pad_token_id] for tokens in encoded["input_ids"]]
    lengths = np.fromiter(map(len, rows), np.int64, len(texts))  # [B]
    length = min(-(-int(lengths.max()) // multiple) * multiple, max_text_tokens)
    kept = np.arange(length) < lengths[:, None]  # [B, L]
    input_ids = np.full(kept.shape, tokenizer.pad_token_id, np.int64)
    # row by row, as `kept` counts
    input_ids[kept] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    tensors = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(kept.astype(np.int64)),
    }
    full = np.flatnonzero(lengths == max_text_tokens)  # only these can have been cut
    return tensors, sum(_is_cut(tokenizer, encoded, int(row), texts) for row in full)


def token_lengths(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_text_tokens: int
) -> list[int]:
    """The number of tokens that `batch_tokens` makes of each text."""
    return [max(1, len(t)) for t in _cut(tokenizer, texts, max_text_tokens)["input_ids"]]


def _cut(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_text_tokens: int
) -> BatchEncoding:
    options = {"padding": False, "return_attention_mask": False, "max_length": max_text_tokens}
    return tokenized(tokenizer, texts, truncation=True, **options)


def tokenized(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any
) -> BatchEncoding:
    """Call the tokenizer. Errors: ValueError, which names the tokenizer, where one of its patterns
    gives up on a text. Where it takes over `TOKENIZE_LIMIT_S` of processor time, the
    process ends with the same message: nothing else ends the call."""

    def says(what: str) -> str:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        return (
            f"tokenizer '{name}' {what} {len(texts):,} texts, such as {brief(texts[0])}: a pattern "
            "in its tokenizer.json goes back over them again and again; give another --tokenizer"
        )

    slow = f"takes over {TOKENIZE_LIMIT_S:g} seconds of processor time for"
    try:
        with ending_after(TOKENIZE_LIMIT_S, lambda: says(slow)):
            return tokenizer(list(texts), **options)
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # of Rust, and no Exception
            raise ValueError(says(f"gives up ({error}) on")) from error
        raise


def _is_cut(
    tokenizer: PreTrainedTokenizerBase, encoded: BatchEncoding, row: int, texts: Sequence[str]
) -> bool:
    if encoded.encodings is not None:  # a fast tokenizer keeps what it cut off
        return bool(encoded.encodings[row].overflowing)
    return len(tokenized(tokenizer, [texts[row]])["input_ids"][0]) > len(encoded["input_ids"][row])


def _no_vocabulary(where: str) -> ValueError:
    return ValueError(
        f"tokenizer '{where}' has no vocabulary that its type can read "
        f"({', '.join(VOCABULARIES)}), so it would make the same tokens of all texts. Copy the "
        "model's tokenizer there, or give train.py --tokenizer, a folder with tokenizer.json or a "
        "Hugging Face id"
    )
