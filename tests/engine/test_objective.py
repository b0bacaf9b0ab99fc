"""Branches, pairs and objectives: what belongs to whom, and what is refused."""

from dataclasses import replace

from refusals import not_refused, refused

from engine.objective import Branch, Objective, Pair, loss_metric
from models.losses import InfoNCE, Matching, Sigmoid

IMAGE, TEXT = Branch("image", ("pixel_values",)), Branch("text", ("input_ids", "attention_mask"))
SOUND, COMPARED = Branch("sound", ("samples",)), Pair("image", "text", InfoNCE())
OBJECTIVE = Objective(
    (IMAGE, TEXT, SOUND),
    (Pair("image", "text", InfoNCE()), Pair("sound", "text", Sigmoid(), prefix="sound_text_")),
)


def test_tensors_belong_to_the_branch_that_names_them_or_lists_them_or_owns_what_is_learned():
    owners = {
        "image": ["pixel_values", "image_embeds", "logit_scale"],
        "text": ["input_ids", "attention_mask", "text_hidden"],
        "sound": ["samples", "sound_position", "sound_text_logit_scale", "sound_text_logit_bias"],
    }
    for branch, tensors in owners.items():
        assert [OBJECTIVE.branch_of(tensor) for tensor in tensors] == [branch] * len(tensors)
    with refused("tensor 'video_hidden' belongs to no branch"):
        OBJECTIVE.branch_of("video_hidden")


def test_an_evaluation_compares_also_what_no_loss_does():
    compared = [each.name for each in OBJECTIVE.comparisons]
    assert compared == ["image_text", "sound_text", "image_sound"]
    assert OBJECTIVE.names == ("image", "text", "sound")


def test_a_branch_makes_further_rows_for_a_pair_of_their_own():
    regions = Pair("image", "text", InfoNCE(), prefix="region_", made=("region", "phrase"))
    whole = Objective((IMAGE, TEXT), (COMPARED, regions))
    assert [each.name for each in whole.comparisons] == ["image_text", "region_phrase"]
    alone = Objective((IMAGE, TEXT), (regions,))
    assert [each.name for each in alone.comparisons] == ["region_phrase", "image_text"]
    assert whole.made_by(["image"]) == ("image", "region") and whole.has_further_rows
    assert whole.branch_of("phrase_embeds") == "text"
    assert whole.scalars_of("image").keys() == {"logit_scale", "region_logit_scale"}
    with refused("rows of two branches"):
        Objective((IMAGE, TEXT), (COMPARED, replace(regions, made=("region", "image"))))


def test_the_longest_name_decides():
    names = ("text", "text_title")
    long = Objective(tuple(map(Branch, names)), (Pair(*names, InfoNCE()),))
    assert tuple(long.branch_of(f"{name}_embeds") for name in names) == names


def test_scalars_belong_to_the_first_branch_of_their_pair():
    assert OBJECTIVE.scalars_of("image") == InfoNCE.parameters
    assert OBJECTIVE.scalars_of("text") == {}
    assert OBJECTIVE.scalars_of("sound") == {
        f"sound_text_{name}": value for name, value in Sigmoid.parameters.items()
    }


def test_losses_are_named_after_their_pairs_where_there_are_several():
    one = Objective((IMAGE, TEXT), (replace(COMPARED, weight=2.0, matching=Matching()),))
    assert one.losses == {"contrastive": 2.0, "matching": 2.0}
    assert OBJECTIVE.losses == {"contrastive/image_text": 1.0, "contrastive/sound_text": 1.0}
    assert [loss_metric(name) for name in (*one.losses, *OBJECTIVE.losses)] == [
        *("contrastive_loss", "matching_loss"),
        *("contrastive_loss/image_text", "contrastive_loss/sound_text"),
    ]


def test_what_does_not_go_together_is_refused():
    letters = tuple(map(Branch, ("a", "b_c", "a_b", "c")))
    same_names = (Pair("a", "b_c", InfoNCE()), Pair("a_b", "c", InfoNCE(), prefix="c_"))
    twice = (COMPARED, Pair("text", "image", InfoNCE(), prefix="a_"))
    no_prefix, two = (COMPARED, Pair("sound", "text", InfoNCE())), (IMAGE, TEXT)
    cases = [
        ((IMAGE, IMAGE), (COMPARED,), "do not have different names"),
        (two, (Pair("image", "txet", InfoNCE()),), "pair image_txet is of branch txet"),
        (two, (Pair("text", "text", InfoNCE()),), "compares a branch with itself"),
        (two, twice, "compare two branches twice"),
        ((*two, SOUND), (COMPARED,), "branch sound is in no pair, so it would not learn"),
        ((*two, SOUND), no_prefix, "do not have different names; give pairs a prefix"),
        (letters, same_names, "two pairs have the same name among a_b_c, a_b_c"),
        ((IMAGE, Branch("head")), (Pair("image", "head", InfoNCE()),), "a branch is called head"),
    ]
    assert not_refused(Objective, cases) == []
