"""Clipping by group does to split gradients what torch does to whole ones."""

import json
import math
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from clipping_cases import FACTORS, FROZEN, SPIKE, TIED, clip_under_rules, kernels_of_clipping
from cost_models import BRANCHES
from ranks import about, run_all
from refusals import not_refused, refused
from split_training import assemble, train_whole
from split_training import fork_of as two
from split_training import merged_of as one

from engine.optimizer.clipping_rules import (
    ClippingRule,
    clipping_rules,
    group_of,
    refuse_idle_patterns,
)

# The coefficient is computed in float64 from norms in float32: a unit of the last place or two, of
# a gradient as of a norm.
RELATIVE = 1e-6
BLOCKS = {
    # far above its limit, below it, around it
    "norms": {"image": 1e-4, "text": 1e4, "head": {"kind": "norm", "limit": 0.05}},
    "own": {
        "image": 1e-3,
        "text": {"kind": "norm", "limit": 1e6},
        "embeddings": {
            "match": ["text.embeddings.*", "image.*pos_embedding"],
            "kind": "norm",
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


CASES = [  # and: are two parameters one?
    (two((1, 2), (1, 1), 12, zero_stage=0), True),
    (one(2, 2, 12), False),
    (two((3, 1), (1, 1), 24, zero_stage=0), True),
    (two((1, 2), (1, 1), 12), True),
    (two((2, 2), (1, 2), 12, zero_stage=0), False),
    (two((1, 2), (1, 1), 12, precision="bf16"), False),
    (two((1, 2), (1, 1), 6, zero_stage=2), True),
    (two((1, 2), (1, 1), 6, precision="bf16", zero_stage=2), False),
    (two((1, 2), (1, 2), 6, zero_stage=3), False),
    (two((1, 2), (1, 1), 6, precision="bf16", zero_stage=3), False),
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
        limit = rule["limit"] if isinstance(rule, dict) else rule
        norms[group] = float(torch.nn.utils.clip_grad_norm_(parameters.values(), limit))
        after[group] = float(torch.nn.utils.clip_grad_norm_(parameters.values(), math.inf))
        clipped |= {name: parameter.grad for name, parameter in parameters.items()}
    return norms, after, clipped


def test_split_gradients_are_clipped_as_torch_clips_whole_ones():
    found = {}
    for tied in (True, False):
        cases = [case for case, is_tied in CASES if is_tied == tied]
        found |= {str(c): r for c, r in run_all(clip_under_rules, cases, BLOCKS, ADAPTIVE, tied)}
    for case, tied in CASES:
        with about(case):
            check_clipping(case, tied, found[str(case)])


def check_clipping(case, tied, results):
    unsplit = train_whole(case)
    shapes = {name: g.shape for name, g in unsplit["gradients"].items() if name != FROZEN}
    gradients = assemble(results, shapes)
    if not tied:  # they are those of the unsplit model, to the rounding of its backward
        exactness = 1e-3 if case.precision == "bf16" else 1e-5
        frozen = float(unsplit["gradients"][FROZEN].norm())
        for group, norm in unsplit["norms"][0].items():
            norm = math.sqrt(norm**2 - frozen**2) if group == "image" else norm
            assert results[0]["measured"][group] == pytest.approx(norm, rel=exactness)
    # one parameter counts once
    whole = {name: g for name, g in gradients.items() if not tied or name != TIED[1]}
    for name, block in BLOCKS.items():
        norms, after, expected = clipped_by_torch(whole, block)
        clipped = assemble([{"gradients": r[name]["clipped"]} for r in results], shapes)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(
                *(clipped[parameter], gradient),
                rtol=RELATIVE,
                atol=1e-12,
                msg=lambda m, p=parameter, b=name: f"{b} {p}: {m}",
            )
        if tied:
            assert torch.equal(clipped[TIED[0]], clipped[TIED[1]])
        for rank, result in enumerate(results):
            for group, norm in result[name]["norms"].items():
                where = (name, group, rank)
                assert norm == pytest.approx(norms[group], rel=RELATIVE), where
                coefficient = result[name]["coefficients"][group]
                expected_one = after[group] / norm if norm else 1.0
                assert coefficient == pytest.approx(expected_one, rel=RELATIVE), where
                assert result[name]["shares"][group] == (coefficient < 1), where
        # all ranks know the same, of groups without parameters too
        assert (
            len({str([result[name][of] for of in ("norms", "shares")]) for result in results}) == 1
        )
        assert norms.keys() == results[0][name]["norms"].keys()
    squares = sum(float(g.square().sum()) for g in whole.values())
    assert results[0]["one"]["norms"]["all"] == pytest.approx(math.sqrt(squares), rel=1e-5)
    check_adaptive(results, clipped_by_torch(whole, {})[0])
    if case.precision == "bf16" and case.zero_stage == 1:
        assert {result["optimizer"] for result in results} == {"BF16_Optimizer"}


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
    assert [coefficient < 1 for coefficient, _ in expected] == [f == SPIKE for f in FACTORS]
    coefficients, shares = zip(*expected)
    for result in results:
        steps, state = result["adaptive"], result["state"]
        found = [step["coefficients"]["image"] for step in steps]
        assert found == pytest.approx(list(coefficients), rel=1e-5)
        assert [step["shares"]["image"] for step in steps] == pytest.approx(list(shares))
        assert state == results[0]["state"]
        assert state["mean_norm"]["image"] == pytest.approx(mean, rel=1e-5)
        assert (state["steps"], state["clipped_steps"]["image"]) == (len(FACTORS), clipped)


def test_the_number_of_kernels_does_not_grow_with_that_of_the_parameters():
    block = dict.fromkeys(("image", "text", "head"), 1e-3)
    cases = [
        replace(case, towers=towers)
        for case in (one(1, 1, 24, zero_stage=0), one(1, 2, 12))
        for towers in ("resnet18+bert, mean", "resnet+bert")
    ]
    counts = [results[0] for _, results in run_all(kernels_of_clipping, cases, block)]
    for (small, few), (large, many) in (counts[:2], counts[2:]):
        assert few != many and small == large


# -- the rules, without processes


def test_a_block_is_read_group_by_group():
    block = {
        "text": {"kind": "norm", "limit": 2},
        "image": 1.0,
        "embeddings": {"match": ["text.embeddings.*"], "kind": "norm", "limit": 0.1},
        "head": {"kind": "adaptive", "factor": 2.0},
    }
    assert list(clipping_rules(json.loads(json.dumps(block)), BRANCHES).items()) == [
        ("image", ClippingRule("norm", 1.0)),
        ("text", ClippingRule("norm", 2)),
        ("head", ClippingRule("adaptive", factor=2.0)),
        ("embeddings", ClippingRule("norm", 0.1, ("text.embeddings.*",))),
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
    with refused("'logit_scale' belongs to no clipping group"):
        group_of("logit_scale", rules)


def test_refusals_of_a_block():
    key, adaptive = "branches.gradient_clipping", {"kind": "adaptive"}
    cases = [
        (1.0, f"{key}: got 1.0 … give each group its limit"),
        ({"images": 1}, "unknown group 'images' … \"match\" … did you mean 'image'?"),
        ({"own": {"limit": 1}}, "unknown group 'own' … \"match\" … valid keys: image, text, head"),
        ({"head": -1}, f"{key}.head: got -1 … number ≥ 0 … 0 means no clipping"),
        ({"text": True}, f"{key}.text: got True … number ≥ 0"),
        ({"text": math.nan}, f"{key}.text: got nan"),
        ({"text": {"kind": "nrom", "limit": 1}}, "value 'nrom' … did you mean 'norm'?"),
        ({"text": {"kind": ["norm"]}}, "gradient_clipping.text.kind: unknown value ['norm']"),
        ({"text": {"kind": "norm", "limits": 1}}, f"{key}.text.limits' … did you mean 'limit'?"),
        ({"text": {"kind": "norm", "factor": 2, "limit": 1}}, "'factor' for kind \"norm\""),
        ({"text": {"kind": "none", "limit": 1}}, "unknown key 'limit' for kind \"none\""),
        ({"text": {"kind": "norm"}}, 'kind "norm" needs a "limit"'),
        ({"text": {"kind": "value", "limit": 1}}, f'{key}.text.kind: got "value" … "adaptive"'),
        ({"text": {"kind": "norm", "limit": 0}}, 'limit: got 0 … above 0 … {"kind": "none"}'),
        ({"text": adaptive | {"factor": 1.0}}, "factor: got 1.0 … above 1"),
        ({"text": adaptive | {"decay": 1}}, "decay: got 1 … between 0 and 1"),
        ({"text": adaptive | {"warmup_steps": 0}}, "warmup_steps: got 0 … at least 1"),
        ({"text": {"match": ["text.*"], "limit": 1}}, "text.match … another name"),
        ({"own": {"match": "text.*", "limit": 1}}, "own.match: got 'text.*' … list of patterns"),
        ({"own": {"match": [], "limit": 1}}, "gradient_clipping.own.match: got []"),
    ]
    assert not_refused(lambda block: clipping_rules(block, BRANCHES), cases) == []


def test_patterns_that_do_nothing_are_refused():
    names = ("image.stem.weight", "text.embeddings.token.weight", "head.projection")
    cases = [
        ({"own": {"match": ["head.*", "text.embedings.*"], "limit": 1}}, "'text.embeddings.*'?"),
        ({"own": {"match": ["head.*", "zzz"], "limit": 1}}, "'zzz' matches no parameter"),
        (
            {"all": {"match": ["*"], "limit": 1}, "late": {"match": ["head.*"], "limit": 1}},
            "gradient_clipping.late: every parameter that it matches belongs to a group before it",
        ),
    ]

    def idle(block):
        refuse_idle_patterns(clipping_rules(block, BRANCHES), list(names))

    assert not_refused(idle, cases) == []
