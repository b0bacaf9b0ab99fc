"""From the words of the command line to source, splits and tokenizer, and what a run finds again in
its folder."""

import json
from pathlib import Path

import numpy as np
import pytest

from data import sets
from data.index.sources import open_source
from data.index.splits import split_source
from data.modalities.tokenizer import train_tokenizer
from data.options import DataOptions
from data.prepare import prepare_data

QUARTER = {"val_fraction": 0.25, "seed": 3}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def spec(emoji_set):
    return f"jsonl:{emoji_set(24)}"


def prepared(spec, folder, tokenizer=None, **options):
    specs = (spec,) if isinstance(spec, str) else spec
    return prepare_data(DataOptions(data=specs, **options), tokenizer, folder)


def contents(data) -> tuple:
    """What a run has of its data."""
    held_out = [(name, held.subset.tolist()) for name, held in data.held_out.items()]
    return data.train.tolist(), held_out, data.tokenizer.get_vocab()


def test_the_first_time_it_divides_and_trains_a_tokenizer(spec, folder):
    data = prepared(spec, folder, **QUARTER)
    expected = split_source(open_source(spec), 0.25, seed=3)
    held_out = [(name, subset.tolist()) for name, subset in expected.held_out.items()]
    assert contents(data)[:2] == (expected.train.tolist(), held_out)
    assert data.held_out["validation"].source is data.source
    assert data.summary() == {
        **{"source": spec, "samples": 24, "bad_samples": {}, "dropped_leaks": {}},
        **{"train_samples": 18, "held_out_samples": {"validation": 6}},
    }
    assert {path.name for path in folder.iterdir()} == {"samples", "tokenizer"}
    # ranks share its pages
    assert isinstance(data.train, np.memmap) and data.train.dtype == np.int64


def test_a_tokenizer_that_knows_no_word_of_the_captions_is_refused(
    spec, folder, emoji_set, tmp_path
):
    """It would make the same tokens of all of them; of one language among two it may."""
    chinese = str(tmp_path / "chinese")
    train_tokenizer(["一只黑色的狗", "两朵红花"], Path(chinese))
    with pytest.raises(ValueError, match="same tokens of 18 different captions.*--tokenizer"):
        prepared(spec, folder, chinese, **QUARTER)
    texts = iter(["一只狗", "两朵花"] * 12)
    both = f"jsonl:{emoji_set(24, texts=lambda _: next(texts))}"
    data = prepared(both, tmp_path / "both", chinese, **QUARTER)
    assert data.tokenizer.tokenize("狗") == ["狗"]


def test_the_tokenizer_knows_the_training_captions_only(spec, folder):
    """Words of held-out samples must not leak: letters that only they have become [UNK]."""
    data = prepared(spec, folder, **QUARTER)
    captions = [data.source.captions(int(i))[0] for i in data.train]
    trained = {letter for caption in captions for letter in caption.lower() if letter.isalpha()}
    letters = {one for one in data.tokenizer.get_vocab() if len(one) == 1 and one.isalpha()}
    assert letters <= trained
    for caption in captions:
        assert data.tokenizer.unk_token_id not in data.tokenizer(caption)["input_ids"]


