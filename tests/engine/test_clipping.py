"""Clipping by group does to split gradients what torch does to whole ones, and asks nobody who has
no part of the group."""

import json
import math
import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from clipping_cases import FACTORS, FROZEN, SPIKE, TIED, clip_under_rules, kernels_of_clipping
from cost_models import BRANCHES
from ranks import run_ranks
from split_training import Case, assemble, train_whole

from engine.optimizer import clipping
from engine.optimizer.clipping_rules import (
    ClippingRule,
    clipping_rules,
    group_of,
    rank_sets,
    refuse_idle_patterns,
)
from engine.topology import chain, fork, merged

# The coefficient is computed in float64 from norms in float32: a unit of the last place or two, of
# a gradient as of a norm.
RELATIVE = 1e-6
BLOCKS = {
    "norms": {
        "image": 1e-4,
        "text": 1e4,
        "head": {"kind": "norm", "limit": 0.05},
    },  # far above its limit, below it, around it
    "values": {
        "image": {"kind": "value", "limit": 1e-3},
        "text": {"kind": "value", "limit": 1e6},
        "embeddings": {
            "match": ["text.embeddings.*", "image.*pos_embedding"],
            "kind": "value",
            "limit": 1e-4,
        },
        "frozen": {"match": [FROZEN], "limit": 1.0},
    },
    "one": {"all": {"match": ["*"], "limit": 0.1}},
}
ADAPTIVE = {
    "image": {"kind": "adaptive", "factor": 1.5, "decay": 0.9, "warmup_steps": 2, "limit": 1e6},
    "text": {"kind": "adaptive"},
}


def one(stages, replicas, micro_batch_size, **kwargs):
    return Case("merged", {"merged": stages}, replicas, micro_batch_size, **kwargs)


def two(image, text, micro_batch_size, **kwargs):
    """image, text: (stages, replicas)."""
    return Case(
        "fork",
        {"image": image[0], "text": text[0]},
        {"image": image[1], "text": text[1]},
        micro_batch_size,
        **kwargs,
    )


# Case, are two parameters one, and the sets of ranks that add up under the first of the blocks, in
# this order: image, text, head.
CASES = [
    (two((1, 2), (1, 1), 12, zero_stage=0), True, [{0}, {1}], [{2}], [{0, 1, 2}]),
    (one(2, 2, 12), False, [{0, 1, 2, 3}], [{0, 1, 2, 3}], [{2, 3}]),
    (
        Case("chain", {"image": 3, "text": 1}, 1, 24, zero_stage=0),
        True,
        [{0, 1, 2}],
        [{3}],
        [{2, 3}],
    ),
    (two((1, 2), (1, 1), 12), True, [{0, 1}], [{2}], [{0, 1, 2}]),
    (two((2, 2), (1, 2), 12, zero_stage=0), False, [{0, 2}, {1, 3}], [{4}, {5}], [{2, 4}, {3, 5}]),
    (two((1, 2), (1, 1), 12, precision="bf16"), False, [{0, 1}], [{2}], [{0, 1, 2}]),
]


def group_by_hand(name, block):
    own = (
        group
        for group, rule in block.items()
        if isinstance(rule, dict) and any(fnmatch(name, p) for p in rule.get("match", ()))
    )
    return next(own, name.split(".")[0])


def clipped_by_torch(gradients, block):
    """(norms, norms behind the clipping, clipped gradients) of whole gradients, in one process."""
    norms, after, clipped = {}, {}, {}
    for group in {"image", "text", "head", *block}:
        parameters = {
            n: torch.nn.Parameter(torch.zeros_like(g))
            for n, g in gradients.items()
            if group_by_hand(n, block) == group
        }
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        rule = block.get(group, math.inf)
        kind, limit = (
            (rule.get("kind", "norm"), rule["limit"]) if isinstance(rule, dict) else ("norm", rule)
        )
        norms[group] = float(
            torch.nn.utils.clip_grad_norm_(
                parameters.values(), limit if kind == "norm" else math.inf
            )
        )
        if kind == "value":
            torch.nn.utils.clip_grad_value_(parameters.values(), limit)
        after[group] = float(torch.nn.utils.clip_grad_norm_(parameters.values(), math.inf))
        clipped |= {name: parameter.grad for name, parameter in parameters.items()}
    return norms, after, clipped


