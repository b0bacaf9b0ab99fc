"""From the words of the command line to source, splits and tokenizer, and what a run finds again in its folder."""

import numpy as np
import pytest

from data import prepare
from data.prepare import prepare_data
from data.sources import open_source
from data.splits import split_source


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
        and all(np.array_equal(a.held_out[name].subset, b.held_out[name].subset) for name in a.held_out)
        and a.tokenizer.get_vocab() == b.tokenizer.get_vocab()
    )


def test_the_first_time_it_divides_and_trains_a_tokenizer(spec, folder):
    prepared = prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=folder)
    expected = split_source(open_source(spec), 0.25, seed=3)
    assert prepared.train.tolist() == expected.train.tolist() and prepared.train.dtype == np.int64
    assert {name: held.subset.tolist() for name, held in prepared.held_out.items()} == {n: s.tolist() for n, s in expected.held_out.items()}
    assert prepared.held_out["validation"].source is prepared.source
    assert prepared.summary() == {"source": spec, "train_samples": 18, "held_out_samples": {"validation": 6}}
    assert {path.name for path in folder.iterdir()} == {"splits.npz", "tokenizer"}


def test_the_tokenizer_knows_the_training_captions_only(spec, folder):
    """Words of held-out samples must not leak: letters that only they have become [UNK]."""
    prepared = prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=folder)
    source, tokenizer = prepared.source, prepared.tokenizer
    trained = {letter for i in prepared.train for letter in source.captions(int(i))[0].lower() if letter.isalpha()}
    assert {letter for letter in tokenizer.get_vocab() if len(letter) == 1 and letter.isalpha()} <= trained
    for i in prepared.train:
        assert tokenizer.unk_token_id not in tokenizer(source.captions(int(i))[0])["input_ids"]


def test_the_second_time_it_finds_both_again(spec, folder, monkeypatch):
    first = prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=folder)
    monkeypatch.setattr(prepare, "split_source", lambda *_, **__: pytest.fail("divided again"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again = prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=folder)
    assert same(first, again)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_every_rank_that_prepares_by_itself_gets_the_same(spec, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = (prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=tmp_path / name) for name in ("a", "b"))
    assert same(a, b)


def test_data_of_another_size_is_refused(spec, emoji_set, folder):
    prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=folder)
    emoji_set(20)  # the same file, shorter
    with pytest.raises(
        ValueError, match=r"splits\.npz: divides 24 samples, but jsonl:.* now has 20; the data changed .* give another --run-dir"
    ):
        prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=folder)


@pytest.mark.parametrize("changed", [{"seed": 4}, {"val_fraction": 0.5}])
def test_what_was_kept_for_another_division_is_not_taken(spec, folder, changed):
    prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=folder)
    wanted = {"val_fraction": 0.25, "seed": 3, **changed}
    expected = split_source(open_source(spec), **wanted)
    try:
        prepared = prepare_data(spec, None, tokenizer=None, folder=folder, **wanted)
    except ValueError:
        return  # a refusal is as good
    assert prepared.train.tolist() == expected.train.tolist()


def test_held_out_samples_from_elsewhere(emoji_set, folder):
    whole = emoji_set(24)
    lines = whole.read_text().splitlines(keepends=True)
    ours, theirs = whole.parent / "ours.jsonl", whole.parent / "theirs.jsonl"
    ours.write_text("".join(lines[:17]))
    theirs.write_text("".join(lines[17:]))
    prepared = prepare_data(f"jsonl:{ours}", f"jsonl:{theirs}", 0.25, seed=3, tokenizer=None, folder=folder)
    assert prepared.train.tolist() == list(range(17))  # nothing of --data is held out
    held = prepared.held_out["validation"]
    assert list(prepared.held_out) == ["validation"] and held.subset.tolist() == list(range(7)) and held.source.spec == f"jsonl:{theirs}"
    assert held.source.captions(0) == open_source(f"jsonl:{whole}").captions(17)
    assert not (folder / "splits.npz").exists()


def test_no_held_out_samples(spec, folder):
    prepared = prepare_data(spec, None, 0.0, seed=3, tokenizer=None, folder=folder)
    assert len(prepared.train) == 24 and prepared.held_out == {}
    assert same(prepared, prepare_data(spec, None, 0.0, seed=3, tokenizer=None, folder=folder))


def test_a_tokenizer_from_elsewhere_is_not_copied(spec, folder, tmp_path, tokenizer):
    tokenizer.save_pretrained(str(tmp_path / "theirs"))
    prepared = prepare_data(spec, None, 0.25, seed=3, tokenizer=str(tmp_path / "theirs"), folder=folder)
    assert prepared.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert {path.name for path in folder.iterdir()} == {"splits.npz"}


def test_a_tokenizer_that_is_given_wins_over_the_kept_one(spec, folder, tmp_path, tokenizer):
    kept = prepare_data(spec, None, 0.25, seed=3, tokenizer=None, folder=folder)
    tokenizer.save_pretrained(str(tmp_path / "theirs"))
    given = prepare_data(spec, None, 0.25, seed=3, tokenizer=str(tmp_path / "theirs"), folder=folder)
    assert given.tokenizer.get_vocab() == tokenizer.get_vocab() != kept.tokenizer.get_vocab()


def test_the_demo_has_its_two_held_out_sets(folder):
    prepared = prepare_data("demo", None, 0.1, seed=0, tokenizer=None, folder=folder)
    assert list(prepared.held_out) == ["family", "composition"]
    assert same(prepared, prepare_data("demo", None, 0.1, seed=0, tokenizer=None, folder=folder))


def test_refusals_pass_through(spec, folder):
    with pytest.raises(ValueError, match="unknown kind 'imagenet'"):
        prepare_data("imagenet:x", None, 0.1, seed=0, tokenizer=None, folder=folder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        prepare_data(spec, None, 0.1, seed=0, tokenizer=str(folder / "nowhere"), folder=folder)
