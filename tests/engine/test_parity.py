"""Split training equals unsplit training: loss, every gradient, clipping norms and parameters, for
every way to split.

`CASES` are few, and each two features that are allowed together meet in one (`parity_cases.py`). A
case has its features' names, so that one is run again as
`pytest "tests/engine/test_parity.py::test_split_training_equals_unsplit_training[NAME]"`, and those
with a feature by `-k`. Tolerances, fp32: see `check_gradients`.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compilers import needs_a_compiler
from parity_cases import LIMIT, cases, random_deal
from ranks import Together, about, run_all, run_ranks
from rounding import assert_equal_rows
from split_training import (
    LR,
    PAIRS,
    RELATIVE,
    WEIGHTS,
    Case,
    assemble,
    check_all_gradients,
    check_gradients,
    disagreement,
    evaluate_whole,
    refusal,
    train_scalars,
    train_split,
    train_whole,
    trained,
)
from split_training import fork_of as fork
from split_training import merged_of as merged
from three_branches import refused_evaluation, train_with_alignment, train_with_silent_steps


def split(cases, function=train_split):
    return run_all(function, cases)


def check_step(results, reference):
    """The loss of the first step and all its gradients."""
    assert len({r["metrics"][0].loss for r in results}) == 1, "every rank tells the same loss"
    assert results[0]["metrics"][0].loss == pytest.approx(reference["losses"][0], rel=RELATIVE)
    check_all_gradients(results, reference)


def check(case, results):
    reference = train_whole(case)
    with about(case):
        check_step(results, reference)
    return reference


CASES = cases()
# of a branch's gradient: factors that are no powers of two move each rounding
HALF = {"bf16": 1e-2, "fp16": 1.5e-3}


SLOW = [pytest.mark.all("compiles layers")]


@pytest.fixture(scope="module")
def results_of(request):
    """case -> what its ranks return. Those that are to be run share their ranks."""
    items = [item for item in request.session.items if item.get_closest_marker("skip") is None]
    wanted = {item.callspec.id for item in items if hasattr(item, "callspec")}
    return Together(train_split, [case for case in CASES if case.name in wanted])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=SLOW * bool(case.compile), id=str(case)) for case in CASES]
)
def test_split_training_equals_unsplit_training(case, results_of):
    if case.compile:
        needs_a_compiler()
    results, reference = results_of(case), train_whole(case)
    objective = trained(case)[0]
    check_losses(case, objective, results, reference)
    check_numbers(case, objective, results[0]["metrics"][0])
    if case.towers == "resnet+bert":
        check_running_statistics(results, reference, HALF.get(case.precision, RELATIVE))
    if case.precision == "fp32":
        check_exactly(case, results, reference)
    else:
        check_half_precision(case, results, reference)


def test_the_reference_shares_nothing_with_the_engine():
    """What it has of our code are the records of losses, and the documented noise of a draw."""
    ours = ("common", "data", "engine", "launch", "models")
    source = (Path(__file__).parents[1] / "unsplit.py").read_text("utf-8")
    imported = re.findall(r"^ *(?:from|import) ([\w.]+)", source, re.MULTILINE)
    found = {name for name in imported if name.partition(".")[0] in ours}
    assert found == {"models.losses", "models.losses.matching"}


def check_losses(case, objective, results, reference):
    """That of the step and, where there are several, each of them; their weights."""
    metrics, within = results[0]["metrics"][0], HALF.get(case.precision, RELATIVE)
    if case.precision != "fp32" and len(objective.terms) == 1:
        within = 1e-4
    assert len({r["metrics"][0].loss for r in results}) == 1, "every rank tells the same loss"
    assert metrics.loss == pytest.approx(reference["losses"][0], rel=within)
    by_name = reference["losses_by_name"][0]
    if len(by_name) == 1:
        assert not metrics.losses
        return
    kinds = [
        (f"{kind}/{pair.name}" if len(objective.terms) > 1 else kind, pair)
        for pair in objective.terms
        for kind in (pair.kind, "matching")
    ]
    for name, pair in [(name, pair) for name, pair in kinds if name in by_name]:
        kind, _, of_pair = name.partition("/")
        own = metrics.losses["/".join([f"{kind}_loss", *filter(None, [of_pair])])]
        assert own == pytest.approx(by_name[name], rel=within), name
        weight = case.loss_weights.get(name, pair.weight)
        assert metrics.losses[f"loss_weight/{name}"] == weight, name


def check_numbers(case, objective, metrics):
    """What is counted, and what the losses learn, before the step."""
    scalars, left_out = {}, {}
    for pair in objective.terms:
        for name, value in pair.loss.parameters.items():
            is_scale = name == "logit_scale"
            shown = f"{name}_exp" if is_scale else name
            scalars[f"{pair.prefix}{shown}"] = math.exp(value) if is_scale else value
        lost = len(case.lost(pair.branches))
        left_out[pair.name] = int((~case.annotations.seen).sum()) if pair.made else lost
    assert metrics.scalars == pytest.approx(scalars)
    assert metrics.left_out == left_out
    if case.schedule != "per_micro_batch":
        assert metrics.duplicates["image_text"] == num_duplicates(case)


def num_duplicates(case):
    """Samples of which an image or a text is one of another sample."""
    if not case.duplicates:
        return 0
    lacking = [place for branch in ("image", "text") for place in case.lacking.get(branch, ())]
    out = case.lost(("image", "text")) | {*lacking}
    present = torch.tensor([place for place in range(24) if place not in out])
    texts = torch.cat([case.keys("text", case.rows_of("text", i[None], 0)) for i in present])
    repeated = torch.zeros(len(present), dtype=torch.bool)
    for keys in (case.keys("image", present), texts):
        whose = torch.arange(len(present)).repeat_interleave(len(keys) // len(present))
        same = (keys[:, None] == keys) & (whose[:, None] != whose)
        repeated |= same.any(1).view(len(present), -1).any(1)
    assert repeated.any()
    return int(repeated.sum())


def check_norms(case, metrics, reference, within):
    norms = reference["norms"][0]
    assert metrics.grad_norm == pytest.approx(norms, rel=within)
    if case.clipping:
        coefficients = {group: min(1.0, LIMIT / (norm + 1e-6)) for group, norm in norms.items()}
        assert metrics.clip_coefficient == pytest.approx(coefficients, rel=within)
        assert min(coefficients.values()) < 0.5


def check_exactly(case, results, reference):
    shapes = {name: gradient.shape for name, gradient in reference["clipped"].items()}
    check_gradients(assemble(results, shapes), reference["clipped"])
    check_norms(case, results[0]["metrics"][0], reference, RELATIVE)
    if case.evaluated:
        expected = evaluate_whole(case)
        for result in results:
            check_evaluation(case, result["measured"], expected)
    if case.fusion:  # each row draws once, whatever the split
        drawn = sorted(note for result in results for note in result["drawn"])
        by_side = [each for batch in reference["drawn"][0] for each in batch.items()]
        assert drawn == sorted((b, row, n) for b, own in by_side for row, n in enumerate(own))
    if case.deals and case.pairs == "one" and case.towers == "vit+clip" and not case.dropout:
        in_order = replace(case, deals={}, deals_texts=False)  # how they are packed changes nothing
        check_gradients(assemble(results, shapes), train_whole(in_order)["clipped"])


def check_running_statistics(results, reference, within):
    compared = 0
    for name, buffer in (each for result in results for each in result["buffers"].items()):
        # num_batches_tracked too: each micro-batch counts once
        if name in reference["buffers"]:
            expected = reference["buffers"][name].reshape(-1)
            # a mean of nearly nothing is off by the rounding of what it is the mean of
            assert_equal_rows(buffer.float().reshape(-1), expected.float(), within, name)
            compared += "running_mean" in name
    assert compared > 10


def check_half_precision(case, results, reference):
    """The unsplit model's weights are rounded copies of fp32, and its gradients are added up in
    fp32."""
    metrics, within = results[0]["metrics"][0], HALF[case.precision]
    if len(case.branches) > 2:  # a branch adds up gradients of several losses
        within *= 2
    in_place = case.precision == "bf16" and not case.offload and case.zero_stage == 1
    optimizer = "BF16_Optimizer" if in_place else "DeepSpeedZeroOptimizer"
    optimizer = "fully_shard" if case.zero_stage == 3 else optimizer
    assert {r["optimizer"] for r in results} == {optimizer}
    assert not any(r["unaligned"] for r in results)  # kernels for those are slow
    assert metrics.skipped_steps == 0
    clipped = reference["clipped"]
    gradients = assemble(results, {name: each.shape for name, each in clipped.items()})
    for group in {name.partition(".")[0] for name in gradients}:
        own, whole = (
            torch.cat([each[n].flatten() for n in gradients if n.startswith(group + ".")])
            for each in (gradients, clipped)
        )
        assert (own - whole).norm() / whole.norm() < within, group
    check_norms(case, metrics, reference, within)


def test_zero_2_averages_what_replicas_make_by_themselves():
    """Each scores the pairs of its own texts, as many as it was dealt, in backwards of its own. And
    of a branch with one replica nothing is shared out."""
    unequal = {"text": random_deal(4, 2, 3)}
    sizes = {"image": 4, "text": 4}
    cases = [
        fork((1, 1), (1, 2), sizes, fusion=1, deals=unequal),
        fork((1, 2), (1, 2), {"image": 4, "text": 6}, fusion=1, schedule="replay"),
        merged(1, 2, 4, fusion=1, schedule="per_micro_batch", checkpoint_interval=2),
    ]
    for case, results in split([replace(case, zero_stage=2) for case in cases]):
        assert {result["optimizer"] for result in results} == {"DeepSpeedZeroOptimizer"}
        check(case, results)


def test_more_micro_batches_than_planned_keep_activations_in_proportion():
    """A replay of 2 text micro-batches that keeps one, dealt to 8, of which it keeps 4: the other 4
    run forward twice, and nothing else changes."""
    case = fork(
        *((1, 1), (1, 1), {"image": 6, "text": 12}),
        schedule="replay",
        kept_micro_batches={"image": 1, "text": 1},
        deals={"text": random_deal(4, 1, 8)},
        kept_of_deals={"text": 4},
    )
    results = run_ranks(case.world_size, train_split, case)
    check(case, results)
    image, text = (set(result["forwards"].values()) for result in results)
    assert image == {4 + 3} and text == {8 + 4}


BOTH = ("image", "text")
THREE_TEXTS = {"texts_per_image": (3,), "weighted": BOTH}


def test_the_loss_of_each_source_is_the_mean_of_its_samples():
    """The contrastive one, of those that were not left out, in parts of the mean weight. It is
    part of the message of the metrics: no other is sent."""
    sources = {"source_starts": (0, 5, 5, 20), "steps": 2}  # one has no samples
    lost = {"not_loaded": {"image": (3, 4, 23), "text": (1,)}}
    weights = {"contrastive": 0.5, "matching": 1.5}
    cases = [
        fork((1, 1), (1, 1), {"image": 4, "text": 6}, **THREE_TEXTS, **lost, label_smoothing=0.1),
        merged(1, 1, 8, loss="sigmoid", **lost),
        merged(1, 2, 4, schedule="per_micro_batch"),
        fork((1, 1), (1, 1), {"image": 8, "text": 6}, fusion=1, loss_weights=weights),
    ]
    cases = [replace(case, **sources) for case in cases]
    without = split([replace(case, source_starts=None) for case in cases])
    for (case, results), (_, of_plain) in zip(split(cases), without):
        reference = train_whole(case)["sample_losses"][0]["image_text"]
        (metrics, later), plain = results[0]["metrics"], of_plain[0]["metrics"]
        # nan is not equal to itself
        assert {repr(r["metrics"][0].sources) for r in results} == {repr(metrics.sources)}, case
        starts = case.source_starts
        for (samples, loss), first, last in zip(
            metrics.sources, starts, (*starts[1:], 24), strict=True
        ):
            own = [reference[place] for place in range(first, last) if place in reference]
            assert samples == len(own), case
            mean = pytest.approx(sum(own) / samples, rel=RELATIVE) if samples else None
            assert math.isnan(loss) if mean is None else loss == mean, case
        total = sum(samples for samples, _ in metrics.sources)
        assert total == len(reference) == 24 - metrics.left_out["image_text"], case
        mean = sum(n / total * loss for n, loss in metrics.sources if n)
        whole = metrics.losses.get("contrastive_loss", metrics.loss)
        assert mean == pytest.approx(whole, rel=1e-6), case
        assert plain[0].sources == () and plain[0].loss == metrics.loss, case
        num_bytes = 8 * 2 * len(starts)  # of the step before, in a ring of all ranks
        more = later.sent_bytes - plain[1].sent_bytes
        assert more == 2 * (case.world_size - 1) * num_bytes, case


def test_the_number_of_texts_may_change_from_step_to_step():
    """Also where messages have had the same shapes so far, and need not have been announced."""
    case = merged(2, 1, 8, full_texts=True, texts_per_image=(2, 1, 2, 3), steps=4)
    results = run_ranks(case.world_size, train_split, case)
    reference = train_whole(case)
    assert [m.loss for m in results[0]["metrics"]] == pytest.approx(reference["losses"], rel=1e-4)


def test_what_does_not_fit_together_is_refused_on_all_ranks():
    weights, texts = {"weighted": ("text",)}, {"texts_per_image": (1, 3)}
    zero = {"image": tuple(i for i in range(24) if i % 5)}  # the others have weight 0
    cases = {
        "24 of 48 image rows and text rows of this batch came without a weight": fork(
            (1, 2), (1, 1), {"image": 4, "text": 8}, **weights
        ),
        "that could be loaded have weight 0": merged(1, 2, 4, weighted=BOTH, not_loaded=zero),
        "of 24 samples with 3 of them per sample, which needs 72": merged(1, 2, 4, **texts),
    }
    # a sample that is lost is none without a modality: as many rows as were to come, one twice
    whole = ((tuple(range(12)), tuple(range(12, 24))),)
    lost = ((tuple(range(12)), (*range(12, 23), 22)),)
    words = [*cases, *["disagree about 1 samples"] * 4]
    for deals in ({"image": lost, "text": whole}, {"image": whole, "text": lost}):
        cases[len(cases)] = fork((1, 1), (1, 1), 12, deals=deals)
        cases[len(cases)] = merged(1, 1, 12, deals=deals)
    for expected, (case, said) in zip(words, split(list(cases.values()), refusal), strict=True):
        assert all(expected in each for each in said), (case, said)


def test_branches_that_have_other_samples_at_their_places_are_refused():
    cases = [merged(1, 2, 4), fork((1, 2), (1, 1), {"image": 4, "text": 8}), merged(2, 1, 8)]
    words = "the image and text branches disagree about 24 samples of this batch"
    for case, said in split(cases, disagreement):
        assert all(words in each for each in said), (case, said)


def test_per_micro_batch_is_the_mean_of_the_losses_of_the_micro_batches():
    """Another objective: the same samples with fewer negatives each have a smaller loss."""
    case = merged(1, 2, 4, schedule="per_micro_batch", dropout=0.1)
    reference = check(case, run_ranks(case.world_size, train_split, case))
    whole = train_whole(replace(case, schedule="batch_sync"))
    assert reference["losses"][0] < whole["losses"][0] - 0.3


@pytest.mark.all("more cases of replay")
@pytest.mark.parametrize("precision, kept", [("fp32", (0, 1)), ("bf16", (1,))])
def test_replay_with_replicas_equals_batch_sync(precision, kept):
    """The same numbers, not nearly: the second forward is the first again, and gradients are added
    up in the same order."""
    cases = [
        merged(1, 2, 4),
        fork((1, 2), (1, 1), {"image": 4, "text": 8}),
        fork((2, 2), (1, 3), {"image": 4, "text": 8}),
        merged(2, 2, 4),
    ]
    cases = [replace(case, precision=precision) for case in cases]
    expected = split(cases)
    for number in kept:
        keeps = {"schedule": "replay", "kept_micro_batches": number}
        replays = split([replace(case, **keeps) for case in cases])
        for (_, batch_sync), (case, replay) in zip(expected, replays, strict=True):
            for whole, again in zip(batch_sync, replay):
                assert whole["metrics"][0].loss == again["metrics"][0].loss, case
                for (name, _, gradient), (_, _, own) in zip(
                    whole["gradients"], again["gradients"], strict=True
                ):
                    assert torch.equal(own, gradient), (case, name)


def test_parameters_after_five_clipped_steps_equal_unsplit_training():
    """AdamW divides a gradient by its own size: where the true gradient is zero, rounding decides
    the step. Key biases are left out, and of each parameter one element in a thousand, whose
    gradient may chance to be as small."""
    limits = {"image": 0.5, "text": 1.0, "head": 0.1}
    cases = [
        fork((1, 2), (1, 1), {"image": 6, "text": 8}, clipping=limits),
        fork(
            *((2, 1), (1, 2), {"image": 8, "text": 4}),
            zero_stage=0,
            clipping={"image": 0.5, "head": 0.1},
        ),
        merged(3, 2, 4, clipping=limits),
        merged(2, 2, 6, clipping=limits),
        fork((1, 1), (2, 1), 6, schedule="replay", dropout=0.1, clipping=limits),
    ]
    biases = ("key.bias", "k_proj.bias", "in_proj_bias")
    for case, results in split([replace(case, steps=5) for case in cases]):
        reference = train_whole(case)
        metrics = results[0]["metrics"]
        losses = pytest.approx(reference["losses"], rel=1e-4)
        assert [m.loss for m in metrics] == losses, case
        for own, norms in zip(metrics, reference["norms"], strict=True):
            assert own.grad_norm == pytest.approx(norms, rel=1e-4), case
        seen = set()
        for name, parameter in (p for result in results for p in result["parameters"].items()):
            seen.add(name)
            if not any(bias in name for bias in biases):
                expected = reference["parameters"][name]
                errors = (parameter - expected).abs().flatten().sort().values
                errors = errors[: errors.numel() - errors.numel() // 1000]
                assert errors.norm() <= 1e-4 * expected.norm() + LR * 1e-2, (case, name)
        assert seen == set(reference["parameters"]), case


def test_replicas_hold_equal_parameters_and_running_statistics_after_training():
    case = fork((1, 2), (1, 2), 4, towers="resnet+bert", steps=3)
    results = run_ranks(case.world_size, train_split, case)
    for first, second in ((results[0], results[1]), (results[2], results[3])):
        assert first["stage"] == second["stage"]
        for kind in ("parameters", "buffers"):
            for name, tensor in first[kind].items():
                assert torch.equal(tensor, second[kind][name]), name


LONG = {"bf16": "bfloat16", "fp32": "float32"}


def test_losses_read_what_they_learn_in_fp32():
    """In bf16 too, where a parameter near 2.66 moves in steps of 0.016: the scale of every step is
    that of the optimizer's fp32 number, on whichever replica that lies, from the first value on."""
    cases = [
        fork((1, 3), (1, 1), 8, precision=precision, steps=4) for precision in ("bf16", "fp32")
    ]
    for case, results in run_all(train_scalars, cases):
        assert {each["dtype"] for each in results[:3]} == {f"torch.{LONG[case.precision]}"}
        scales = []
        for step in range(case.steps):
            held = [each["steps"][step][0] for each in results[:3]]
            used = {each["steps"][step][1] for each in results}  # metrics are equal everywhere
            known = [value for value in held if value is not None]
            assert len(known) == (1 if case.precision == "bf16" else len(known)) >= 1
            assert [*used] == pytest.approx([math.exp(known[0])], rel=1e-6), (case, step)
            scales += used
        assert scales[0] == pytest.approx(1 / 0.07, rel=1e-6) and len(set(scales)) == 4


