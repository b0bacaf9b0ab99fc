"""Branches, pairs and objectives: what belongs to whom, and what is refused."""

import pytest

from engine.objective import Branch, Objective, Pair, loss_metric
from models.losses import InfoNCE, Matching, Sigmoid

IMAGE, TEXT, SOUND = (
    Branch("image", ("pixel_values",)),
    Branch("text", ("input_ids", "attention_mask")),
    Branch("sound", ("samples",)),
)
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
    with pytest.raises(
        ValueError,
        match="tensor 'video_hidden' belongs to no branch: a name begins with one of image_, text_, sound_",
    ):
        OBJECTIVE.branch_of("video_hidden")


def test_an_evaluation_compares_also_what_no_loss_does():
    assert [each.name for each in OBJECTIVE.comparisons] == [
        "image_text",
        "sound_text",
        "image_sound",
    ]
    assert OBJECTIVE.links == (
        ("image", "text"),
        ("text", "image"),
        ("sound", "text"),
        ("text", "sound"),
    )


def test_the_longest_name_decides():
    long = Objective(
        (Branch("text"), Branch("text_title")), (Pair("text", "text_title", InfoNCE()),)
    )
    assert [long.branch_of(name) for name in ("text_embeds", "text_title_embeds")] == [
        "text",
        "text_title",
    ]


def test_scalars_belong_to_the_first_branch_of_their_pair():
    assert OBJECTIVE.scalars_of("image") == InfoNCE.parameters
    assert OBJECTIVE.scalars_of("text") == {}
    assert OBJECTIVE.scalars_of("sound") == {
        f"sound_text_{name}": value for name, value in Sigmoid.parameters.items()
    }


def test_all_ranks_go_through_the_links_in_one_order():
    assert OBJECTIVE.names == ("image", "text", "sound")
    assert OBJECTIVE.links == (
        ("image", "text"),
        ("text", "image"),
        ("sound", "text"),
        ("text", "sound"),
    )


def test_losses_are_named_after_their_pairs_where_there_are_several():
    one = Objective(
        (IMAGE, TEXT), (Pair("image", "text", InfoNCE(), weight=2.0, matching=Matching()),)
    )
    assert one.losses == {"contrastive": 2.0, "matching": 2.0}
    assert OBJECTIVE.losses == {"contrastive/image_text": 1.0, "contrastive/sound_text": 1.0}
    assert [loss_metric(name) for name in (*one.losses, *OBJECTIVE.losses)] == [
        *("contrastive_loss", "matching_loss"),
        *("contrastive_loss/image_text", "contrastive_loss/sound_text"),
    ]


@pytest.mark.parametrize(
    ("branches", "pairs", "words"),
    [
        ((IMAGE, IMAGE), (Pair("image", "text", InfoNCE()),), "do not have different names"),
        (
            (IMAGE, TEXT),
            (Pair("image", "txet", InfoNCE()),),
            "pair image_txet is of branch txet, which is none of image, text",
        ),
        ((IMAGE, TEXT), (Pair("text", "text", InfoNCE()),), "compares a branch with itself"),
        (
            (IMAGE, TEXT),
            (Pair("image", "text", InfoNCE()), Pair("text", "image", InfoNCE(), prefix="a_")),
            "compare two branches twice",
        ),
        (
            (IMAGE, TEXT, SOUND),
            (Pair("image", "text", InfoNCE()),),
            "branch sound is in no pair, so it would not learn",
        ),
        (
            (IMAGE, TEXT, SOUND),
            (Pair("image", "text", InfoNCE()), Pair("sound", "text", InfoNCE())),
            "logit_scale, logit_scale do not have different names; give pairs a prefix",
        ),
        (
            tuple(map(Branch, ("a", "b_c", "a_b", "c"))),
            (Pair("a", "b_c", InfoNCE()), Pair("a_b", "c", InfoNCE(), prefix="c_")),
            "two pairs have the same name among a_b_c, a_b_c",
        ),
        (
            (IMAGE, Branch("head")),
            (Pair("image", "head", InfoNCE()),),
            "a branch is called head, which has a meaning of its own",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(branches, pairs, words):
    with pytest.raises(ValueError, match=words):
        Objective(branches, pairs)
