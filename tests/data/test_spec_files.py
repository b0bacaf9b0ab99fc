"""Data specs in files of YAML and JSON are those that the command line has."""

import json
import sys

import pytest

from common.secrets import redacted
from data import inspect
from data.cache import __main__ as filling
from data.index.sources import open_source
from data.spec_files import FILE_LIMIT, specs_of_file
from data.streams import unseen
from data.streams.opening import named_shards
from launch.config.options import parse_options
from launch.inference import flags

WHERE = "similarity>0.3 and url != 'a?b&c=100%'"
SETS = """
# no shell reads this
- kind: stream
  path:
    - s3://bucket/{00000..00002}.tar
    - https://user:hunter22222@host/*.tar
  where: |
    similarity>0.3
    and url != 'a?b&c=100%'
  mixed: 16
- jsonl:/data/pairs.jsonl?root=/images
- {kind: coco, path: '/images:/captions.json', root: [/a, '/b&c']}
- kind: demo
"""
SPECS = [
    "stream:s3://bucket/{00000..00002}.tar::https://user:hunter22222@host/*.tar"
    "?where=similarity>0.3 and url != 'a%3Fb%26c=100%25'&mixed=16",
    "jsonl:/data/pairs.jsonl?root=/images",
    "coco:/images:/captions.json?root=/a&root=/b%26c",
    "demo",
]


@pytest.fixture
def written(tmp_path):
    def write(text, name="sets.yaml"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return write


def test_a_mapping_is_the_spec_that_it_says(written):
    assert specs_of_file(written(SETS)) == SPECS
    as_json = json.dumps([{"kind": "stream", "path": "a.tar", "where": WHERE}], indent="\t")
    [spec] = specs_of_file(written(as_json, "sets.json"))
    assert named_shards(spec)[1] == {"where": WHERE}
    assert specs_of_file(written('"demo:en+de"', "one.json")) == ["demo:en+de"]


def test_a_file_is_its_specs_wherever_a_command_takes_one(written, monkeypatch, tmp_path):
    file = written("[demo:en, {kind: demo, path: de}]")
    one = written("{kind: demo, path: de}", "one.yml")
    arguments = written(f"--data @{file}\n--val-data=@{one}\n", "run.args")
    plain = parse_options(["--data", "demo:en", "--data", "demo:de", "--val-data", "demo:de"])
    for words in (
        ["--data", f"@{file}", "--val-data", f"@{one}"],
        [f"--data=@{file}", f"--val-data=@{one}"],
        ["--data", "demo:en", "--set", f"data=@{one}", f"val_data=@{one}"],
        [f"@{arguments}"],
    ):
        found = parse_options(words)
        data = ("demo:de",) if "--set" in words else plain.data
        assert (found.data, found.val_data) == (data, "demo:de"), words
        if "--set" not in words:  # so records and a run that goes on know no file
            assert found == plain
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", f"@{file}", "--steps", "3"])
    parse_options()
    assert sys.argv == ["train.py", "--data", "demo:en", "--data", "demo:de", "--steps", "3"]
    for parser, words in (
        (inspect.make_parser(), [f"@{one}"]),
        (filling.make_parser(), ["--image-size", "32", f"@{one}"]),
    ):
        assert parser.parse_args(words).spec == "demo:de"
    for flag in ("--val-data", "--classify", "--classify-train"):
        found = vars(flags.make_parser().parse_args(["run", flag, f"@{one}"]))
        assert found[flag[2:].replace("-", "_")] == "demo:de"
    pytest.importorskip("rbloom", reason="pip install -r requirements-filters.txt")
    keys = tmp_path / "keys"
    assert unseen.main([f"@{one}", "--out", str(keys)]) == 0 and keys.exists()


def test_secrets_of_a_file_are_not_recorded(written):
    options = parse_options(["--data", f"@{written(SETS)}"])
    recorded = json.dumps(redacted(options.record()))
    assert "hunter22222" not in recorded and "***" in recorded and "similarity>0.3" in recorded


REFUSED = {
    "": "is empty",
    "[]": "is empty",
    "3": "is 3; write a data spec",
    "[demo, [demo]]": r"data set 2: is \[\"demo\"\]",
    "- ' '": "write a data spec",
    "{knd: stream, path: a.tar}": "no 'kind'; did you mean it by 'knd'",
    "{kind: stream, pth: a.tar}": "no 'path'; did you mean it by 'pth'",
    "{kind: stream, path: 's3://a/b.tar', wher: x>1}": "unknown key 'wher'.*did you mean 'where'",
    "{kind: stream, path: true}": "path is true; a text or a number",
    "{kind: stream, path: a.tar, text: yes}": "text is true.*quotes",
    "{kind: stream, path: a.tar, where: }": "where is null",
    "{kind: stream, path: a.tar, where: {a: 1}}": "where is {",
    "{kind: [stream], path: a.tar, }": "kind is ",
    "{kind: stream, path: []}": r"path is \[\]",
    "{1: 2}": "key 1 is no text",
    "path: [/a/{0..3}.tar]": "is no YAML: .*line 1",
    "kind: stream\n path: https://user:hunter22222@host": "is no YAML",
    "!!python/object/apply:os.system ['touch owned']": "is no YAML",
    "[" * 5000: "is no YAML",
    b"\xff": "UTF-8",
    "#" * (FILE_LIMIT + 1): "has over",
}


def test_what_names_no_data_is_refused_in_one_line(written, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def refused(file):
        with pytest.raises(ValueError) as caught:
            specs_of_file(file)
        with pytest.raises(SystemExit) as ended:
            parse_options(["--data", f"@{file}"])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.count("\n") == 1 and str(caught.value) in said
        return said

    for text, words in REFUSED.items():
        said = refused(written(text))
        assert "hunter22222" not in said and not (tmp_path / "owned").exists()
        with pytest.raises(ValueError, match=words):
            specs_of_file(written(text))
    assert "is no JSON: " in refused(written("{'kind': 1}", "a.json"))
    assert "No such file" in refused(tmp_path / "b.yaml")
    assert "Is a directory" in refused(tmp_path.joinpath("c.json").mkdir() or tmp_path / "c.json")
    assert "ends in .yaml, .yml, .json" in refused(written("--data demo", "run.args"))


def test_an_unknown_key_is_refused_when_the_data_are_opened(written):
    for text, words in (
        ("{kind: stream, path: a.tar, wher: x>1}", "unknown option 'wher'.*'where'"),
        ("{kind: stream, path: 's3://a/b.tar', txt: a, where: x>1}", "'txt'.*'text'"),
    ):
        with pytest.raises(ValueError, match=words):
            named_shards(specs_of_file(written(text))[0])
    for text, words in (
        ("{kind: steam, path: a.tar}", "unknown kind 'steam'.*did you mean 'stream'"),
        ("{kind: jsonl, path: a.jsonl, rot: /a}", "unknown option 'rot'.*'root'"),
    ):
        with pytest.raises(ValueError, match=words):
            open_source(specs_of_file(written(text))[0])
