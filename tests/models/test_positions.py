"""Positions for longer texts and for images of other sizes than the weights have: against the
published formula, the libraries' own interpolation, and through a whole tower."""

import logging

import pytest
import torch
from rounding import assert_equal_rows
from transformers import T5Config, T5EncoderModel

from models.towers.image import image_tower
from models.towers.text import text_tower
from models.weights.positions import resized_positions, stretched_positions
from models.weights.reading import open_weights


def long_clips(weight: torch.Tensor) -> torch.Tensor:
    """Four times as many behind the first 20, written out (Zhang et al. 2024): between two old rows
    a quarter, a half and three quarters of the way; behind the last one on by its last step."""
    rows = [*weight[:20]]
    for i in range(20, len(weight)):
        step = weight[i + 1] - weight[i] if i + 1 < len(weight) else weight[i] - weight[i - 1]
        rows += [weight[i] + step * quarter / 4 for quarter in range(4)]
    return torch.stack(rows)


def test_stretched_as_long_clip():
    weight = torch.randn(77, 6, generator=torch.Generator().manual_seed(0))
    made = stretched_positions(weight, 248)
    assert made.shape == (248, 6) and torch.equal(made[:20], weight[:20])
    assert_equal_rows(made, long_clips(weight))


def test_stretched_to_any_length():
    """What lies on a line stays on it, whatever the length."""
    line = torch.arange(30.0)[:, None] * torch.tensor([[1.0, -2.0]])
    for positions in (31, 37, 200):
        made = stretched_positions(line, positions, kept=5)
        expected = 5 + torch.arange(positions - 5.0) * 25 / (positions - 5)
        torch.testing.assert_close(made[5:, 0], expected)
        assert torch.equal(made[:5], line[:5]) and torch.allclose(made[:, 1], -2 * made[:, 0])
    for positions, kept in ((30, 5), (20, 5), (60, 29)):
        with pytest.raises(ValueError, match="30 positions cannot be stretched"):
            stretched_positions(line, positions, kept)


SIZES = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=48"


@pytest.mark.parametrize(
    ("name", "first"), [("bert-mini", 0), ("roberta-base", 2), ("clip-text-base", 0)]
)
def test_a_tower_with_more_positions_than_its_weights(tmp_path, caplog, name, first):
    """RoBERTa's table begins with two rows of no position, which stay as well."""

    def tower_of(positions):
        return text_tower(f"{name}:{SIZES},max_position_embeddings={positions}", 50, 16, 1, 3)

    state = {
        layer.canonical_names[local].removeprefix("text."): tensor
        for layer in [spec.build(1) for spec in tower_of(40).specs]
        for local, tensor in layer.state_dict().items()
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    table = next(key for key in state if "position_embedding" in key)
    long = tower_of(90)
    reader = open_weights("text", str(tmp_path), long)
    with caplog.at_level(logging.WARNING):
        layer = long.specs[0].build(2, reader)
    (made,) = (t for local, t in layer.state_dict().items() if "position_embedding" in local)
    assert torch.equal(made, stretched_positions(state[table], 90, 20 + first))
    assert "has shape (40, 32) there and (90, 32) in the tower: interpolated" in caplog.text
    with pytest.raises(ValueError, match=r"\(40, 32\) there but \(30, 32\) in the tower"):
        open_weights("text", str(tmp_path), tower_of(30))


def test_a_rounded_table_of_tokens_loses_the_rows_of_no_token(tmp_path, caplog):
    """As T5 has 32,128 rows for 32,100 tokens. Any other difference is that of another tokenizer."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    for rows, tokens, fits in ((192, 60, False), (190, 164, False), (192, 164, True)):
        where = str(tmp_path / f"{rows}")
        published = T5EncoderModel(T5Config(vocab_size=rows, **sizes))
        published.save_pretrained(where)
        tower = text_tower(where, tokens, 8)
        if not fits:
            with pytest.raises(ValueError, match=rf"\({rows}, 16\) there but \({tokens}, 16\)"):
                open_weights("text", where, tower)
    with caplog.at_level(logging.WARNING):
        made = tower.specs[0].build(2, open_weights("text", where, tower))
    assert torch.equal(made.embeddings.weight, published.shared.weight[:tokens])
    assert "rows of no token are left out" in caplog.text


def test_clips_positions_follow_the_texts():
    """More tokens than the published model has need no further word; others must be told."""
    tower = text_tower(f"clip-text-base:{SIZES}", 50, 248, None, 3)
    shape = tower.specs[0].canonical_parameters["text.embeddings.position_embedding.weight"]
    assert shape == (248, 32)
    with pytest.raises(ValueError, match="has 512 positions.*or override max_position_embeddings"):
        text_tower("bert-mini", 50, 600)


@pytest.mark.parametrize(
    "name", ["hf-clip", "hf-siglip", "hf-vit", "hf-dinov2", "hf-dinov2-registers"]
)
def test_images_of_another_size_than_the_weights(cases, forward, tmp_path, name):
    """The tower made for larger images, with positions resized as they are read, gives what the
    library's model gives that interpolates in its forward."""
    case = cases[name]
    torch.manual_seed(0)
    model = case.library(dict.fromkeys(case.dropout, 0.0)).eval()
    model.save_pretrained(tmp_path)
    larger = image_tower(case.tower().name, 56)  # 7 x 7 patches instead of 4 x 4
    weights = open_weights("image", str(tmp_path), larger)
    layers = [spec.build(0, weights).eval() for spec in larger.specs]
    pixels = torch.randn(2, 3, 56, 56)
    more = {} if "dinov2" in name else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        expected = model(pixels, **more).pooler_output
        made = forward(layers, {"pixel_values": pixels})["image_features"]
        assert_equal_rows(made, expected)
        # the tower of the weights' own size takes larger images too
        own = [
            spec.build(0, open_weights("image", str(tmp_path), case.tower())).eval()
            for spec in case.tower().specs
        ]
        assert torch.equal(forward(own, {"pixel_values": pixels})["image_features"], expected)


def test_positions_that_are_no_square_are_refused():
    with pytest.raises(ValueError, match="12 positions, 1 of which are of no patch"):
        resized_positions(torch.zeros(12, 4), 17, 1)
    torch.testing.assert_close(resized_positions(torch.ones(1, 17, 4), 50, 1), torch.ones(1, 50, 4))