def test_the_second_time_and_in_another_folder_it_is_the_same(spec, folder, monkeypatch):
    first = contents(prepared(spec, folder, **QUARTER))
    assert first == contents(prepared(spec, folder.parent, **QUARTER))
    monkeypatch.setattr(sets, "split_source", lambda *_, **__: pytest.fail("divided again"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert first == contents(prepared(spec, folder, **QUARTER))
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_what_was_kept_of_other_data_or_for_another_division_is_refused(spec, emoji_set, folder):
    prepared(spec, folder, **QUARTER)
    for changed in ({"seed": 4}, {"val_fraction": 0.5}, {"limit_samples": 3}):
        words = f"(?s)holds other samples .*{next(iter(changed))} changed.*another --run-dir"
        with pytest.raises(ValueError, match=words):
            prepared(spec, folder, **{**QUARTER, **changed})
    emoji_set(20)  # the same file, shorter
    words = r"samples: made of \[\[24, 24\]\] .* now there are \[\[20, 20\]\]; .* another --run-dir"
    with pytest.raises(ValueError, match=words):
        prepared(spec, folder, **QUARTER)


def test_a_few_samples_to_try_a_pipeline(spec, folder):
    whole = split_source(open_source(spec), 0.25, seed=3)
    data = prepared(spec, folder, **QUARTER, limit_samples=5)
    assert len(data.train) == 5 and set(data.train.tolist()) < set(whole.train.tolist())
    assert (np.diff(data.train) > 0).all() and len(data.held_out["validation"].subset) == 6


def test_bad_samples_are_listed_and_left_out_and_too_many_end_the_run(emoji_set, folder):
    bad = ("no json", "{}", {"image_path": "../outside.png", "text": "a"})
    spec = f"jsonl:{emoji_set(24, *bad)}"
    data = prepared(spec, folder, **QUARTER, max_bad_fraction=0.2)
    assert data.summary()["bad_samples"] == {"outside-root": 1, "invalid-row": 2}
    assert data.summary()["samples"] == 27 and len(data.train) == 18 and data.train.max() < 24
    lines = map(json.loads, (folder / "bad_samples.jsonl").read_text().splitlines())
    found = [(line["where"].rpartition(":")[2], line["reason"], line["data"]) for line in lines]
    reasons = {"25": "invalid-row", "26": "invalid-row", "27": "outside-root"}
    assert found == [(where, reason, spec) for where, reason in reasons.items()]
    table = "(?s)3 of 27 samples .*, 11.1%.*2  invalid-row .*1  outside-root .*:25: invalid-row"
    with pytest.raises(ValueError, match=table):
        prepared(spec, folder, **QUARTER, max_bad_fraction=0.1)


def test_what_is_no_part_of_a_sample_refuses_no_run_and_is_recorded(emoji_set, folder):
    """Captions that are broken count as bad, those that are not there do not."""
    row = {"image_path": "images of emoji/0.png", "text": ["a", None]}
    file = emoji_set(24, *[row] * 3)
    summary = prepared(f"jsonl:{file}", folder, **QUARTER, max_bad_fraction=0.0).summary()
    assert summary["bad_samples"] == {}
    assert summary["unused"] == {"captions without text": (3, f"{file}:25")}
    emoji_set(24, {**row, "text": ["a", "x" * 20_000]})
    with pytest.raises(ValueError, match="1 of 25 samples.*\n.*1  huge-caption"):
        prepared(f"jsonl:{file}", folder, **QUARTER, max_bad_fraction=0.0)


def test_several_data_sets_with_weights(emoji_set, folder):
    file = emoji_set(24)
    few = file.parent / "few.jsonl"
    few.write_text("".join(file.read_text().splitlines(keepends=True)[:6]))
    specs = (f"jsonl:{file}", f"jsonl:{few}")
    data = prepared(specs, folder, data_weights=(1, 2.5), val_fraction=0.0)
    assert data.parts == ((24, 1.0), (6, 2.5)) and len(data.train) == 30
    # of the same samples
    others = {"data_temperature": 1e9, "data_floors": (0.6, 0), "data_adapt": 0.5}
    others |= {"pairs": "image:text:0.5", "max_bad_fraction": 0.2}
    shared = prepared(specs, folder, val_fraction=0.0, **others)
    assert shared.parts == ((24, 18 / 24), (6, 12 / 6))
    assert np.array_equal(shared.train, data.train)
    split = prepared(specs, folder.parent, val_fraction=0.2)
    held = split.held_out["validation"].subset.tolist()
    # the same image in both sets is on one side
    assert {i for i in held if i < 6} == {i - 24 for i in held if i >= 24}
    assert sum(count for count, _ in split.parts) == len(split.train)


def test_held_out_samples_from_elsewhere(emoji_set, folder):
    whole = emoji_set(24)
    lines = whole.read_text().splitlines(keepends=True)
    ours, theirs = whole.parent / "ours.jsonl", whole.parent / "theirs.jsonl"
    ours.write_text("".join(lines[:17]))
    theirs.write_text("".join(lines[17:]))
    data = prepared(f"jsonl:{ours}", folder, val_data=f"jsonl:{theirs}", seed=3)
    assert data.train.tolist() == list(range(17))  # nothing of --data is held out
    (held,) = data.held_out.values()
    assert held.subset.tolist() == list(range(7)) and held.source.spec == f"jsonl:{theirs}"
    assert held.source.captions(0) == open_source(f"jsonl:{whole}").captions(17)


def test_a_tokenizer_that_is_given_is_not_copied_and_wins_over_the_kept_one(
    spec, folder, tmp_path, tokenizer
):
    theirs = str(tmp_path / "theirs")
    tokenizer.save_pretrained(theirs)
    vocabulary = tokenizer.get_vocab()
    assert prepared(spec, folder, theirs, **QUARTER).tokenizer.get_vocab() == vocabulary
    assert {path.name for path in folder.iterdir()} == {"samples"}
    assert prepared(spec, folder, **QUARTER).tokenizer.get_vocab() != vocabulary
    assert prepared(spec, folder, theirs, **QUARTER).tokenizer.get_vocab() == vocabulary
