"""Split training equals unsplit training: loss, every gradient, clipping norms and parameters, for
every way to split.

Tolerances, fp32: see `check_gradients`.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from split_training import (
    LR,
    RELATIVE,
    Case,
    assemble,
    check_gradients,
    compared,
    disagreement,
    refusal,
    train_split,
    train_whole,
)
from three_branches import (
    PAIRS,
    WEIGHTS,
    ThreeBranches,
    evaluate_three_split,
    evaluate_three_whole,
    train_three_split,
    train_three_whole,
    train_with_alignment,
)


def fork(image, text, micro_batch_size="auto", **kwargs):
    """image, text: (stages, replicas)."""
    return Case(
        "fork",
        {"image": image[0], "text": text[0]},
        {"image": image[1], "text": text[1]},
        micro_batch_size,
        **kwargs,
    )


def chain(image, text, replicas, micro_batch_size, **kwargs):
    return Case("chain", {"image": image, "text": text}, replicas, micro_batch_size, **kwargs)


def merged(stages, replicas, micro_batch_size, **kwargs):
    return Case("merged", {"merged": stages}, replicas, micro_batch_size, **kwargs)


# 24 samples: micro-batches of 24, 8 and 3 are 1, 3 and 8 micro-batches on one replica.
CASES = [
    merged(1, 1, 24),
    merged(1, 1, 8, towers="resnet+bert"),
    merged(1, 2, 4, zero_stage=0),
    merged(2, 1, 3),
    merged(2, 2, 12, towers="resnet+bert"),
    merged(4, 2, 4),
    chain(1, 1, 1, 24, towers="resnet+bert"),
    chain(2, 1, 1, 8, zero_stage=0),
    chain(2, 2, 1, 3),
    chain(1, 2, 2, 12),
    fork((1, 1), (1, 1), {"image": 8, "text": 24}, towers="resnet+bert"),
    fork((1, 1), (1, 1), 3),
    fork((1, 2), (1, 2), 4, zero_stage=0),
    fork((1, 2), (1, 1), {"image": 12, "text": 3}, towers="resnet+bert"),
    fork((1, 3), (1, 1), {"image": 8, "text": 24}),
    fork((1, 1), (1, 2), {"image": 8, "text": 6}),
    fork((2, 1), (1, 1), {"image": 3, "text": 8}, towers="resnet+bert"),
    fork((2, 2), (1, 3), {"image": 4, "text": 8}),
    fork((3, 1), (4, 1), {"image": 8, "text": 3}),
    fork((4, 1), (1, 2), {"image": 3, "text": 12}),
    fork((1, 2), (1, 1), {"image": 4, "text": 3}, towers="resnet, max+bert, mean"),
    chain(1, 1, 1, 8, towers="resnet, max+bert, mean"),
    fork((2, 1), (1, 2), {"image": 6, "text": 4}, towers="vit, attention+clip, attention"),
    merged(2, 1, 8, towers="vit, attention+clip, attention"),
    fork((1, 2), (1, 1), {"image": 4, "text": 8}, towers="vit, avg+bert, last"),
    fork((2, 1), (3, 1), {"image": 4, "text": 8}, towers="swin+mpnet"),
    fork((1, 1), (4, 1), {"image": 8, "text": 3}, towers="siglip+t5"),
    fork((2, 1), (2, 2), {"image": 8, "text": 4}, towers="dinov2+modernbert"),
    merged(3, 1, 8, towers="convnext+siglip"),
    chain(2, 3, 1, 6, towers="swin+mpnet"),
    fork((1, 1), (3, 1), {"image": 8, "text": 4}, towers="siglip+t5", schedule="replay"),
    fork((2, 1), (3, 1), {"image": 4, "text": 8}, towers="tnt+coca"),
    fork((2, 2), (2, 1), {"image": 6, "text": 4}, towers="dinov3+open_clip"),
    fork((1, 1), (3, 1), {"image": 8, "text": 4}, towers="tnt+coca", schedule="replay"),
    chain(2, 3, 1, 6, towers="swin_t+open_clip"),
]


def whole_batches(case):
    """(micro_batch_size, micro-batches of all replicas) per branch, as the reference runs them."""
    size = {
        b: case.micro_batch_size[b]
        if isinstance(case.micro_batch_size, dict)
        else case.micro_batch_size
        for b in ("image", "text")
    }
    return {branch: (s, case.global_batch_size // s) for branch, s in size.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_every_gradient_equal_unsplit_training(case):
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert len({r["metrics"][0].loss for r in results}) == 1, "every rank tells the same loss"
    assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    for group, norm in reference["norms"][0].items():
        assert results[0]["metrics"][0].grad_norm[group] == pytest.approx(norm, rel=RELATIVE), group
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )


DRAWING = {"dropout": 0.1, "towers": "resnet+bert"}  # dropout and batch normalisation


@pytest.mark.parametrize("schedule", ["batch_sync", "replay"])
@pytest.mark.parametrize(
    "case",
    [
        merged(1, 1, 3, **DRAWING),
        merged(3, 1, 3, **DRAWING),
        chain(2, 2, 1, 3, **DRAWING, zero_stage=0),
        fork((1, 1), (1, 1), {"image": 6, "text": 3}, **DRAWING),
        fork((2, 1), (1, 2), {"image": 3, "text": 4}, **DRAWING),
        merged(2, 1, 3, **DRAWING, checkpoint_interval=1),
        fork((2, 1), (2, 1), {"image": 3, "text": 8}, **DRAWING, checkpoint_interval=2),
    ],
    ids=str,
)
def test_both_schedules_equal_unsplit_training_with_dropout_and_running_statistics(case, schedule):
    check_with_running_statistics(replace(case, schedule=schedule))


@pytest.mark.parametrize(
    "case",
    [
        merged(2, 1, 3, **DRAWING, kept_micro_batches=3),
        chain(2, 1, 1, 3, **DRAWING, kept_micro_batches=1),
        fork(
            (1, 1),
            (1, 1),
            {"image": 6, "text": 3},
            **DRAWING,
            kept_micro_batches={"image": 2, "text": 8},
        ),
        fork(
            (2, 1),
            (1, 2),
            {"image": 3, "text": 4},
            **DRAWING,
            kept_micro_batches={"image": 5, "text": 1},
        ),
    ],
    ids=str,
)
def test_replay_that_keeps_some_activations_equals_unsplit_training(case):
    check_with_running_statistics(replace(case, schedule="replay"))


USERS_OWN = {"schedule": "one_by_one", "imported": "examples.schedule", **DRAWING}


@pytest.mark.parametrize(
    "case",
    [
        merged(2, 1, 3, **USERS_OWN, kept_micro_batches=3),
        chain(2, 2, 1, 3, **USERS_OWN),
        fork(
            (2, 1),
            (1, 2),
            {"image": 3, "text": 4},
            **USERS_OWN,
            kept_micro_batches={"image": 5, "text": 1},
        ),
        merged(3, 1, 3, **USERS_OWN, checkpoint_interval=1),
    ],
    ids=str,
)
def test_the_example_of_a_users_own_schedule_equals_unsplit_training(case):
    check_with_running_statistics(case)


def random_deal(seed, replicas, num_micro_batches, num_places=24):
    """[replica][micro-batch] -> places of samples, of all sizes from 1."""
    draw = random.Random(seed)
    places = draw.sample(range(num_places), num_places)
    ends = sorted(draw.sample(range(1, num_places), replicas * num_micro_batches - 1))
    parts = [tuple(places[a:b]) for a, b in zip([0, *ends], [*ends, num_places])]
    return tuple(
        tuple(parts[r * num_micro_batches : (r + 1) * num_micro_batches]) for r in range(replicas)
    )


def equal_deal(replicas, num_micro_batches, num_places=24):
    """[replica][micro-batch] -> places of samples, in order."""
    size = num_places // (replicas * num_micro_batches)
    return tuple(
        tuple(
            tuple(range((r * num_micro_batches + m) * size, (r * num_micro_batches + m + 1) * size))
            for m in range(num_micro_batches)
        )
        for r in range(replicas)
    )


def test_more_micro_batches_than_planned_keep_activations_in_proportion():
    """A replay of 2 text micro-batches that keeps one, dealt to 8, of which it keeps 4: the other 4
    run forward twice, and nothing else changes."""
    planned = {"schedule": "replay", "kept_micro_batches": {"image": 1, "text": 1}}
    case = fork(
        (1, 1),
        (1, 1),
        {"image": 6, "text": 12},
        **planned,
        deals={"text": random_deal(4, 1, 8)},
        kept_of_deals={"text": 4},
    )
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )
    image, text = (set(result["forwards"].values()) for result in results)
    assert image == {4 + 3} and text == {8 + 4}


@pytest.mark.parametrize(
    "case",
    [
        merged(1, 1, 6, deals=dict.fromkeys(("image", "text"), random_deal(0, 1, 4))),
        merged(
            2, 2, 4, deals=dict.fromkeys(("image", "text"), random_deal(1, 2, 3)), schedule="replay"
        ),
        chain(
            1, 2, 1, 6, deals=dict.fromkeys(("image", "text"), random_deal(2, 1, 7))
        ),  # 4 were planned
        # texts apart from their images on one line, as they are by default
        merged(1, 2, 4, deals={"image": equal_deal(2, 3), "text": random_deal(11, 2, 3)}),
        merged(
            2,
            1,
            8,
            deals={"image": equal_deal(1, 3), "text": random_deal(12, 1, 3)},
            schedule="replay",
            dropout=0.1,
        ),
        chain(
            1,
            1,
            2,
            4,
            deals={"image": equal_deal(2, 3), "text": random_deal(13, 2, 3)},
            schedule="replay",
        ),
        fork(
            (1, 1),
            (1, 1),
            {"image": 6, "text": 8},
            deals={"image": random_deal(3, 1, 4), "text": random_deal(4, 1, 3)},
        ),
        fork(
            (1, 2),
            (1, 1),
            {"image": 4, "text": 24},
            deals={"image": random_deal(5, 2, 3), "text": random_deal(6, 1, 1)},
            schedule="replay",
        ),
        fork(
            (2, 1),
            (1, 2),
            {"image": 3, "text": 4},
            deals={"image": random_deal(7, 1, 8), "text": random_deal(8, 2, 3)},
            dropout=0.1,
        ),
        fork((1, 2), (2, 1), {"image": 4, "text": 6}, deals={"image": random_deal(9, 2, 3)}),
    ],
    ids=str,
)
def test_how_samples_are_packed_changes_nothing(case):
    """Micro-batches of any samples and sizes, another deal for each branch of a fork; and the same
    loss and gradients as without any."""
    results = run_ranks(case.world_size, train_split, case)
    for reference in [train_whole(case, whole_batches(case))] + (
        [] if case.dropout else [train_whole(replace(case, deals={}), whole_batches(case))]
    ):
        assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
        check_gradients(
            assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
            reference["gradients"],
        )


@pytest.mark.parametrize(
    "case",
    [
        merged(1, 1, 8),
        merged(2, 2, 4),
        chain(1, 1, 2, 6, schedule="replay"),
        fork((1, 1), (1, 1), {"image": 8, "text": 24}),
        fork((1, 2), (2, 1), 4, schedule="replay", dropout=0.1),
        fork((1, 2), (1, 3), 4),
    ],
    ids=str,
)
def test_pairs_that_could_not_be_loaded_are_left_out(case):
    """Their pixels or tokens run through the tower, but neither half is anyone's partner or
    negative. A whole micro-batch may be missing."""
    case = replace(case, not_loaded={"image": (3, 4, 5, 6, 7, 23), "text": (0, 5, 12)}, steps=1)
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert {r["metrics"][0].left_out["image_text"] for r in results} == {8}
    assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )


BOTH = ("image", "text")
THREE_TEXTS = {"texts_per_image": (3,), "weighted": BOTH}


@pytest.mark.parametrize(
    "case",
    [
        merged(1, 1, 6, **THREE_TEXTS, label_smoothing=0.1),
        merged(
            2,
            2,
            4,
            **THREE_TEXTS,
            loss="sigmoid",
            deals=dict.fromkeys(BOTH, random_deal(1, 2, 3)),
            schedule="replay",
        ),
        merged(1, 2, 4, texts_per_image=(3,), schedule="per_micro_batch"),
        chain(1, 1, 2, 4, **THREE_TEXTS, not_loaded={"image": (3, 4, 23), "text": (0, 36)}),
        chain(2, 1, 1, 8, loss="sigmoid"),
        fork(
            (1, 2),
            (1, 1),
            {"image": 4, "text": 8},
            **THREE_TEXTS,
            label_smoothing=0.1,
            schedule="replay",
        ),
        fork(
            *((1, 2), (1, 2), {"image": 4, "text": 6}),
            **THREE_TEXTS,
            deals={"image": random_deal(5, 2, 3), "text": random_deal(8, 2, 2)},
            not_loaded={"image": (3, 4, 23), "text": (0, 36)},
        ),
        # as feed rates ask for it: texts dealt one by one, in more micro-batches than were planned
        fork(
            (1, 1),
            (1, 1),
            {"image": 6, "text": 8},
            texts_per_image=(3,),
            deals_texts=True,
            deals={"text": random_deal(10, 1, 8, 72)},
        ),
        fork(
            (2, 1),
            (1, 2),
            {"image": 3, "text": 6},
            **THREE_TEXTS,
            loss="sigmoid",
            not_loaded={"image": (3, 4, 23), "text": (0, 36)},
        ),
    ],
    ids=str,
)
def test_several_texts_per_image_weights_and_the_sigmoid_loss(case):
    """A text may be dealt to another micro-batch than its image; a sample is left out whole, with
    all its texts."""
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    metrics = results[0]["metrics"][0]
    assert metrics.left_out["image_text"] == (5 if case.not_loaded else 0)
    scalars = (
        {"logit_scale_exp": 10.0, "logit_bias": -10.0}
        if case.loss == "sigmoid"
        else {"logit_scale_exp": 1 / 0.07}
    )
    assert metrics.scalars == pytest.approx(scalars)
    assert metrics.loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )


@pytest.mark.parametrize(
    "case",
    [
        fork((1, 2), (2, 1), {"image": 4, "text": 8}, duplicates="positives", label_smoothing=0.1),
        fork((1, 1), (1, 2), {"image": 8, "text": 6}, duplicates="masked", schedule="replay"),
        merged(1, 1, 8, duplicates="masked", **THREE_TEXTS),
        merged(1, 2, 4, duplicates="positives", schedule="per_micro_batch"),
        chain(1, 1, 2, 4, duplicates="positives", **THREE_TEXTS, not_loaded={"image": (3, 23)}),
        fork((1, 1), (1, 1), 8, duplicates="masked", loss="sigmoid"),
        merged(1, 1, 8, duplicates="positives", loss="sigmoid"),
        fork((1, 1), (1, 1), 8, duplicates="negatives"),
    ],
    ids=str,
)
def test_samples_with_equal_values_are_positives_masked_or_negatives(case):
    """Equal images and equal texts overlap; equality is not passed on from sample to sample."""
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    metrics = results[0]["metrics"][0]
    assert metrics.loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    if case.schedule != "per_micro_batch":
        present = compared(case, 0)[0]
        equal = [case.keys("image", present)]
        texts = torch.cat([case.keys("text", case.rows_of("text", i[None], 0)) for i in present])
        equal.append(texts)
        repeated = torch.zeros(len(present), dtype=torch.bool)
        for keys in equal:
            same = keys[:, None] == keys
            whose = torch.arange(len(present)).repeat_interleave(len(keys) // len(present))
            same &= whose[:, None] != whose
            repeated |= same.any(1).view(len(present), -1).any(1)
        assert metrics.duplicates["image_text"] == int(repeated.sum()) > 0
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )


SOURCES = {"source_starts": (0, 5, 5, 20), "steps": 2}  # one has no samples
NOT_LOADED = {"image": (3, 4, 23), "text": (1,)}


@pytest.mark.parametrize(
    "case",
    [
        fork(
            (1, 1),
            (1, 1),
            {"image": 4, "text": 6},
            **THREE_TEXTS,
            **SOURCES,
            not_loaded=NOT_LOADED,
            label_smoothing=0.1,
        ),
        merged(1, 1, 8, loss="sigmoid", **SOURCES, not_loaded=NOT_LOADED),
        merged(1, 2, 4, schedule="per_micro_batch", **SOURCES),
        fork(
            (1, 1),
            (1, 1),
            {"image": 8, "text": 6},
            fusion=1,
            loss_weights={"contrastive": 0.5, "matching": 1.5},
            **SOURCES,
        ),
    ],
    ids=str,
)
def test_the_loss_of_each_source_is_the_mean_of_its_samples(case):
    """The contrastive one, of those that were not left out, in parts of the mean weight. It is
    part of the message of the metrics: no other is sent."""
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))["sample_losses"][0]
    metrics = results[0]["metrics"][0]
    assert all(
        repr(r["metrics"][0].sources) == repr(metrics.sources) for r in results
    )  # nan is not equal to itself
    for (samples, loss), first, last in zip(
        metrics.sources, case.source_starts, (*case.source_starts[1:], 24), strict=True
    ):
        expected = [reference[place] for place in range(first, last) if place in reference]
        assert samples == len(expected)
        assert (
            loss == pytest.approx(sum(expected) / samples, rel=RELATIVE)
            if samples
            else math.isnan(loss)
        )
    total = sum(samples for samples, _ in metrics.sources)
    assert total == len(reference) == 24 - metrics.left_out["image_text"]
    assert sum(n / total * loss for n, loss in metrics.sources if n) == pytest.approx(
        metrics.losses.get("contrastive_loss", metrics.loss), rel=1e-6
    )
    plain = run_ranks(case.world_size, train_split, replace(case, source_starts=None))[0]["metrics"]
    assert plain[0].sources == () and plain[0].loss == metrics.loss
    num_bytes = 8 * 2 * len(case.source_starts)  # of the step before, in a ring of all ranks
    assert (
        results[0]["metrics"][1].sent_bytes - plain[1].sent_bytes
        == 2 * (case.world_size - 1) * num_bytes
    )


def test_the_number_of_texts_may_change_from_step_to_step():
    """Also where messages have had the same shapes so far, and need not have been announced."""
    case = merged(2, 1, 8, full_texts=True, texts_per_image=(2, 1, 2, 3), steps=4)
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert [m.loss for m in results[0]["metrics"]] == pytest.approx(reference["losses"], rel=1e-4)


@pytest.mark.parametrize(
    "case, words",
    [
        (
            fork((1, 2), (1, 1), {"image": 4, "text": 8}, weighted=("text",)),
            "24 of 48 image rows and text rows of this batch came without a weight, the others "
            "with one",
        ),
        (
            merged(
                1,
                2,
                4,
                weighted=("image", "text"),
                not_loaded={"image": tuple(i for i in range(24) if i % 5)},
            ),  # the others have 0
            "all image rows, or all text rows, of this batch that could be loaded have weight 0",
        ),
        (
            merged(1, 2, 4, texts_per_image=(1, 3)),
            "24 rows of text came for a batch of 24 samples with 3 of them per sample, which "
            "needs 72",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused_on_all_ranks(case, words):
    said = run_ranks(case.world_size, refusal, case)
    assert all(words in each for each in said), said


@pytest.mark.parametrize(
    "case",
    [merged(1, 2, 4), fork((1, 2), (1, 1), {"image": 4, "text": 8}), chain(1, 1, 1, 8)],
    ids=str,
)
def test_branches_that_have_other_samples_at_their_places_are_refused(case):
    said = run_ranks(case.world_size, disagreement, case)
    assert all(
        "the image and text branches disagree about 24 samples of this batch" in each
        for each in said
    ), said


@pytest.mark.parametrize("branch", ["image", "text"])
@pytest.mark.parametrize(
    "layout",
    [
        lambda deals: fork((1, 1), (1, 1), 12, deals=deals),
        lambda deals: merged(1, 1, 12, deals=deals),
    ],
)
def test_a_sample_that_is_lost_is_no_sample_without_a_modality(layout, branch):
    """As many rows as were to come, one of them twice."""
    whole = ((tuple(range(12)), tuple(range(12, 24))),)
    lost = ((tuple(range(12)), (*range(12, 23), 22)),)
    case = layout({"image": whole, "text": whole, branch: lost})
    said = run_ranks(case.world_size, refusal, case)
    assert all("disagree about 1 samples" in each for each in said), said


def check_with_running_statistics(case):
    assert check_split(case) > 10


def check_split(case) -> int:
    """The number of running means compared."""
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert [m.loss for m in results[0]["metrics"]] == pytest.approx(
        reference["losses"], rel=RELATIVE
    )
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )
    compared = 0
    for result in results:
        for name, buffer in result["buffers"].items():
            if (
                name in reference["buffers"]
            ):  # num_batches_tracked too: each micro-batch counts once
                torch.testing.assert_close(
                    buffer,
                    reference["buffers"][name],
                    rtol=RELATIVE,
                    atol=1e-7,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
                compared += "running_mean" in name
    return compared


@pytest.mark.parametrize(
    "case", [merged(1, 2, 4), chain(2, 1, 1, 8), fork((2, 2), (1, 2), 4)], ids=str
)
def test_per_micro_batch_is_the_mean_of_the_losses_of_the_micro_batches(case):
    """Another objective: the same samples with fewer negatives each have a smaller loss."""
    case = replace(case, schedule="per_micro_batch", dropout=0.1)
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )
    assert (
        reference["losses"][0]
        < train_whole(replace(case, schedule="batch_sync"), whole_batches(case))["losses"][0] - 0.3
    )


@pytest.mark.parametrize(
    "case",
    [
        merged(1, 2, 4),
        fork((1, 2), (1, 1), {"image": 4, "text": 8}),
        fork((2, 2), (1, 3), {"image": 4, "text": 8}),
        chain(1, 1, 2, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replay_with_replicas_equals_batch_sync(case, precision):
    """The same numbers, not nearly: the second forward is the first again, and gradients are added
    up in the same order."""
    case = replace(case, precision=precision)
    batch_sync = run_ranks(case.world_size, train_split, replace(case, schedule="batch_sync"))
    for kept in (0, 1) if precision == "fp32" else (1,):
        replay = run_ranks(
            case.world_size, train_split, replace(case, schedule="replay", kept_micro_batches=kept)
        )
        for whole, again in zip(batch_sync, replay):
            assert whole["metrics"][0].loss == again["metrics"][0].loss
            for (name, _, expected), (_, _, gradient) in zip(
                whole["gradients"], again["gradients"], strict=True
            ):
                assert torch.equal(gradient, expected), name


@pytest.mark.parametrize(
    "case",
    [
        fork(
            (1, 2),
            (1, 1),
            {"image": 6, "text": 8},
            steps=5,
            clipping={"image": 0.5, "text": 1.0, "head": 0.1},
        ),
        fork(
            (2, 1),
            (1, 2),
            {"image": 8, "text": 4},
            steps=5,
            zero_stage=0,
            clipping={"image": 0.5, "head": 0.1},
        ),
        chain(2, 1, 2, 4, steps=5, clipping={"image": 0.5, "text": 1.0, "head": 0.1}),
        merged(2, 2, 6, steps=5, clipping={"image": 0.5, "text": 1.0, "head": 0.1}),
        fork(
            (1, 1),
            (2, 1),
            6,
            steps=5,
            schedule="replay",
            dropout=0.1,
            clipping={"image": 0.5, "text": 1.0, "head": 0.1},
        ),
    ],
    ids=str,
)
def test_parameters_after_five_clipped_steps_equal_unsplit_training(case):
    """AdamW divides a gradient by its own size: where the true gradient is zero, rounding decides
    the step. Key biases are left out, and of each parameter one element in a thousand, whose
    gradient may chance to be as small."""
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert [m.loss for m in results[0]["metrics"]] == pytest.approx(reference["losses"], rel=1e-4)
    for step, norms in enumerate(reference["norms"]):
        assert results[0]["metrics"][step].grad_norm == pytest.approx(norms, rel=1e-4)
    seen = set()
    for result in results:
        for name, parameter in result["parameters"].items():
            seen.add(name)
            if "key.bias" not in name and "k_proj.bias" not in name and "in_proj_bias" not in name:
                expected = reference["parameters"][name]
                errors = (
                    (parameter - expected)
                    .abs()
                    .flatten()
                    .sort()
                    .values[: parameter.numel() - parameter.numel() // 1000]
                )
                assert float(errors.norm()) <= 1e-4 * float(expected.norm()) + LR * 1e-2, name
    assert seen == set(reference["parameters"])


def test_replicas_hold_equal_parameters_and_running_statistics_after_training():
    case = fork((1, 2), (1, 2), 4, towers="resnet+bert", steps=3)
    results = run_ranks(case.world_size, train_split, case)
    for first, second in ((results[0], results[1]), (results[2], results[3])):
        assert first["stage"] == second["stage"]
        for kind in ("parameters", "buffers"):
            for name, tensor in first[kind].items():
                assert torch.equal(tensor, second[kind][name]), name


HALF = {
    "bf16": 1e-2,
    "fp16": 1.5e-3,
}  # of a branch's gradient: factors that are no powers of two move each rounding


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize(
    "case",
    [
        fork((1, 2), (1, 1), {"image": 4, "text": 8}, towers="resnet+bert"),
        fork(
            (1, 1),
            (1, 1),
            {"image": 8, "text": 24},
            fusion=1,
            loss_weights={"contrastive": 0.8, "matching": 1.5},
        ),
        fork((2, 1), (1, 2), {"image": 8, "text": 3}, fusion=1, schedule="replay"),
        chain(2, 1, 1, 8),
        merged(1, 2, 4),
    ],
    ids=str,
)
def test_half_precision_equals_the_unsplit_model_in_half_precision(case, precision):
    """Whose weights are rounded copies of fp32, and whose gradients are added up in fp32."""
    case = replace(case, precision=precision)
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert {r["optimizer"] for r in results} == {
        "BF16_Optimizer" if precision == "bf16" else "DeepSpeedZeroOptimizer"
    }
    assert results[0]["metrics"][0].skipped_steps == 0
    assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=1e-4)
    gradients = assemble(results, {name: g.shape for name, g in reference["gradients"].items()})
    for group in ("image", "text", "head"):
        own, whole = (
            torch.cat([each[n].flatten() for n in gradients if n.startswith(group + ".")])
            for each in (gradients, reference["gradients"])
        )
        assert float((own - whole).norm() / whole.norm()) < HALF[precision], group
        assert results[0]["metrics"][0].grad_norm[group] == pytest.approx(
            float(whole.norm()), rel=HALF[precision]
        ), group


def test_dropout_does_not_depend_on_the_split():
    """Each layer draws from a seed of its own for each micro-batch, so the same micro-batches see
    the same dropout."""
    losses = set()
    for case in (
        merged(1, 1, 8, dropout=0.3),
        chain(2, 2, 1, 8, dropout=0.3),
        fork((1, 1), (2, 1), 8, dropout=0.3),
    ):
        losses.add(round(run_ranks(case.world_size, train_split, case)[0]["metrics"][0].loss, 4))
    without = run_ranks(1, train_split, merged(1, 1, 8))[0]["metrics"][0].loss
    assert len(losses) == 1, losses
    assert round(without, 4) not in losses


FUSED = [
    merged(1, 1, 6, fusion=1),
    merged(1, 2, 4, fusion=2, towers="resnet+bert", schedule="replay"),
    merged(2, 2, 12, fusion=1, zero_stage=0),
    chain(1, 1, 1, 8, fusion=2, towers="resnet+bert"),
    chain(1, 1, 1, 8, fusion=1, schedule="replay"),
    chain(2, 2, 2, 4, fusion=1),
    chain(2, 1, 2, 4, fusion=1, schedule="replay"),
    fork((1, 1), (1, 1), {"image": 8, "text": 6}, fusion=1, schedule="replay"),
    fork((1, 2), (1, 1), {"image": 4, "text": 8}, fusion=2, towers="resnet+bert", zero_stage=0),
    fork(
        (2, 1), (2, 2), {"image": 8, "text": 3}, fusion=2, towers="resnet+bert", schedule="replay"
    ),
    fork(
        (1, 3),
        (1, 2),
        {"image": 4, "text": 12},
        fusion=1,
        texts_per_image=(2,),
        weighted=("image", "text"),
    ),
    fork(
        (1, 2),
        (1, 2),
        {"image": 12, "text": 6},
        fusion=1,
        not_loaded={"image": (3,), "text": (0, 17)},
        schedule="replay",
    ),
    merged(1, 2, 4, fusion=1, schedule="per_micro_batch"),
]


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_both_losses_together_equal_unsplit_training(case):
    case = replace(case, loss_weights={"contrastive": 0.8, "matching": 1.5})
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case, whole_batches(case))
    assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    drawn = sorted(note for result in results for note in result["drawn"])
    expected = [
        (b, row, whom)
        for batch in reference["drawn"][0]
        for b, own in batch.items()
        for row, whom in enumerate(own)
    ]
    assert drawn == sorted(expected), "each row draws once, whatever the split"
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )


# -- three branches

LACKING = {
    "image": (0, 5, 11),
    "text": (2, 5),
    "audio": tuple(range(1, 24, 3)),
}  # a third of the samples has no audio


def three(layout, stages, replicas, micro_batch_size, **more):
    return ThreeBranches(layout, stages, replicas, micro_batch_size, **more)


def fork_of_three(stages, replicas, sizes, **more):
    names = ("image", "text", "audio")
    return three(
        "fork", *(dict(zip(names, numbers)) for numbers in (stages, replicas, sizes)), **more
    )


@pytest.mark.parametrize(
    "case",
    [
        fork_of_three((1, 1, 1), (2, 1, 1), (4, 8, 24)),
        fork_of_three((1, 1, 1), (2, 1, 1), (4, 8, 24), pairs="three", lacking=LACKING),
        fork_of_three(
            (1, 1, 1), (2, 1, 1), (6, 8, 12), pairs="three", lacking=LACKING, schedule="replay"
        ),
        fork_of_three(
            (1, 1, 1),
            (1, 2, 1),
            (8, 4, 6),
            lacking=LACKING,
            not_loaded={"image": (3,), "audio": (0, 3)},
        ),
        fork_of_three(
            (1, 2, 1),
            (1, 1, 2),
            (8, 6, 4),
            schedule="replay",
            not_loaded={"text": (7, 8), "audio": (0, 23)},
        ),
        fork_of_three((1, 1, 1), (2, 1, 1), (6, 8, 12), pairs="three", plain=True, lacking=LACKING),
        fork_of_three(
            (1, 1, 1),
            (2, 1, 1),
            (4, 8, 24),
            pairs="three",
            loss_weights={"contrastive/audio_text": 1.7},
        ),
        three("merged", {"merged": 1}, 1, 8, pairs="three"),
        three("merged", {"merged": 1}, 2, 4, pairs="three", plain=True),
        three(
            "merged",
            {"merged": 2},
            2,
            4,
            schedule="replay",
            not_loaded={"image": (3,), "audio": (0, 3)},
        ),
        three(
            "chain",
            {"image": 1, "text": 1, "audio": 1},
            1,
            6,
            pairs="three",
            not_loaded={"text": (7, 8), "audio": (0, 23)},
        ),
        three("chain", {"image": 1, "text": 1, "audio": 1}, 2, 4, schedule="replay"),
        # real towers, cut in two, of unequal replicas
        fork_of_three(
            (1, 1, 2), (2, 1, 1), (6, 8, 12), lacking=LACKING, schedule="replay", audio="whisper"
        ),
        fork_of_three(
            (1, 1, 1),
            (1, 1, 2),
            (8, 24, 4),
            pairs="three",
            lacking=LACKING,
            not_loaded={"audio": (0, 3)},
            audio="ast",
        ),
        three("merged", {"merged": 2}, 1, 8, audio="vit", not_loaded={"audio": (0, 3)}),
        # locked: no gradient of a tower of sounds, and the right ones of its head and of all else
        fork_of_three(
            (1, 1, 2), (2, 1, 1), (6, 8, 12), lacking=LACKING, audio="ast", locked=("audio",)
        ),
        fork_of_three(
            (1, 1, 1),
            (1, 1, 2),
            (8, 24, 4),
            pairs="three",
            schedule="replay",
            audio="whisper",
            locked=("image", "audio"),
        ),
    ],
    ids=str,
)
def test_three_branches_equal_unsplit_training(case):
    """Every pair over the samples that have both of its halves; a branch in several pairs gets the
    sum of their gradients."""
    results = run_ranks(case.world_size, train_three_split, case)
    branches = {"image": 0, "text": 1, "audio": 2}
    replicas = (
        case.replicas if isinstance(case.replicas, dict) else dict.fromkeys(branches, case.replicas)
    )
    sizes = (
        case.micro_batch_size
        if isinstance(case.micro_batch_size, dict)
        else dict.fromkeys(branches, case.micro_batch_size)
    )
    reference = train_three_whole(
        case,
        {b: (replicas[b], case.global_batch_size // replicas[b] // sizes[b]) for b in branches},
    )
    metrics = results[0]["metrics"]
    assert len({r["metrics"].loss for r in results}) == 1, "every rank tells the same loss"
    assert metrics.loss == pytest.approx(reference["loss"], rel=RELATIVE)
    for pair, loss in reference["losses"].items():
        assert metrics.losses[f"contrastive_loss/{pair}"] == pytest.approx(loss, rel=RELATIVE)
    check_gradients(
        assemble(results, {n: g.shape for n, g in reference["gradients"].items()}),
        reference["gradients"],
    )
    weights = {
        f"contrastive/{'_'.join(pair)}": WEIGHTS[pair] for pair in PAIRS[case.pairs]
    } | case.loss_weights
    assert {name: metrics.losses[f"loss_weight/{name}"] for name in weights} == weights


def test_weights_that_follow_the_alignment_of_each_pair_are_those_of_the_next_step():
    """Evaluated through the stages, equal on all ranks; the loss is the sum with these weights."""
    case = fork_of_three((1, 1, 1), (2, 1, 1), (4, 8, 24), pairs="three")
    results = run_ranks(case.world_size, train_with_alignment, case, 3)
    assert all(result == results[0] for result in results[1:])
    asked = {f"contrastive/{'_'.join(pair)}": weight for pair, weight in WEIGHTS.items()}
    assert results[0][0]["weights"] == asked and results[0][0]["reason"] is None
    for step in results[0]:
        expected = sum(
            weight * step["losses"][name.replace("/", "_loss/")]
            for name, weight in step["weights"].items()
        )
        assert step["loss"] == pytest.approx(expected, rel=1e-6)
        assert sum(step["weights"].values()) == pytest.approx(3.5)
    assert len({tuple(step["weights"].values()) for step in results[0]}) == 3
    assert all(
        "loss weights, alignment: contrastive/image_text" in step["reason"]
        for step in results[0][1:]
    )


def test_an_evaluation_compares_every_two_branches_as_whole_towers_do():
    """Image and audio too, which no loss compares; unequal replicas, samples without a sound."""
    not_loaded = {"image": (1, 7), "audio": (0, 7, 20, 21, 22)}
    case = fork_of_three((1, 1, 1), (2, 1, 2), (4, 8, 3), not_loaded=not_loaded)
    expected = evaluate_three_whole(case)
    for result in run_ranks(case.world_size, evaluate_three_split, case):
        assert result.keys() == expected.keys()
        for name, (directions, number) in expected.items():
            assert result[name][1] == number < case.global_batch_size
            for direction, sums in directions.items():
                assert result[name][0][direction] == pytest.approx(sums, rel=1e-5), direction


def test_a_weight_of_a_loss_that_is_not_there_is_refused():
    case = three("merged", {"merged": 1}, 1, 8, loss_weights={"contrastive": 2.0})
    words = "contrastive is no loss of this run; give weights of contrastive/image_text, contrastive/audio_text"
    with pytest.raises(RuntimeError, match=words):
        run_ranks(1, train_three_split, case)
