"""JSON-lines files: what is read, and what is said of each faulty line."""

import json

import pytest

from data.bad_tables import count_bad
from data.index.sources import ConceptSource, Source, open_format, open_source

GOOD = {"image_path": "images of emoji/0.png", "text": "again"}
OTHER_KEY = '{"image_path": "images of emoji/0.png", "txt": "a"}'


FAULTY = [
    ('{"image_path": ', "invalid-row", "invalid JSON"),
    ("[1, 2]", "invalid-row", "a list is given, an object"),
    ("{}", "invalid-row", "no key 'image_path'; given: none"),
    (OTHER_KEY, "invalid-row", "no key 'text'; given: image_path, txt; did you mean 'txt'"),
    ('{"image": ""}', "invalid-row", "no key 'image_path'; given: image; did you mean 'image'"),
    # instead of what a good line has
    ({"text": 5}, "invalid-row", "the text is 5; a text or a list of texts is needed"),
    ({"text": [None, 5]}, "no-caption", "no text is given"),
    ({"text": "  "}, "empty-caption", "the text is empty"),
    ({"text": []}, "no-caption", "no text is given"),
    ({"text": "x" * 10_001}, "huge-caption", "has 10,001 characters; at most 10,000 are read"),
    ({"image_path": 3}, "invalid-row", "the image's path is 3; a path as text is needed"),
    ({"image_path": "none.png"}, "missing-file", "'none.png' does not exist; paths count from"),
    ({"image_path": "/etc/hostname"}, "outside-root", "are read; allow its folder"),
    ({"image_path": "images of emoji/../../x.png"}, "outside-root", "are read; allow its folder"),
    ({"id": "1"}, "duplicate-id", "id '1' is already that of "),
    ({"id": True}, "invalid-row", "the id is True; a text or a whole number is needed"),
    ({"id": ""}, "invalid-row", "a text or a whole number is needed"),
    ({"id": "x" * 1001}, "invalid-row", "the id has 1,001 characters"),
]


def problems(file) -> list[tuple[str, str, str]]:
    """(where, reason, detail) of the faulty lines."""
    return [tuple(found) for _, *found in open_source(f"jsonl:{file}").bad_samples()]


def test_reads_in_file_order_from_paths_with_spaces(emoji_set, demo):
    file = emoji_set(3, "", {**GOOD, "id": "x", "text": ["one", "two"]}, "   ")
    source = open_source(f"jsonl:{file}")
    assert isinstance(source, Source) and not isinstance(source, ConceptSource)
    assert len(source) == 4 and source.usable().tolist() == [0, 1, 2, 3]
    assert [source.identity(i) for i in range(4)] == ["1", "2", "3", "x"]
    assert source.captions(1) == demo.captions(1) and source.captions(3) == ["one", "two"]
    assert source.value("image", 2) == demo.value("image", 2)
    first, second, last = (source.content_hash("image", i) for i in (0, 1, 3))
    assert first == last != second and source.where(3) == f"{file}:5"


def test_faulty_lines_are_named(emoji_set):
    for line, reason, words in FAULTY:
        file = emoji_set(1, "", line if isinstance(line, str) else GOOD | line)
        ((where, found, detail),) = problems(file)
        assert where == f"{file}:3" and found == reason and words in detail, line


def test_an_id_that_two_lines_have_names_the_first(emoji_set):
    """A line that cannot be read takes nobody's id."""
    file = emoji_set(2, {**GOOD, "id": "2"}, "oops", {**GOOD, "id": "4"}, {**GOOD, "id": "2"})
    twice = ("duplicate-id", f"id '2' is already that of {file}:2; ids must differ")
    first, (where, *_), last = problems(file)
    assert (first, where, last) == ((f"{file}:3", *twice), f"{file}:4", (f"{file}:6", *twice))


