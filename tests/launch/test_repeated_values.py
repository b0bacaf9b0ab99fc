"""The first screen says of which modalities the same value stands in several samples."""

import io
import json
import sys

import numpy as np
import pytest
from launched import ROOT
from PIL import Image

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_audio import tone, wav  # noqa: E402
from bad_films import film  # noqa: E402

from data.prepare import prepare_data  # noqa: E402
from data.stored.kinds import files_of  # noqa: E402
from launch.config.options import parse_options  # noqa: E402
from launch.setup.first_screen import _num_different, _repeated  # noqa: E402

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")
pytest.importorskip("soundfile", reason="pip install -r requirements-audio.txt")

NUMBER = 12


def png(values):
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


MAKERS = {
    "image": lambda n: png(np.full((32, 32, 3), 10 * n, np.uint8)),
    "audio": lambda n: wav(tone(0.3, 200 + 20 * n)),
    "video": lambda n: film(number=16 + n),
    "depth": lambda n: png(np.full((32, 32), 1_000 * n, np.uint16)),
}
ENDINGS = {"image": "png", "audio": "wav", "video": "mp4", "depth": "depth.png"}


@pytest.mark.usefixtures("registries")
def test_every_modality_of_files_is_looked_at(tmp_path):
    """Two samples have each value but for images, of which all differ. Of films each has a clip of
    its own, until both have the same."""
    lines = []
    for n in range(NUMBER):
        line = {"text": f"sample {n}", "start_s": 0.1 * (n % 2), "end_s": 0.5}
        for name, make in MAKERS.items():
            file = tmp_path / f"{n}.{ENDINGS[name]}"
            file.write_bytes(make(n if name == "image" else n // 2))
            line[f"{name}_path"] = file.name
        lines.append(line)
    pairs = ",".join(f"{name}:text" for name in MAKERS)
    flags = ["--import-module", "examples.depth.shown", "--pairs", pairs, "--val-fraction", "0"]
    said = []
    for whole in (False, True):
        file = tmp_path / f"{whole}.jsonl"
        rows = [{**line, "start_s": 0.0} if whole else line for line in lines]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = parse_options([*flags, "--data", f"jsonl:{file}"])
        data = prepare_data(options, None, tmp_path / f"run-{whole}", workers=1)
        said.append(_repeated(data, options))
    different = [
        f"{NUMBER} samples have {NUMBER // 2} different {what};"
        for what in several("image", "video")
    ]
    assert [line.split(" in a batch")[0] for line in said[0]] == different
    different.append(f"{NUMBER} samples have {NUMBER // 2} different films;")
    assert sorted(line.split(" in a batch")[0] for line in said[1]) == sorted(different)
    assert all("left out of each other's loss" in line for lines in said for line in lines)


def several(*but):
    """What the values of each modality of files are called; the test has all of them."""
    assert {kind.name for kind in files_of()} == {*MAKERS}
    return [kind.several for kind in files_of() if kind.name not in but]


def test_rows_are_equal_where_all_of_their_columns_are():
    draw = np.random.default_rng(0)
    for number in (0, 1, 50):
        columns = [draw.integers(3, size=number) for _ in range(3)]
        assert _num_different(columns) == len({*zip(*(each.tolist() for each in columns))})
