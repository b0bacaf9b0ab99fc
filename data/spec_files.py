"""Data specs in a file, which go past every shell: `--data @FILE`.

    # sets.yaml
    - kind: stream
      path: s3://bucket/laion/{00000..41407}.tar
      where: similarity>0.3 and language in ('en', 'de')
      unseen: coco.bloom
    - jsonl:/data/pairs.jsonl

A file holds one data set or a list of several, each as a spec or as a mapping: `kind`, what follows
it as `path`, and the options of that kind. Relative paths count from the current folder, as on the
command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.command_line import InFile
from common.files import refuse_longer
from common.secrets import OF_SPECS, redact
from common.spelling import near
from data.formats.specs import is_remote
from data.index.roots import escaped

ENDINGS = (".yaml", ".yml", ".json")
FILE_LIMIT = 1 << 20  # bytes
KIND, PATH = "kind", "path"
JOINED = "::"  # several patterns of one data set
SHOWN = 60  # characters of a value in a message


def specs_of_file(file: Path) -> list[str]:
    """The data sets that a file names, as the command line has them. Errors: ValueError with one
    line on what is wrong."""
    read = _content(file)
    found = read if isinstance(read, list) else [read]
    if not found or read is None:
        raise ValueError(f"@{file}: is empty; write a data spec, a mapping, or a list of them")
    of = [f"@{file}" + f", data set {n}" * isinstance(read, list) for n in range(1, len(found) + 1)]
    return [_spec(each, where) for each, where in zip(found, of)]


SPEC = InFile(specs_of_file, ENDINGS)  # the type of an argument that is a data spec


def _content(file: Path) -> Any:
    import yaml  # which a command without such a file can do without

    if file.suffix.lower() not in ENDINGS:
        raise ValueError(
            f"@{file}: a file of data specs has a name that ends in {', '.join(ENDINGS)}; rename it, "
            "or give the spec itself"
        )
    is_json = file.suffix.lower() == ".json"
    try:
        refuse_longer(file.stat().st_size, FILE_LIMIT, f"@{file}")
        text = file.read_text(encoding="utf-8-sig")
        return json.loads(text) if is_json else yaml.safe_load(text)
    except OSError as error:
        raise ValueError(
            f"@{file}: {error.strerror}; it is a file of data specs, in YAML or JSON"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"@{file}: is no text in UTF-8; write it anew") from error
    except (yaml.YAMLError, json.JSONDecodeError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        said = "it is nested too deeply" if deep else redact(" ".join(str(error).split()))
        raise ValueError(f"@{file}: is no {'JSON' if is_json else 'YAML'}: {said}") from error


def _spec(given: Any, where: str) -> str:
    if isinstance(given, str) and given.strip():
        return _line(given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{where}: is {_shown(given)}; write a data spec, such as jsonl:FILE, or a mapping with "
            f"{KIND} and {PATH}"
        )
    for key in given:
        if not isinstance(key, str):
            raise ValueError(f"{where}: the key {_shown(key)} is no text; put it into quotes")
    for key in (KIND, PATH):
        if key not in given and (key == KIND or given[KIND] != "demo"):
            others = [name for name in given if name not in (KIND, PATH)]
            raise ValueError(f"{where}: has no {key!r}{_meant(key, others)}")
    begin = _text(given[KIND], KIND, where)
    if PATH in given:
        patterns = [_text(path, PATH, where) for path in _listed(given[PATH])]
        begin += f":{JOINED.join(patterns)}"
    options = {key: values for key, values in given.items() if key not in (KIND, PATH)}
    if is_remote(begin):
        _refuse_unknown(options, where)
    words = [
        f"{key}={escaped(_text(value, key, where))}"
        for key, values in options.items()
        for value in _listed(values)
    ]
    return f"{begin}?{'&'.join(words)}" if words else begin


def _refuse_unknown(options: Mapping[str, Any], where: str) -> None:
    """Raise ValueError where none is an option of shards: behind an address they would be taken for
    its query. One that is unknown beside others is refused where the data are opened."""
    if options and not OF_SPECS & options.keys():
        key = next(iter(options))
        known = ", ".join([KIND, PATH, *sorted(OF_SPECS)])
        raise ValueError(f"{where}: unknown key {key!r}; known: {known}{near(key, OF_SPECS)}")


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) and values else [values]


def _meant(key: str, others: list[str]) -> str:
    return f"; did you mean it by {others[0]!r}?" if others and near(key, others) else ""


def _text(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        raise ValueError(
            f"{where}: {key} is {_shown(value)}; a text or a number is needed, and quotes around "
            "what YAML takes for something else"
        )
    return _line(str(value))


def _line(text: str) -> str:
    """Without the line breaks of a text that YAML folds or keeps."""
    return " ".join(text.split("\n")).strip()


def _shown(value: Any) -> str:
    text = redact(json.dumps(value, default=str))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
