"""From the words of the command line to source, splits and tokenizer, and what a run finds again in
its folder."""

import json
from pathlib import Path

import numpy as np
import pytest

from data import prepare
from data.index.sources import open_source
from data.index.splits import split_source
from data.modalities.tokenizer import train_tokenizer
from data.options import DataOptions
from data.prepare import prepare_data


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def spec(emoji_set):
    return f"jsonl:{emoji_set(24)}"


def same(a, b) -> bool:
    return (
        np.array_equal(a.train, b.train)
        and list(a.held_out) == list(b.held_out)
        and all(
            np.array_equal(a.held_out[name].subset, b.held_out[name].subset) for name in a.held_out
        )
        and a.tokenizer.get_vocab() == b.tokenizer.get_vocab()
    )


def test_the_first_time_it_divides_and_trains_a_tokenizer(spec, folder):
    prepared = prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, folder)
    expected = split_source(open_source(spec), 0.25, seed=3)
    assert prepared.train.tolist() == expected.train.tolist() and prepared.train.dtype == np.int64
    assert {name: held.subset.tolist() for name, held in prepared.held_out.items()} == {
        n: s.tolist() for n, s in expected.held_out.items()
    }
    assert prepared.held_out["validation"].source is prepared.source
    assert prepared.summary() == {
        "source": spec,
        "samples": 24,
        "bad_samples": {},
        "dropped_leaks": {},
        "train_samples": 18,
        "held_out_samples": {"validation": 6},
    }
    assert {path.name for path in folder.iterdir()} == {"samples", "tokenizer"}
    assert isinstance(prepared.train, np.memmap)  # ranks share its pages


def test_a_tokenizer_that_knows_no_word_of_the_captions_is_refused(
    spec, folder, emoji_set, tmp_path
):
    """It would make the same tokens of all of them; of one language among two it may."""
    chinese = str(tmp_path / "chinese")
    train_tokenizer(["一只黑色的狗", "两朵红花"], Path(chinese))
    options = {"val_fraction": 0.25, "seed": 3}
    with pytest.raises(ValueError, match="same tokens of 18 different captions.*--tokenizer"):
        prepare_data(DataOptions(data=(spec,), **options), chinese, folder)
    texts = iter(["一只狗", "两朵花"] * 12)
    both = f"jsonl:{emoji_set(24, texts=lambda _: next(texts))}"
    prepared = prepare_data(DataOptions(data=(both,), **options), chinese, tmp_path / "both")
    assert prepared.tokenizer.tokenize("狗") == ["狗"]


def test_the_tokenizer_knows_the_training_captions_only(spec, folder):
    """Words of held-out samples must not leak: letters that only they have become [UNK]."""
    prepared = prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, folder)
    source, tokenizer = prepared.source, prepared.tokenizer
    trained = {
        letter
        for i in prepared.train
        for letter in source.captions(int(i))[0].lower()
        if letter.isalpha()
    }
    assert {
        letter for letter in tokenizer.get_vocab() if len(letter) == 1 and letter.isalpha()
    } <= trained
    for i in prepared.train:
        assert tokenizer.unk_token_id not in tokenizer(source.captions(int(i))[0])["input_ids"]


def test_the_second_time_it_finds_both_again(spec, folder, monkeypatch):
    first = prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, folder)
    monkeypatch.setattr(prepare, "split_source", lambda *_, **__: pytest.fail("divided again"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again = prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, folder)
    assert same(first, again)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_every_rank_that_prepares_by_itself_gets_the_same(spec, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = (
        prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, tmp_path / name)
        for name in ("a", "b")
    )
    assert same(a, b)


def test_data_of_another_size_is_refused(spec, emoji_set, folder):
    prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, folder)
    emoji_set(20)  # the same file, shorter
    with pytest.raises(
        ValueError,
        match=r"samples: made of \[\[24, 24\]\] samples .* now there are \[\[20, 20\]\]; .* give another --run-dir",
    ):
        prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, folder)


@pytest.mark.parametrize("changed", [{"seed": 4}, {"val_fraction": 0.5}, {"limit_samples": 3}])
def test_what_was_kept_for_another_division_is_refused(spec, folder, changed):
    prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, folder)
    wanted = {"val_fraction": 0.25, "seed": 3, **changed}
    with pytest.raises(
        ValueError,
        match=f"(?s)holds other samples than are asked for .{next(iter(changed))} changed.*another --run-dir",
    ):
        prepare_data(DataOptions(data=(spec,), **wanted), None, folder)


def test_a_few_samples_to_try_a_pipeline(spec, folder):
    whole = split_source(open_source(spec), 0.25, seed=3)
    prepared = prepare_data(
        DataOptions(data=(spec,), val_fraction=0.25, seed=3, limit_samples=5), None, folder
    )
    assert len(prepared.train) == 5 and set(prepared.train.tolist()) < set(whole.train.tolist())
    assert (np.diff(prepared.train) > 0).all() and len(prepared.held_out["validation"].subset) == 6


def test_bad_samples_are_listed_and_left_out(emoji_set, folder):
    spec = f"jsonl:{emoji_set(24, 'no json', {'image_path': '../outside.png', 'text': 'a'})}"
    prepared = prepare_data(
        DataOptions(data=(spec,), val_fraction=0.25, max_bad_fraction=0.1), None, folder
    )
    assert (
        prepared.summary()["bad_samples"] == {"outside-root": 1, "invalid-row": 1}
        and prepared.summary()["samples"] == 26
    )
    lines = [json.loads(line) for line in (folder / "bad_samples.jsonl").read_text().splitlines()]
    assert [(line["where"].rpartition(":")[2], line["reason"], line["data"]) for line in lines] == [
        ("25", "invalid-row", spec),
        ("26", "outside-root", spec),
    ]
    assert len(prepared.train) == 18 and prepared.train.max() < 24


