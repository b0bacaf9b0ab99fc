"""Windows of films by towers that were built, not trained."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import ROOT
from rounding import assert_equal_rows

sys.path.insert(0, str(ROOT / "tests/data"))
from bad_films import film, with_bad_frame  # noqa: E402

from data.clips import Clip  # noqa: E402
from data.index.sources import open_source  # noqa: E402
from data.modalities.preprocessing import Preprocessing  # noqa: E402
from launch.inference.clips import embedded_windows  # noqa: E402
from launch.inference.embedding import Embedder, as_source  # noqa: E402
from launch.inference.trained import Trained  # noqa: E402
from launch.modalities import Vocabulary, tower_of  # noqa: E402
from models.towers.video import TimeBlock  # noqa: E402

pytest.importorskip("av", reason="pip install -r requirements-audio.txt")

SIZE, FRAMES = 32, 8
VIT = (
    "vit_b_32:patch_size=16,num_layers=1,hidden_dim=32,num_heads=2,mlp_dim=64,dropout=0,"
    "attention_dropout=0"
)
VIDEOMAE = "hf:videomae-base:hidden_size=32,num_hidden_layers=1,num_attention_heads=2"
VIDEOMAE += ",intermediate_size=48,patch_size=16"
TOWERS = (f"{VIT},time=transformer,time_layers=1,time_heads=2", VIT, VIDEOMAE)
VARIED = (*range(8), 30, 31, 32, 50, 51, 52, 53)  # when its frames begin, in thirtieths


def embedder_of(name, batch_size):
    options = {"pairs": "video:text", "video_tower": name, "video_frames": FRAMES}
    options |= {"image_size": SIZE, "embed_dim": 16, "seed": 0} | Preprocessing().options(SIZE)
    tower = tower_of("video", options, Vocabulary.of(None), {})
    layers = [spec.build(1).eval() for spec in tower.specs]
    torch.manual_seed(1)
    for layer in layers:
        if isinstance(layer, TimeBlock):  # whose outputs begin as zeros
            torch.nn.init.normal_(layer.out.weight, std=0.2)
    trained = Trained({"options": options}, Path("step-00000001"), 1, None, (tower,), layers)
    return Embedder(trained, "cpu", batch_size, 0)


@pytest.fixture
def source(tmp_path):
    """Films with clips: of a constant and of a variable rate, one with a bad frame, and one that is
    gone when it is read."""
    contents = {
        "even": film(60),
        "varied": film(len(VARIED), pts=VARIED),
        "broken": with_bad_frame(film(60), 42),
        "gone": film(50),
    }
    rows = []
    for name, content in contents.items():
        (tmp_path / f"{name}.mp4").write_bytes(content)
        for start_s, end_s in ((0.0, 0.3), (0.4, 1.0), (0.2, 1.4)):
            row = {"video_path": f"{name}.mp4", "start_s": start_s, "end_s": end_s, "text": name}
            rows.append(json.dumps(row))
    (tmp_path / "films.jsonl").write_text("\n".join(rows))
    source = open_source(f"jsonl:{tmp_path}/films.jsonl", [("video", "text")])
    (tmp_path / "gone.mp4").unlink()
    return source


@pytest.mark.parametrize("name", TOWERS)
def test_windows_are_embedded_as_clips_of_their_own(name, source, capsys):
    """Each by itself, with frames and times of its own, though all windows of a film are loaded
    with its frames once; in batches that end between two windows of a film."""
    embedder, alone, seen = embedder_of(name, 12), embedder_of(name, 1), []
    embedder.layers["video"][0].register_forward_pre_hook(
        lambda _, given: seen.append(len(given[0]["video_frames"]))
    )
    samples = np.arange(len(source))
    found = [*embedded_windows(embedder, source, samples)]
    said = capsys.readouterr().out
    assert [own for own, *_ in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert "Its windows are left out" in said and "unreadable" in said
    for own, spans, embeds in found:
        where = source.value("video", own[0]).film
        clips = [Clip(where, *span) for span in spans.tolist()]
        expected = alone.rows("video", as_source(clips), np.arange(len(clips)))
        assert len(expected.embeds) == len(spans) > 7  # none that cannot be read
        assert_equal_rows(embeds, expected.embeds)
        assert (embeds[:-1] - embeds[1:]).norm(dim=1).max() > 1e-3
    assert sum(seen) < FRAMES * sum(len(spans) for _, spans, _ in found) / 2
    even, varied, broken = (spans for _, spans, _ in found)
    assert len(broken) < len(even)
    in_the_gap = (8 / 30 < varied[:, 0]) & (varied[:, 1] < 1)
    assert in_the_gap.any()  # where all times show one frame