def test_some_good_captions_are_kept(emoji_set):
    """Of the others, those that are broken are listed and count as bad; those without a text are
    counted."""
    texts = ["", "kept", "x" * 20_000, None, "kept too", 5], [None, "alone"]
    file = emoji_set(1, *({**GOOD, "text": each} for each in texts))
    source = open_source(f"jsonl:{file}")
    assert [source.captions(i) for i in (1, 2)] == [["kept", "kept too"], ["alone"]]
    assert source.column("num_captions").tolist() == [1, 2, 1]
    assert source.column("num_characters")[1] == 8
    assert source.unused() == {"captions without text": (3, f"{file}:2")}
    ((_, where, reason, detail),) = source.broken_values()
    assert (where, reason) == (f"{file}:2", "huge-caption") and detail.startswith("2 of 6 captions")
    assert count_bad(source) == {"huge-caption": 1} and list(source.usable()) == [0, 1, 2]


def test_keys_of_other_names(emoji_set):
    """As a spec says; and Hugging Face's metadata.jsonl as it is."""
    image = GOOD["image_path"]
    rows = [
        {"photo": image, "words": "a", "nr": 7, "tongue": "de"},
        {"photo": image, "words": "b", "text": "not this"},
    ]
    options = "image=photo&text=words&id=nr&language=tongue"
    emoji_set(1)
    source = open_source(f"jsonl:{emoji_set(0, *rows)}?{options}")
    assert [source.captions(i) for i in (0, 1)] == [["a"], ["b"]]
    assert source.identity(0) == "7" and source.language(0) == "de" and source.language(1) is None
    theirs = f"jsonl:{emoji_set(0, {'file_name': image, 'text': 'as they have it'})}"
    assert open_source(theirs).captions(0) == ["as they have it"]
    # named for sounds, it is no image's
    swapped = open_format(f"{theirs}?audio=file_name", (("image", "text"), ("audio", "text")))
    (sample,) = swapped.samples(next(swapped.parts()))
    assert sample.media["audio"].path == image and "image" not in sample.media
    # an id may be what another is too
    assert open_source(f"{theirs}?id=file_name").identity(0) == image
    with pytest.raises(ValueError, match="unknown option 'txt'.*did you mean 'text'"):
        open_source(f"{theirs}?txt=words")
    with pytest.raises(ValueError, match="no key 'text'; given: text"):
        open_source(f"jsonl:{emoji_set(0, {'text': image})}?image=text")
    with pytest.raises(ValueError, match=r"no key 'words'; given: .*name it: \?text=KEY"):
        open_source(f"jsonl:{emoji_set(0, {'file_name': image, 'word': 'a'})}?text=words")


def test_not_utf8(emoji_set):
    file = emoji_set(1)
    line = b'{"image_path": "images of emoji/0.png", "text": "\xe9t\xe9"}\n'
    file.write_bytes(file.read_bytes() + line)
    ((where, reason, detail),) = problems(file)
    assert (where, reason) == (f"{file}:2", "invalid-utf8") and "not UTF-8: byte 0xe9" in detail


def test_a_line_without_end_is_one_faulty_line(emoji_set, monkeypatch):
    monkeypatch.setattr("data.formats.tables.LINE_LIMIT", 1000)
    file = emoji_set(1, {**GOOD, "text": "x" * 5000}, GOOD)
    ((where, reason, detail),) = problems(file)
    assert (where, reason) == (f"{file}:2", "invalid-row") and "more than 1,000 bytes" in detail
    assert open_source(f"jsonl:{file}").identity(2) == "3"


def test_empty_file(write_jsonl):
    for content in ("", "\n\n"):
        with pytest.raises(ValueError, match="holds no sample"):
            open_source(f"jsonl:{write_jsonl(content)}")


def test_many_lines_keep_their_order(emoji_set):
    """More than one part, so that the order of parts is seen."""
    lines = [json.dumps({**GOOD, "id": f"row {i}"}) for i in range(2500)]
    source = open_source(f"jsonl:{emoji_set(1, *lines)}")
    assert [source.identity(i) for i in range(1, len(source))] == [f"row {i}" for i in range(2500)]
