"""What a command line says of regions and of a loss for each pair, and what is refused of it."""

from dataclasses import replace

import pytest

from data.modalities.tokenizer import train_tokenizer
from data.options import DataOptions, branches_of, compared, loss_names
from data.prepare import prepare_data
from data.stored.derived import REGIONS
from engine.config.reading import BranchesBlock
from launch.config.blocks import BalanceBlock
from launch.config.options import parse_options
from launch.run.folder import training_identity
from launch.setup.model import RunModel
from models.losses import MILNCE, InfoNCE, Sigmoid

PAIRS = "image:text,region:text:0.5"


def test_each_pair_has_its_loss():
    assert loss_names("sigmoid", PAIRS) == ("sigmoid", "sigmoid")
    assert loss_names("text:region=sigmoid", PAIRS) == ("infonce", "sigmoid")
    assert loss_names("image:text=sigmoid,region:text=mine", PAIRS) == ("sigmoid", "mine")
    for wrong in ("image:tone=sigmoid", "image:text=sigmoid,text:image=infonce", "image:text="):
        with pytest.raises(ValueError, match="write PAIR=LOSS once"):
            loss_names(wrong, PAIRS)


def test_regions_are_of_images_and_their_phrases_are_texts():
    assert branches_of(PAIRS) == branches_of("region:text") == ("image", "text")
    assert compared(PAIRS) == (("image", "text"), ("image", "region"))


def test_the_pair_of_regions_has_its_own_loss_scalars_and_positives():
    model = model_of("--pairs", PAIRS, "--loss", "region:text=sigmoid")
    (images, regions) = model.objective.terms
    assert isinstance(images.loss, InfoNCE) and isinstance(regions.loss, Sigmoid)
    assert regions.loss.targets.duplicates == "positives" != images.loss.targets.duplicates
    assert regions.weight == 0.5 and regions.name == "region_phrase"
    scalars = [f"region_phrase_logit_{name}" for name in ("scale", "bias")]
    assert {"logit_scale", *scalars} == {*model.objective.scalars_of("image")}


def test_a_loss_without_further_positives_masks_regions_with_equal_phrases():
    """MIL-NCE, which was refused with the advice to give what had been given."""
    for loss, of_images in (("milnce", MILNCE), ("region:text=milnce", InfoNCE)):
        model = model_of("--pairs", PAIRS, "--loss", loss)
        images, regions = (pair.loss for pair in model.objective.terms)
        assert type(images) is of_images and isinstance(regions, MILNCE)
        assert images.targets.duplicates == regions.targets.duplicates == "masked"
    with pytest.raises(ValueError, match="'positives' are not for loss 'milnce'"):
        model_of("--pairs", PAIRS, "--loss", "image:text=milnce", "--duplicates", "positives")


def test_what_regions_cannot_be_compared_under_is_refused():
    model = model_of("--pairs", PAIRS)
    model.refuse_annotations(BranchesBlock(), REGIONS)
    with pytest.raises(ValueError, match="per_micro_batch"):
        model.refuse_annotations(BranchesBlock(schedule="per_micro_batch"), REGIONS)
    kept = BalanceBlock(strategy="feed", kept_patches=(0.5, 1.0))
    with pytest.raises(ValueError, match="kept_patches"):
        model.refuse_annotations(BranchesBlock(balance=kept), REGIONS)
    model_of().refuse_annotations(BranchesBlock(schedule="per_micro_batch", balance=kept), None)


def test_a_tower_whose_buffers_no_rule_averages_is_refused(monkeypatch):
    model = model_of()
    model.refuse_changing_buffers()
    monkeypatch.setattr("launch.setup.model.changing_buffers", lambda tower: ["image.norm.mean"])
    with pytest.raises(ValueError, match="image tower .*changes the buffer 'image.norm.mean'"):
        model.refuse_changing_buffers()


def test_options_of_regions_decide_what_is_trained_where_there_are_any():
    """Runs of versions without them go on."""
    for pairs, decides in (("image:text", False), (PAIRS, True)):
        options = parse_options(["--data", "demo", "--pairs", pairs]).record()
        found = training_identity(options, {}, {})["options"]
        assert ({"max_regions", "max_negatives"} <= found.keys()) == decides
    with pytest.raises(SystemExit):
        parse_options(["--data", "demo", "--max-regions", "3"])


def model_of(*flags: str) -> RunModel:
    options = parse_options(["--data", "demo", *flags])
    return RunModel.of(replace(options, label_smoothing=0.0), train_tokenizer(["a dog", "a cat"]))


def test_data_without_a_region_are_refused(tmp_path):
    options = parse_options(["--data", "demo", "--pairs", PAIRS]).part(DataOptions)
    with pytest.raises(ValueError, match="no training sample has region, .* leave region:text out"):
        prepare_data(options, None, tmp_path)
