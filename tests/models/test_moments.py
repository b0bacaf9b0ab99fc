"""Embeddings of moments are means of frames by the time that each stands for."""

import numpy as np
import pytest
import torch

from models.towers.building import meta_inputs, with_head
from models.towers.moments import span_weights
from models.towers.video import video_tower

SIZE, NAME = 32, "resnet18:layers=1-1-1-1"
# three clips: of four frames, of one, of two
MS = torch.tensor([0, 300, 700, 1000, 0, 0, 500])
FRAME_ROW = torch.tensor([0, 0, 0, 0, 1, 2, 2])
SPANS = torch.tensor(
    [[100, 400], [-200, 50], [900, 4000], [520, 521], [3000, 3001], [-50, 700], [0, 0]],
    dtype=torch.int32,
)
ROW = torch.tensor([0, 0, 0, 0, 1, 2, 2])


def test_a_frame_counts_by_the_milliseconds_that_are_nearest_to_it():
    """Counted millisecond by millisecond, in the middle of each; also before the first frame and
    behind the last one. What has no length, as of a clip that could not be read, is a
    millisecond."""
    expected = np.zeros((len(SPANS), len(MS)))
    for n, (start, end) in enumerate(SPANS.tolist()):
        own = np.flatnonzero((FRAME_ROW == ROW[n]).numpy())
        for at in np.arange(start, max(end, start + 1)) + 0.5:
            expected[n, own[np.abs(MS.numpy()[own] - at).argmin()]] += 1
    expected /= expected.sum(1, keepdims=True)
    found = span_weights(SPANS, ROW, FRAME_ROW, MS)
    assert np.abs(found.numpy() - expected).max() < 1e-6
    assert torch.equal(found.sum(1), torch.ones(len(SPANS)))


@pytest.mark.parametrize("time", ["mean", "transformer,time_layers=1"])
def test_a_moment_of_one_frame_is_that_frame_and_one_of_all_their_mean(time):
    tower = with_head(video_tower(f"{NAME},time={time}", SIZE, 3), 8, {}, annotations="moment")
    layers = [spec.build(0).eval() for spec in tower.specs]
    frames = torch.randn(5, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    tensors = {
        "video_frames": frames,
        "video_row": torch.tensor([0, 0, 0, 1, 1]),
        "video_time": torch.tensor([0, 400, 800, 0, 400]),
        "moment_spans": torch.tensor([[350, 450], [0, 401], [-200, 1000]], dtype=torch.int32),
        "moment_row": torch.tensor([1, 0, 0]),
    }
    with torch.no_grad():
        for layer in layers[:-1]:
            tensors = layer(tensors)
        seen = tensors["moment_frames"]
        made = layers[-1](dict(tensors))
    assert seen.shape == (5, tower.width) and "moment_frames" not in made
    first = (200 * seen[0] + 201 * seen[1]) / 401  # up to the middle between both, and from there
    every = (400 * seen[0] + 400 * seen[1] + 400 * seen[2]) / 1200
    projection = layers[-1].moment_projection
    expected = torch.nn.functional.normalize(
        projection(torch.stack([seen[4], first, every])), dim=1
    )
    torch.testing.assert_close(made["moment_embeds"], expected, rtol=1e-5, atol=1e-6)
    assert made["video_embeds"].shape == (2, 8)
    plain = with_head(video_tower(f"{NAME},time={time}", SIZE, 3), 8, {})
    given = {name: tensors[name] for name in ("video_features",)}
    with torch.no_grad():  # the clip itself is what it is without moments
        alone = plain.specs[-1].build(0).eval()(given)["video_embeds"]
    assert torch.equal(alone, made["video_embeds"])


def test_without_moments_there_are_no_rows_and_shapes_are_known_beforehand():
    tower = with_head(video_tower(NAME, SIZE, 3), 8, {}, annotations="moment")
    tensors = meta_inputs(tower, 2)
    for spec in tower.specs:
        tensors = spec.template(tensors)
    assert tensors["moment_embeds"].shape == (0, 8) and tensors["video_embeds"].shape == (2, 8)
    assert tower.config["moments"]


def test_a_network_of_whole_clips_is_refused():
    with pytest.raises(
        ValueError, match="r3d_18' sees whole clips.*take the name of an image tower"
    ):
        with_head(video_tower("r3d_18", SIZE, 3), 8, {}, annotations="moment")
