"""A model with adapters, exported: merged into its weights, or as peft's files beside them. A fresh
process that knows nothing of ours gets the embeddings of the training stages from either."""

import json
import shutil

import pytest
import torch
from exports import (
    CAPTIONS,
    SIZE,
    TOKENS,
    assert_same,
    embed_by_pages,
    embeddings,
    model_with_depth,
    trained_model,
)
from neighbours import neighbour
from rounding import assert_equal_rows
from safetensors.torch import load_file

from data.modalities.tokenizer import batch_tokens
from launch.config.imported import options_of_import
from launch.exporting.writing import canonical_state, write_export
from launch.inference.trained import open_model_folder
from models.towers.adapters.lora import LoRA
from models.weights.names import OWN_TOWERS

pytest.importorskip("peft", reason="adapters are made by peft")

exporting = neighbour("launch/test_exporting.py")
BERT, CLIP, HF_CLIP, HF_VIT = exporting.BERT, exporting.CLIP, exporting.HF_CLIP, exporting.HF_VIT
OPEN_CLIP, CLIP_TEXT = exporting.OPEN_CLIP, exporting.CLIP_TEXT
TIMM_VIT, VIT = exporting.TIMM_VIT, exporting.VIT
ATTENTION, ALL = LoRA(r=3, alpha=6), LoRA(r=2, target="all")
# image tower, text tower, loss, adapters by branch: in transformers' model of both, in a state dict
# by transformers and by other libraries
MODELS = {
    "CLIPModel": (HF_CLIP, CLIP, "infonce", {"image": ALL, "text": ATTENTION}),
    "towers of transformers": (HF_VIT, BERT, "infonce", {"image": ATTENTION, "text": ALL}),
    "state dict": (TIMM_VIT, f"{BERT},pool=mean", "infonce", {"image": ALL, "text": ATTENTION}),
    "attention in one": (OPEN_CLIP, BERT, "infonce", {"image": ATTENTION}),
}


def adapted_model(image_tower, text_tower, loss, adapters):
    return trained_model(image_tower, text_tower, loss, adapters=adapters)


@pytest.fixture(scope="module")
def exports(module_folder):
    """name -> (what makes the model, its merged export, the one with the adapters apart, what fresh
    processes made by their pages)."""
    root, made = module_folder("exports"), {}
    for number, (name, model) in enumerate(MODELS.items()):
        merged, apart = root / f"{number} merged", root / f"{number} apart"
        write_export(adapted_model(*model), merged)
        write_export(adapted_model(*model), apart, keep_adapters=True)
        made[name] = model, merged, apart
    found = embed_by_pages(root, [folder for _, *folders in made.values() for folder in folders])
    return {name: (*own, found[2 * i : 2 * i + 2]) for i, (name, own) in enumerate(made.items())}


@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_process_gets_the_embeddings_of_the_training_stages(exports, name):
    model, _, _, found = exports[name]
    for by_page in found:
        assert_same(adapted_model(*model), by_page)


@pytest.mark.parametrize("name", MODELS)
def test_the_adapters_are_apart_and_are_read_back(exports, name, tmp_path):
    model, merged, apart, found = exports[name]
    branches = model[-1]
    assert not (merged / "adapters").exists()
    assert {folder.name for folder in (apart / "adapters").iterdir()} == set(branches)
    before, after = (load_file(folder / "model.safetensors") for folder in (apart, merged))
    assert before.keys() == after.keys()
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    record = json.loads((apart / "wye.json").read_text())["adapters"]
    assert len(moved) == sum(len(own["modules"]) for own in record.values())
    trained, again = adapted_model(*model), open_model_folder(apart)
    given = batch_tokens(trained.tokenizer, CAPTIONS, TOKENS)[0]
    given |= {"pixel_values": found[1]["pixel_values"]}
    one, two = (embeddings(each.layers, given) for each in (trained, again))
    for key in ("image_embeds", "text_embeds"):
        assert_equal_rows(one[key], two[key])
    assert trained.options is not again.options and again.checksum().count("-") == len(branches)
    with pytest.raises(ValueError, match="export without --keep-adapters"):
        options_of_import(apart)
    # a name becomes part of a path, so those of no tower are not looked for
    copy = shutil.copytree(apart, tmp_path / "copy")
    changed = json.loads((copy / "wye.json").read_text())
    changed["adapters"]["../../elsewhere"] = next(iter(record.values()))
    (copy / "wye.json").write_text(json.dumps(changed))
    assert len(open_model_folder(copy).layers) == len(again.layers)


def test_what_cannot_be_kept_apart_is_refused(tmp_path):
    model = adapted_model(OPEN_CLIP, CLIP_TEXT, "infonce", {"image": ATTENTION})
    with pytest.raises(ValueError, match="--keep-adapters: .* --format open_clip has others"):
        write_export(model, tmp_path / "out", form="open_clip", keep_adapters=True)
    with pytest.raises(ValueError, match="has no adapters"):
        write_export(trained_model(VIT, BERT, "infonce"), tmp_path / "none", keep_adapters=True)


@pytest.fixture
def with_depth(registries):
    """A model with a tower of one's own, all of whose towers have adapters."""
    return model_with_depth(VIT, BERT, "infonce", ALL)


def test_those_of_a_tower_of_ones_own_are_merged(with_depth, tmp_path):
    given = {"depth_values": torch.rand(4, 1, SIZE, SIZE)}
    before = embeddings(with_depth.layers_of("depth"), given)["depth_embeds"]
    scalar = canonical_state(with_depth.layers)["head.depth_text_logit_scale"]
    write_export(with_depth, tmp_path / "out")
    assert not [name for name in load_file(tmp_path / "out" / OWN_TOWERS) if ".lora_" in name]
    again = open_model_folder(tmp_path / "out")
    assert again.by_branch.keys() == {"image", "text", "depth"}
    after = embeddings(again.layers_of("depth"), given)["depth_embeds"]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)  # fp32 at values of at most 1
    assert canonical_state(again.layers)["head.depth_text_logit_scale"] == scalar


def test_those_of_a_tower_of_ones_own_are_not_kept_apart(with_depth, tmp_path):
    with pytest.raises(ValueError, match="--keep-adapters: those of the depth tower are not"):
        write_export(with_depth, tmp_path / "out", keep_adapters=True)
    assert not (tmp_path / "out").exists()