@pytest.mark.parametrize(
    ("case", "tied", "image", "text", "head"),
    CASES,
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_split_gradients_are_clipped_as_torch_clips_whole_ones(case, tied, image, text, head):
    results = run_ranks(case.world_size, clip_under_rules, case, BLOCKS, ADAPTIVE, tied)
    unsplit = train_whole(
        case, dict.fromkeys(("image", "text"), (case.micro_batch_size, 24 // case.micro_batch_size))
    )
    shapes = {name: g.shape for name, g in unsplit["gradients"].items() if name != FROZEN}
    gradients = assemble(results, shapes)
    if not tied:  # they are those of the unsplit model, to the rounding of its backward
        exactness = 1e-3 if case.precision == "bf16" else 1e-5
        frozen = float(unsplit["gradients"][FROZEN].norm())
        for group, norm in unsplit["norms"][0].items():
            norm = math.sqrt(norm**2 - frozen**2) if group == "image" else norm
            assert results[0]["measured"][group] == pytest.approx(norm, rel=exactness)
    whole = {
        name: g for name, g in gradients.items() if not tied or name != TIED[1]
    }  # one parameter counts once
    for name, block in BLOCKS.items():
        norms, after, expected = clipped_by_torch(whole, block)
        clipped = assemble([{"gradients": r[name]["clipped"]} for r in results], shapes)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(
                clipped[parameter],
                gradient,
                rtol=RELATIVE,
                atol=1e-12,
                msg=lambda m, p=parameter: f"{name} {p}: {m}",
            )
        if tied:
            assert torch.equal(clipped[TIED[0]], clipped[TIED[1]])
        for rank, result in enumerate(results):
            for group, norm in result[name]["norms"].items():
                assert norm == pytest.approx(norms[group], rel=RELATIVE), (name, group, rank)
                coefficient = result[name]["coefficients"][group]
                assert coefficient == pytest.approx(
                    after[group] / norm if norm else 1.0, rel=RELATIVE
                ), (name, group, rank)
                assert result[name]["shares"][group] == (coefficient < 1)
        reported = {group for result in results for group in result[name]["norms"]}
        assert reported == {group for group in norms if norms[group] or group == "frozen"}, (
            "a group without parameters is nobody's"
        )
    assert results[0]["one"]["norms"] == {
        "all": pytest.approx(
            math.sqrt(sum(float(g.square().sum()) for g in whole.values())), rel=1e-5
        )
    }
    check_who_adds_up(results, {"image": image, "text": text, "head": head})
    check_adaptive(results, clipped_by_torch(whole, {})[0])
    if case.precision == "bf16":
        assert {result["optimizer"] for result in results} == {"BF16_Optimizer"}


def check_who_adds_up(results, sets_of_groups):
    """One collective for each set of ranks, whatever the number of its groups; a set of one rank
    needs none."""
    for rank, result in enumerate(results):
        own = {
            frozenset(ranks)
            for sets in sets_of_groups.values()
            for ranks in sets
            if rank in ranks and len(ranks) > 1
        }
        assert {
            frozenset(ranks): number for ranks, number in result["norms"]["sums"].items()
        } == dict.fromkeys(own, 1)
        assert set(result["norms"]["norms"]) == {
            g for g, sets in sets_of_groups.items() if any(rank in ranks for ranks in sets)
        }


def check_adaptive(results, norms):
    """By the formula, in plain Python; equal on all ranks of a group; with a state that was saved
    and loaded on the way."""
    mean, clipped, expected = 0.0, 0, []
    for t, factor in enumerate(FACTORS, start=1):
        norm = factor * norms["image"]
        limit = 1.5 * mean if t > 2 else 1e6
        coefficient = min(1.0, limit / (norm + 1e-6))
        before, mean = mean, mean + (1 - 0.9) / (1 - 0.9**t) * (coefficient * norm - mean)
        if t > 2:
            assert mean <= before * (1 + 0.5 * (1 - 0.9) / (1 - 0.9**t)), (
                "a spike moves the mean by what was let through"
            )
        clipped += coefficient < 1
        expected.append((coefficient, clipped / t))
    assert [coefficient < 1 for coefficient, _ in expected] == [
        factor == SPIKE for factor in FACTORS
    ]
    holders = [result for result in results if "image" in result["adaptive"][0]["norms"]]
    for result in holders:
        assert [step["coefficients"]["image"] for step in result["adaptive"]] == pytest.approx(
            [c for c, _ in expected], rel=1e-5
        )
        assert [step["shares"]["image"] for step in result["adaptive"]] == pytest.approx(
            [share for _, share in expected]
        )
        assert (
            result["state"]["mean_norm"]["image"]
            == holders[0]["state"]["mean_norm"]["image"]
            == pytest.approx(mean, rel=1e-5)
        )
        assert (
            result["state"]["steps"] == len(FACTORS)
            and result["state"]["clipped_steps"]["image"] == clipped
        )


@pytest.mark.parametrize("case", [one(1, 1, 24, zero_stage=0), one(1, 2, 12)], ids=str)
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_the_number_of_kernels_does_not_grow_with_that_of_the_parameters(kind, case):
    block = dict.fromkeys(("image", "text", "head"), {"kind": kind, "limit": 1e-3})
    (small, few), (large, many) = (
        run_ranks(case.world_size, kernels_of_clipping, replace(case, towers=towers), block)[0]
        for towers in ("resnet18+bert, mean", "resnet+bert")
    )
    assert few != many and small == large


def test_a_limited_copy_is_made_of_some_elements_at_a_time(monkeypatch):
    monkeypatch.setattr(clipping, "LIMITED_AT_ONCE", 10)
    tensors = [torch.randn(size) for size in ((2, 3), (25,), (4,), (3, 2), (0,), (1,))]
    parts = list(clipping._in_parts(tensors))
    assert max(sum(piece.numel() for piece in part) for part in parts) == 10
    together = torch.cat([piece.flatten() for part in parts for piece in part])
    assert torch.equal(together, torch.cat([tensor.flatten() for tensor in tensors]))


# -- the rules, without processes


def test_a_block_is_read_group_by_group():
    block = {
        "text": {"kind": "norm", "limit": 2},
        "image": 1.0,
        "embeddings": {"match": ["text.embeddings.*"], "kind": "value", "limit": 0.1},
        "head": {"kind": "adaptive", "factor": 2.0},
    }
    assert list(clipping_rules(json.loads(json.dumps(block)), BRANCHES).items()) == [
        ("image", ClippingRule("norm", 1.0)),
        ("text", ClippingRule("norm", 2)),
        ("head", ClippingRule("adaptive", factor=2.0)),
        ("embeddings", ClippingRule("value", 0.1, ("text.embeddings.*",))),
    ]


def test_the_first_own_group_that_matches_wins_over_the_others_and_over_the_default():
    rules = clipping_rules(
        {
            "biases": {"match": ["*.bias"], "limit": 1},
            "layers": {"match": ["text.layers.?.*", "head.x"], "limit": 1},
        },
        BRANCHES,
    )
    names = {
        "text.layers.0.bias": "biases",
        "text.layers.0.weight": "layers",
        "text.layers.10.weight": "text",
        "head.x": "layers",
    }
    assert {name: group_of(name, rules) for name in names} == names
    refuse_idle_patterns(rules, list(names))
    with pytest.raises(
        ValueError, match="'logit_scale' belongs to no clipping group; names start with one of"
    ):
        group_of("logit_scale", rules)


OWN = {"match": ["text.*"]}


@pytest.mark.parametrize(
    "block, words",
    [
        (1.0, ["branches.gradient_clipping: got 1.0", "give each group its limit"]),
        ({"images": 1}, ["unknown group 'images'", '"match"', "did you mean 'image'?"]),
        (
            {"own": {"limit": 1}},
            ["unknown group 'own'", '"match"', "valid keys: image, text, head"],
        ),
        (
            {"head": -1},
            ["branches.gradient_clipping.head: got -1", "number ≥ 0", "0 means no clipping"],
        ),
        ({"text": True}, ["branches.gradient_clipping.text: got True", "number ≥ 0"]),
        ({"text": math.nan}, ["branches.gradient_clipping.text: got nan"]),
        (
            {"text": {"kind": "nrom", "limit": 1}},
            ["gradient_clipping.text.kind: unknown value 'nrom'", "did you mean 'norm'?"],
        ),
        ({"text": {"kind": ["norm"]}}, ["gradient_clipping.text.kind: unknown value ['norm']"]),
        (
            {"text": {"kind": "norm", "limits": 1}},
            ["unknown key 'branches.gradient_clipping.text.limits'", "did you mean 'limit'?"],
        ),
        (
            {"text": {"kind": "norm", "factor": 2, "limit": 1}},
            ["unknown key 'factor' for kind \"norm\"", "valid keys: kind, limit"],
        ),
        ({"text": {"kind": "none", "limit": 1}}, ["unknown key 'limit' for kind \"none\""]),
        ({"text": {"kind": "norm"}}, ['kind "norm" needs a "limit"']),
        ({"text": {"kind": "value"}}, ['kind "value" needs a "limit"']),
        ({"text": {"kind": "norm", "limit": 0}}, ["limit: got 0", "above 0", '{"kind": "none"}']),
        ({"text": {"kind": "adaptive", "factor": 1.0}}, ["factor: got 1.0", "above 1"]),
        ({"text": {"kind": "adaptive", "decay": 1}}, ["decay: got 1", "between 0 and 1"]),
        ({"text": {"kind": "adaptive", "warmup_steps": 0}}, ["warmup_steps: got 0", "at least 1"]),
        (
            {"text": {"match": ["text.*"], "limit": 1}},
            ["gradient_clipping.text.match", "no other group takes", "another name"],
        ),
        (
            {"own": {"match": "text.*", "limit": 1}},
            ["gradient_clipping.own.match: got 'text.*'", "list of patterns"],
        ),
        ({"own": {"match": [], "limit": 1}}, ["gradient_clipping.own.match: got []"]),
    ],
)
def test_refusals_of_a_block(block, words):
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, words))):
        clipping_rules(block, BRANCHES)