def test_dropout_does_not_depend_on_the_split():
    """Each layer draws from a seed of its own for each micro-batch, so the same micro-batches see
    the same dropout."""
    cases = [
        merged(1, 1, 8, dropout=0.3),
        merged(4, 1, 8, dropout=0.3),
        fork((1, 1), (2, 1), 8, dropout=0.3),
        merged(1, 1, 8),
    ]
    losses = [round(results[0]["metrics"][0].loss, 4) for _, results in split(cases)]
    assert losses[0] == losses[1] == losses[2] != losses[3]


# -- three branches


def three(layout, stages, replicas, micro_batch_size, **more):
    return Case(layout, stages, replicas, micro_batch_size, **{"pairs": "two", **more})


def fork_of_three(stages, replicas, sizes, **more):
    names = ("image", "text", "audio", "video")
    return three(
        "fork", *(dict(zip(names, numbers)) for numbers in (stages, replicas, sizes)), **more
    )


STILL = [
    fork_of_three((1, 1, 1), (1, 1, 2), (8, 24, 4)),
    fork_of_three((1, 1, 2), (1, 1, 1), (8, 24, 12), schedule="replay"),
    fork_of_three((1, 1, 1), (1, 1, 2), (8, 24, 4), precision="bf16"),
    three("merged", {"merged": 1}, 2, 4),
    three("merged", {"merged": 1}, 2, 4, zero_stage=2),
    three("merged", {"merged": 1}, 2, 4, optimizer={"type": "Muon", "params": {"lr": LR}}),
]


