"""JSON-lines files: what is read, and each refusal."""

import pytest

from data.sources import ConceptSource, Source, open_source

GOOD = {"image_path": "pictures of emoji/0.png", "text": "again"}


def test_reads_in_file_order_from_paths_with_spaces(emoji_set, demo):
    source = open_source(f"jsonl:{emoji_set(3, '', {**GOOD, 'id': 'x', 'text': ['one', 'two']}, '   ')}")
    assert isinstance(source, Source) and not isinstance(source, ConceptSource)
    assert len(source) == 4
    assert [source.identity(i) for i in range(4)] == ["1", "2", "3", "x"]
    assert source.captions(1) == demo.captions(1) and source.captions(3) == ["one", "two"]
    assert source.image(2).tobytes() == demo.image(2).tobytes()
    assert source.content_key(3) == source.content_key(0) != source.content_key(1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"image_path": ', "invalid JSON"),
        ("[1, 2]", "a list is given, an object"),
        ({"image_path": "pictures of emoji/0.png", "txt": "a"}, "no key 'text'; given: image_path, txt; rename 'txt'?"),
        ({"image": "pictures of emoji/0.png", "text": "a"}, "no key 'image_path'; given: image, text; rename 'image'?"),
        ("{}", "no key 'image_path'; given: none"),
        ({**GOOD, "text": 5}, "'text' is 5; a text or a list of texts is needed"),
        ({**GOOD, "text": ["a", None]}, "a text or a list of texts is needed"),
        ({**GOOD, "text": "  "}, "'text' is empty"),
        ({**GOOD, "text": []}, "'text' is empty"),
        ({**GOOD, "text": ["a", ""]}, "'text' is empty"),
        ({**GOOD, "image_path": 3}, "'image_path' is 3; a path as text is needed"),
        ({**GOOD, "image_path": "none.png"}, "none.png does not exist; paths count from the folder"),
        ({**GOOD, "image_path": "/etc/hostname"}, "leaves the folder"),
        ({**GOOD, "image_path": "pictures of emoji/../../x.png"}, "leaves the folder"),
        ({**GOOD, "id": "1"}, "id '1' is already that of line 1"),
        ({**GOOD, "id": True}, "'id' is true; a text or a whole number is needed"),
        ({**GOOD, "id": ""}, "a text or a whole number is needed"),
    ],
)
def test_faulty_line_is_named(emoji_set, line, words):
    file = emoji_set(1, "", line)
    with pytest.raises(ValueError) as error:
        open_source(f"jsonl:{file}")
    assert f"{file}:3: " in str(error.value) and words in str(error.value), str(error.value)
    assert "1 faulty line(s)" in str(error.value)


def test_errors_are_collected_and_counted(emoji_set):
    file = emoji_set(1, *["oops"] * 7)
    with pytest.raises(ValueError) as error:
        open_source(f"jsonl:{file}")
    message = str(error.value)
    assert "7 faulty line(s)" in message and "... and 2 more" in message
    assert [f"{file}:{line}: invalid JSON" in message for line in range(1, 9)] == [False, *[True] * 5, False, False]


def test_not_utf8(emoji_set):
    file = emoji_set(1)
    file.write_bytes(file.read_bytes() + b'{"image_path": "pictures of emoji/0.png", "text": "\xe9t\xe9"}\n')
    with pytest.raises(ValueError, match=":2: not UTF-8: byte 0xe9"):
        open_source(f"jsonl:{file}")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_file(write_jsonl, content):
    with pytest.raises(ValueError, match="holds no sample"):
        open_source(f"jsonl:{write_jsonl(content)}")


@pytest.mark.parametrize("harm", ["not an image", "truncated"])
def test_unreadable_image_is_named_when_decoded(emoji_set, harm):
    file = emoji_set(2)
    picture = file.parent / "pictures of emoji" / "1.png"
    picture.write_bytes(b"hello" if harm == "not an image" else picture.read_bytes()[:200])
    source = open_source(f"jsonl:{file}")
    source.image(0)
    for read in (source.image, source.content_key):
        with pytest.raises(ValueError) as error:
            read(1)
        assert f"{file}:2: sample '2': cannot read the image {picture}" in str(error.value)
        assert error.value.__cause__ is not None