def test_patterns_that_do_nothing_are_refused():
    names = [
        "image.stem.weight",
        "text.embeddings.token.weight",
        "text.layers.0.weight",
        "head.projection",
    ]
    for match, words in {
        "text.embedings.*": r"own.match: 'text.embedings.\*' matches no parameter; did you mean 'text.embeddings.\*'\?",
        "zzz": "'zzz' matches no parameter; there are for example image.stem.weight",
    }.items():
        with pytest.raises(ValueError, match=words):
            refuse_idle_patterns(
                clipping_rules({"own": {"match": ["head.*", match], "limit": 1}}, BRANCHES), names
            )
    late = {"all": {"match": ["*"], "limit": 1}, "late": {"match": ["head.*"], "limit": 1}}
    with pytest.raises(
        ValueError,
        match="gradient_clipping.late: every parameter that it matches belongs to a group before it",
    ):
        refuse_idle_patterns(clipping_rules(late, BRANCHES), names)


def test_who_adds_up_a_norm():
    """Layers 0, 1 of each branch; the second has the head."""
    layers = {"image": [{"image"}, {"image", "head"}], "text": [{"text", "own"}, {"head"}]}
    cuts = {"image": [range(0, 1), range(1, 2)], "text": [range(0, 2)]}
    graph = fork(cuts, {"image": 4, "text": 2})  # ranks 0-3, 4-7 | 8, 9
    assert rank_sets(graph, layers, sharded=True) == {
        "image": ((0, 1, 2, 3, 4, 5, 6, 7),),
        "head": ((4, 5, 6, 7, 8, 9),),
        "text": ((8, 9),),
        "own": ((8, 9),),
    }
    assert rank_sets(graph, layers, sharded=False) == {
        "image": ((0, 4), (1, 5), (2, 6), (3, 7)),  # each replica has the whole gradient
        "head": ((4, 6, 8), (5, 7, 9)),  # two replicas of the one to one of the other
        "text": ((8,), (9,)),
        "own": ((8,), (9,)),
    }
    line = chain({"image": [range(0, 2)], "text": [range(0, 1), range(1, 2)]}, 1)
    assert rank_sets(line, layers, sharded=False) == {
        "image": ((0,),),
        "head": ((0, 2),),
        "text": ((1,),),
        "own": ((1,),),
    }
    alone = merged({"image": [range(0, 2)], "text": [range(0, 2)]}, 1)
    assert set(rank_sets(alone, layers, sharded=False).values()) == {((0,),)}