def test_a_branch_without_a_row_in_a_step_stands_still():
    """No sound could be loaded, or its loss weighs nothing: weights, optimizer state, average and
    limit of the branch stay to the last bit, on every replica and stage, while the others learn
    and the rates go on."""
    for case, results in run_all(train_with_silent_steps, STILL):
        for rank, result in enumerate(results):
            assert len(set(result["rates"])) == len(result["states"]), case
            steps = list(zip(result["states"], result["states"][1:], (True, True, False)))
            for number, (before, after, silent) in enumerate(steps, 2):
                names = {kept: kept.split(" ")[1] for kept in after}
                changed = {names[kept] for kept in after if not same(before[kept], after[kept])}
                sounds = set(result["sounds"]) & {*names.values()}
                where = case, rank, f"step {number}"
                if silent:
                    assert not changed & sounds, where
                    assert changed or len(sounds) == len({*names.values()}), where
                else:  # its limit and, where it has a stage here, its weights
                    assert "audio.limit" in changed and changed >= set(names.values()) - sounds
                    assert len(changed & sounds) == len(sounds), where


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def test_weights_that_follow_the_alignment_of_each_pair_are_those_of_the_next_step():
    """Evaluated through the stages, equal on all ranks; the loss is the sum with these weights."""
    case = fork_of_three((1, 1, 1), (2, 1, 1), (4, 8, 24), pairs="three")
    results = run_ranks(case.world_size, train_with_alignment, case, 3)
    assert all(result == results[0] for result in results[1:])
    asked = {f"contrastive/{'_'.join(pair)}": WEIGHTS[pair] for pair in PAIRS[case.pairs]}
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
    case = fork_of_three(
        *((1, 1, 1), (2, 1, 2), (4, 8, 3)), not_loaded=not_loaded, evaluated=True, steps=0
    )
    expected = evaluate_whole(case)
    for result in run_ranks(case.world_size, train_split, case):
        check_evaluation(case, result["measured"], expected)
    assert all(each["n"] < case.global_batch_size for each in expected.values())


def check_evaluation(case, measured, expected):
    assert measured.keys() == expected.keys(), case
    for name, ways in expected.items():
        for way, sums in ways.items():
            within = 1e-4 if case.annotated else 1e-5
            assert measured[name][way] == pytest.approx(sums, rel=within), (case, name, way)


def test_an_evaluation_of_branches_that_have_other_samples_is_refused_on_all_ranks():
    said = run_ranks(3, refused_evaluation, fork_of_three((1, 1, 1), (1, 1, 1), (24, 24, 24)))
    assert all("audio and text branches disagree about 2 of 24" in each for each in said), said


def test_a_weight_of_a_loss_that_is_not_there_is_refused():
    case = three("merged", {"merged": 1}, 1, 8, loss_weights={"contrastive": 2.0})
    words = "contrastive is no loss of this run; give weights of contrastive/image_text"
    assert words in run_ranks(1, refusal, case)[0]
