"""Tokenizers: trained, saved, loaded; padding and cutting."""

import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.modalities.tokenizer import (
    batch_tokens,
    length_multiple,
    load_tokenizer,
    num_ids,
    train_tokenizer,
)

TRAIN = """
import hashlib
from data.index.sources import open_source
from data.modalities.tokenizer import train_tokenizer
demo = open_source("demo:en+ko")
captions = [text for i in range(len(demo)) for text in demo.captions(i)]
print(hashlib.sha256(train_tokenizer(captions, vocab_size=1800).backend_tokenizer.to_str().encode()).hexdigest())
"""


@pytest.mark.all("starts processes that import anew")
def test_training_is_the_same_in_every_process():
    # In processes: the trainer's hash maps are seeded per process.
    runs = [
        subprocess.run(
            [sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True, timeout=300
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] != ""


def test_special_tokens_and_bert_layout(tokenizer):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(special) == list(range(5))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("Woman ARTIST").input_ids)
    assert tokens == ["[CLS]", "woman", "artist", "[SEP]"]
    assert len(tokenizer.all_special_tokens) == 5
    assert not tokenizer.get_added_vocab().keys() - set(tokenizer.all_special_tokens)
    islands = tokenizer("åland islands").input_ids
    assert tokenizer.decode(islands, skip_special_tokens=True) == "åland islands"
    tokens = tokenizer.tokenize("womanly")  # subwords cover words never seen
    assert "[UNK]" not in tokens and len(tokens) > 1


def test_scripts_are_not_taken_apart():
    tokenizer = train_tokenizer(["여자 예술가", "がくせい", "زنِ هنرمند"] * 5)
    assert tokenizer.tokenize("여자") == ["여자"]
    assert tokenizer.tokenize("がくせい") == ["がくせい"]
    assert "[UNK]" not in tokenizer.tokenize("زنِ هنرمند")
    # the voicing mark as a character of its own
    assert tokenizer.tokenize("\u304b\u3099くせい") == ["がくせい"]


def test_saved_folder_loads_again(tokenizer, tmp_path, demo):
    folder = tmp_path / "a tokenizer"
    trained = train_tokenizer([demo.captions(i)[0] for i in range(50)], save_to=folder)
    loaded = load_tokenizer(str(folder))
    texts = ["woman artist", "keycap 3"]
    assert trained(texts).input_ids == loaded(texts).input_ids != tokenizer(texts).input_ids
    assert loaded.pad_token_id == 0 and loaded.is_fast and len(loaded) == len(trained)


def test_batch_is_padded_to_its_longest_text_or_to_a_multiple(tokenizer):
    texts = ["woman artist", "woman and man holding hands light skin tone dark skin tone"]
    assert batch_tokens(tokenizer, texts, 32)[0]["input_ids"].shape == (2, 13)
    batch = batch_tokens(tokenizer, texts, 32, multiple=8)[0]
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 16)
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    assert batch["attention_mask"].sum(1).tolist() == [4, 13]
    assert batch["attention_mask"][0].tolist() == [1] * 4 + [0] * 12
    assert batch["input_ids"][0, 4:].eq(tokenizer.pad_token_id).all()
    assert batch_tokens(tokenizer, ["woman"], 32, multiple=8)[0]["input_ids"].shape == (1, 8)
    assert (length_multiple("cuda"), length_multiple("cpu")) == (8, 1)


def test_batch_is_cut_at_the_limit_with_its_end_token(tokenizer):
    batch = batch_tokens(tokenizer, ["woman and man holding hands light skin tone", "cat"], 7)[0]
    assert batch["input_ids"].shape == (2, 7)
    assert batch["input_ids"][0, [0, -1]].tolist() == [2, 3] and batch["attention_mask"][0].all()


def test_a_text_of_no_tokens_keeps_one_of_padding():
    """What a sample without a text shows, where the tokenizer adds no special tokens."""
    plain = Tokenizer(WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
    plain.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]")
    alone, among = (batch_tokens(tokenizer, texts, 8)[0] for texts in ([""], ["a a", ""]))
    assert alone["input_ids"].tolist() == [[0]] and alone["attention_mask"].tolist() == [[1]]
    assert among["input_ids"].tolist() == [[1, 1], [0, 0]]
    assert among["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_tokenizer_without_padding_uses_its_end_token(tmp_path, tokenizer):
    for name, special in (("end", {"eos_token": "[SEP]"}), ("none", {})):
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, **special
        ).save_pretrained(str(tmp_path / name))
    assert load_tokenizer(str(tmp_path / "end")).pad_token_id == 3
    with pytest.raises(ValueError, match="neither a padding nor an end token"):
        load_tokenizer(str(tmp_path / "none"))


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="1 captions hold no word"):
        train_tokenizer([" "])
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_tokenizer(str(tmp_path / "no"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer.json").write_text("[]")  # of which the library raises a TypeError
    with pytest.raises(ValueError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_transformers_makes_up_is_refused(tmp_path):
    """By the type in config.json (transformers#18570), where there is no vocabulary, and where
    there is one of another type."""
    for kind in "clip chinese_clip siglip2 clap bert roberta xlm-roberta t5".split():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        (folder / "tokenizer_config.json").write_text("{}")
        cat, dog = AutoTokenizer.from_pretrained(folder)(["a cat", "a dog"]).input_ids
        assert cat == dog, kind
        for name in ("tokenizer_config.json", "of another type.model"):
            (folder / name).touch()
            with pytest.raises(ValueError, match="has no vocabulary.*--tokenizer"):
                load_tokenizer(str(folder))


def test_a_vocabulary_with_gaps_needs_a_row_for_its_highest_id():
    gaps = Tokenizer(WordLevel({"[PAD]": 0, "cat": 4, "dog": 9}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gaps, pad_token="[PAD]")
    assert (len(tokenizer), num_ids(tokenizer)) == (3, 10)


def test_code_that_a_tokenizer_brings_along_is_not_run(tmp_path):
    (tmp_path / "brought.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": [null, "brought.Brought"]}, "tokenizer_class": "Brought"}'
    )
    (tmp_path / "vocab.txt").write_text("brought\n")
    with pytest.raises(ValueError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()