def test_too_many_bad_samples_end_the_run_with_the_table_of_reasons(emoji_set, folder):
    spec = f"jsonl:{emoji_set(24, 'no json', '{}', {'image_path': 'missing.png', 'text': 'a'})}"
    with pytest.raises(
        ValueError,
        match="(?s)3 of 27 samples cannot be used, 11.1%.*2  invalid-row .*1  missing-file .*:25: invalid-row",
    ):
        prepare_data(
            DataOptions(data=(spec,), val_fraction=0.25, max_bad_fraction=0.1), None, folder
        )


def test_what_is_no_part_of_a_sample_refuses_no_run_and_is_recorded(emoji_set, folder):
    """Captions that are broken count as bad, those that are not there do not."""
    row = {"image_path": "images of emoji/0.png", "text": ["a", None]}
    file = emoji_set(24, *[row] * 3)
    spec = f"jsonl:{file}"
    options = DataOptions(data=(spec,), val_fraction=0.25, max_bad_fraction=0.0)
    summary = prepare_data(options, None, folder).summary()
    assert summary["bad_samples"] == {} and summary["unused"] == {
        "captions without text": (3, f"{file}:25")
    }
    emoji_set(24, {**row, "text": ["a", "x" * 20_000]})
    with pytest.raises(ValueError, match="1 of 25 samples.*\n.*1  huge-caption"):
        prepare_data(options, None, folder)


def test_several_data_sets_with_weights(emoji_set, folder):
    file = emoji_set(24)
    few = file.parent / "few.jsonl"
    few.write_text("".join(file.read_text().splitlines(keepends=True)[:6]))
    specs = (f"jsonl:{file}", f"jsonl:{few}")
    prepared = prepare_data(
        DataOptions(data=specs, data_weights=(1, 2.5), val_fraction=0.0), None, folder
    )
    assert prepared.parts == ((24, 1.0), (6, 2.5)) and len(prepared.train) == 30
    # of the same samples
    others = {"data_temperature": 1e9, "data_floors": (0, 0.6), "data_adapt": 0.5}
    others |= {"pairs": "image:text:0.5", "max_bad_fraction": 0.2}
    shared = prepare_data(DataOptions(data=specs, val_fraction=0.0, **others), None, folder)
    assert shared.parts == ((24, 12 / 24), (6, 18 / 6)) and np.array_equal(
        shared.train, prepared.train
    )
    split = prepare_data(
        DataOptions(data=specs, val_fraction=0.2), None, make(folder.parent / "split")
    )
    held = split.held_out["validation"].subset.tolist()
    # the same image in both sets is on one side
    assert {i for i in held if i < 6} == {i - 24 for i in held if i >= 24}
    assert sum(count for count, _ in split.parts) == len(split.train)


def make(folder):
    folder.mkdir()
    return folder


def test_held_out_samples_from_elsewhere(emoji_set, folder):
    whole = emoji_set(24)
    lines = whole.read_text().splitlines(keepends=True)
    ours, theirs = whole.parent / "ours.jsonl", whole.parent / "theirs.jsonl"
    ours.write_text("".join(lines[:17]))
    theirs.write_text("".join(lines[17:]))
    prepared = prepare_data(
        DataOptions(data=(f"jsonl:{ours}",), val_data=f"jsonl:{theirs}", seed=3), None, folder
    )
    assert prepared.train.tolist() == list(range(17))  # nothing of --data is held out
    held = prepared.held_out["validation"]
    assert (
        list(prepared.held_out) == ["validation"]
        and held.subset.tolist() == list(range(7))
        and held.source.spec == f"jsonl:{theirs}"
    )
    assert held.source.captions(0) == open_source(f"jsonl:{whole}").captions(17)


def test_no_held_out_samples(spec, folder):
    prepared = prepare_data(DataOptions(data=(spec,), val_fraction=0.0, seed=3), None, folder)
    assert len(prepared.train) == 24 and prepared.held_out == {}
    assert same(
        prepared, prepare_data(DataOptions(data=(spec,), val_fraction=0.0, seed=3), None, folder)
    )


def test_a_tokenizer_from_elsewhere_is_not_copied(spec, folder, tmp_path, tokenizer):
    tokenizer.save_pretrained(str(tmp_path / "theirs"))
    prepared = prepare_data(
        DataOptions(data=(spec,), val_fraction=0.25, seed=3), str(tmp_path / "theirs"), folder
    )
    assert prepared.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert {path.name for path in folder.iterdir()} == {"samples"}


def test_a_tokenizer_that_is_given_wins_over_the_kept_one(spec, folder, tmp_path, tokenizer):
    kept = prepare_data(DataOptions(data=(spec,), val_fraction=0.25, seed=3), None, folder)
    tokenizer.save_pretrained(str(tmp_path / "theirs"))
    given = prepare_data(
        DataOptions(data=(spec,), val_fraction=0.25, seed=3), str(tmp_path / "theirs"), folder
    )
    assert given.tokenizer.get_vocab() == tokenizer.get_vocab() != kept.tokenizer.get_vocab()


def test_the_demo_has_its_two_held_out_sets(folder):
    prepared = prepare_data(DataOptions(data=("demo",)), None, folder)
    assert list(prepared.held_out) == ["family", "composition"]
    assert same(prepared, prepare_data(DataOptions(data=("demo",)), None, folder))


def test_refusals_pass_through(spec, folder):
    with pytest.raises(ValueError, match="unknown kind 'imagenet'"):
        prepare_data(DataOptions(data=("imagenet:x",)), None, folder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        prepare_data(
            DataOptions(data=(spec,), val_fraction=0.1, seed=0), str(folder / "nowhere"), folder
        )
