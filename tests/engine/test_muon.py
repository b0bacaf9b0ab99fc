"""Muon steps whole matrices, however their elements are shared out: as the formula has it, and as an
unsplit run in plain torch."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cost_models import BRANCHES
from muon_cases import SHAPES, changed, matrix, pieces_of, replace_on_ranks
from ranks import run_all, run_cases
from refusals import not_refused, refused
from small_towers import TOWERS, image_and_text_towers
from split_training import LR, WEIGHT_DECAY, Case, merged_of, train_split, train_whole
from unsplit import step_matrix

from engine.config.reading import check_config
from engine.optimizer.muon import Muon, orthogonalised, update_scale
from engine.optimizer.parameter_groups import matrices_of, optimizer_groups, settings_of
from engine.optimizer.preview import preview
from engine.optimizer.whole_matrices import owners_of, trade_of

MUON = {"type": "Muon", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}
UNEQUAL = {"type": "Muon", "params": {**MUON["params"], "muon_lr": 2e-3, "adam_lr": 5e-4}}
UNEQUAL["params"] |= {"momentum": 0.9, "nesterov": False, "ns_steps": 4}


# -- what it steps


def matrices(name, **block):
    layers = {b: t.specs for b, t in image_and_text_towers(name, 0.0).items()}
    return matrices_of(optimizer_groups(block, BRANCHES), layers, MUON)


def test_it_steps_the_matrices_of_blocks():
    found = matrices("vit+clip")
    block, layer = "image.encoder.layers.encoder_layer_{}.", "text.encoder.layers.{}."
    attention = [f"self_attn.{of}_proj.weight" for of in ("q", "k", "v", "out")]
    expected = {
        path.format(number) + name
        for path, names in (
            (block, ("self_attention.in_proj_weight", "self_attention.out_proj.weight")),
            (block, ("mlp.0.weight", "mlp.3.weight")),
            (layer, (*attention, "mlp.fc1.weight", "mlp.fc2.weight")),
        )
        for name in names
        for number in range(3)
    }
    assert found == expected


def test_it_steps_no_embeddings_nor_projections_of_any_library():
    """T5's first block alone has a table of biases, Swin has one in each, TNT's has a projection of
    pixels; MPNet and SigLIP pool by matrices, and texts of OpenCLIP are projected behind the pool."""
    others = (
        "embed",
        "position",
        "bias_table",
        "relative",
        "pooler",
        "head",
        "projection",
        "token",
    )
    for name in TOWERS:
        found = matrices(name)
        assert not [each for each in found if any(word in each for word in others)], name
        for branch in BRANCHES:
            own = {each for each in found if each.startswith(branch)}
            assert bool(own) == (branch == "text" or "resnet" not in name), (name, branch)
    assert "image.proj.weight" not in matrices("tnt+coca")


def test_tables_that_every_block_has_are_none_of_its_matrices():
    shapes = {"text.{}.bias.weight": (32, 4), "text.{}.linear.weight": (8, 8), "text.{}.w": (8, 8)}
    layers = [
        SimpleNamespace(
            canonical_parameters={name.format(n): shape for name, shape in shapes.items()},
            tables={f"text.{n}.bias.weight"},
        )
        for n in range(2)
    ]
    found = matrices_of(optimizer_groups(None, BRANCHES), {"text": layers}, MUON)
    assert found == {"text.0.linear.weight", "text.1.linear.weight"}


def test_patterns_say_otherwise():
    """Of the names that they match those of two dimensions."""
    found = matrices("vit+clip", muon=["text.encoder.layers.1.*", "*.position_embedding.weight"])
    assert len(found) == 7 and "text.embeddings.position_embedding.weight" in found
    assert matrices("vit+clip", muon=[]) == frozenset()
    with refused("'text.embedings.*' matches no parameter of two dimensions; did you mean"):
        matrices("vit+clip", muon=["text.embedings.*"])
    with refused("'*.bias' matches no parameter of two dimensions"):
        matrices("vit+clip", muon=["*.bias"])


def test_groups_have_the_rates_of_their_kind():
    """Times that of their branch; with another optimizer nothing is a matrix."""
    layers = {b: t.specs for b, t in image_and_text_towers("vit+clip", 0.0).items()}
    block = optimizer_groups({"text": {"lr": 3e-3, "weight_decay": 0.3}}, BRANCHES)
    settings = settings_of(block, layers, UNEQUAL)
    kinds = {
        ("image", True): (2e-3 / LR, WEIGHT_DECAY),
        ("image", False): (5e-4 / LR, WEIGHT_DECAY),
        ("text", True): (3 * 2e-3 / LR, 0.3),
        ("text", False): (3 * 5e-4 / LR, 0.3),
    }
    seen = set()
    for name, own in settings.items():
        if own.weight_decay:
            kind = name.split(".")[0], own.muon
            seen.add(kind)
            assert (own.lr_scale, own.weight_decay) == pytest.approx(kinds[kind]), name
        else:
            assert not own.muon, name
    assert seen == kinds.keys()
    plain = settings_of(block, layers, {"type": "AdamW", "params": MUON["params"]})
    assert not any(own.muon for own in plain.values())


def test_what_is_wrong_is_refused_with_its_key():
    cases = [
        ({"muon": "*.weight"}, {}, "optimizer_groups.muon … *.weight … a list of patterns"),
        ({}, {"momentum": 1}, "momentum … below 1"),
        ({}, {"ns_steps": 0}, "ns_steps … at least 1"),
        ({}, {"muon_lr": 0}, "muon_lr … above 0"),
        ({}, {"nesterov": 1}, "nesterov … true or false"),
        ({}, {"muon_rl": 1e-3}, "muon_rl … did you mean 'muon_lr'"),
        ({}, {"torch_adam": True}, "torch_adam"),
        ({}, {"muon_lr": 1e-3, "lr": None}, "muon_lr … optimizer.params.lr"),
    ]

    def check(block, params, **config):
        given = {k: v for k, v in (MUON["params"] | params).items() if v is not None}
        config = {"optimizer": {"type": "Muon", "params": given}} | config
        written = {"train_batch_size": 8, "branches": {"optimizer_groups": block}}
        check_config(written | config, BRANCHES)

    assert not_refused(lambda case: check(*case), [((b, p), words) for b, p, words in cases]) == []
    for stage in (0, 1, 2):
        check({"muon": ["*.weight"]}, {}, zero_optimization={"stage": stage})
    offloaded = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    with refused("zero_optimization.offload_optimizer: the CPU would … AdamW"):
        check({}, {}, zero_optimization=offloaded)
    with refused("optimizer_groups.muon: says what Muon steps, and the optimizer is AdamW"):
        check({"muon": ["*"]}, {}, optimizer={"type": "AdamW", "params": {"lr": LR}})
    with pytest.raises(ValueError, match=r"steps matrices, and .*\(3,\).*leave those"):
        Muon([{"params": [torch.zeros(2, 2), torch.zeros(3)], "muon": True}])


def test_the_first_screen_names_its_settings():
    config = {"train_batch_size": 8, "optimizer": UNEQUAL}
    said = preview(config, optimizer_groups(None, BRANCHES), 9)
    assert said == (
        "Muon, momentum 0.9, betas 0.9 and 0.999, eps 1e-08, weight decay 0.1; "
        "lr 0.001, constant, matrices at most 0.002, all others at most 0.0005"
    )


# -- a step


def test_newton_schulz_makes_all_singular_values_about_one():
    """About 0.7 to 1.2 (Jordan), whatever the shape, but for those near 0."""
    for shape in ((40, 40), (16, 300), (300, 16), (1, 9), (9, 1)):
        draw = torch.Generator().manual_seed(3)
        given = 1e-4 * torch.randn(shape, generator=draw)
        u, values, v = torch.linalg.svd(given, full_matrices=False)
        made = torch.linalg.svdvals(orthogonalised(given, 5))
        assert made.max() < 1.25 and made[values > 0.05 * values[0]].min() > 0.65, shape
        # along the same directions
        alike = (orthogonalised(given, 5) * (u @ v)).sum() / len(values)
        assert 0.65 < alike < 1.25, shape
        scaled = orthogonalised(given, 5) * update_scale(shape)
        assert float(scaled.square().mean().sqrt()) == pytest.approx(0.2, rel=0.35), shape
    assert not orthogonalised(torch.zeros(4, 6), 5).any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_follow_the_formula(nesterov):
    """Of several matrices and of what AdamW steps beside them."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((6, 9), (9, 6), (5, 5), (7,))
    own = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    other = [p.detach().clone().requires_grad_() for p in own]
    params = {"momentum": 0.8, "nesterov": nesterov, "ns_steps": 3}
    groups = [{"params": own[:3], "muon": True}, {"params": own[3:], "weight_decay": 0.0}]
    optimizer = Muon(groups, lr=0.02, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-6, **params)
    adam = torch.optim.AdamW(other[3:], lr=0.02, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-6)
    by_hand = [{"params": [p], "lr": 0.02, "weight_decay": 0.1} for p in other[:3]]
    for _ in range(5):
        for one, two in zip(own, other):
            one.grad = torch.randn(one.shape, generator=draw)
            two.grad = one.grad.clone()
        optimizer.step()
        adam.step()
        for group in by_hand:
            step_matrix(group, params)
        for one, two in zip(own, other):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    kept = [sorted(optimizer.state[p]) for p in own]
    assert kept == [["momentum_buffer"]] * 3 + [["exp_avg", "exp_avg_sq", "step"]]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")
def test_a_step_is_that_of_torch():
    """Which computes in bf16: within 2 % of what a step moves."""
    draw = torch.Generator().manual_seed(1)
    own = [torch.randn(shape, generator=draw).requires_grad_() for shape in ((24, 60), (60, 24))]
    other = [p.detach().clone().requires_grad_() for p in own]
    given = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    optimizers = [
        Muon([{"params": own, "muon": True}], **given),
        torch.optim.Muon(other, adjust_lr_fn="match_rms_adamw", **given),
    ]
    for _ in range(3):
        before = [p.detach().clone() for p in own]
        for one, two in zip(own, other):
            one.grad = torch.randn(one.shape, generator=draw)
            two.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for one, two, first in zip(own, other, before):
            assert (one - two).norm() <= 0.02 * (one - first).norm()
            two.data.copy_(one.data)


# -- matrices that are cut


def test_every_piece_travels_to_the_owner_of_its_matrix_and_back():
    for seed, replicas in ((s, r) for s in range(40) for r in (2, 3, 5)):
        told = pieces_of(seed, replicas)
        trades = [trade_of(told, replica) for replica in range(replicas)]
        owned = [name for trade in trades for name in trade.owned]
        assert sorted(owned) == sorted(SHAPES)
        for a, one in enumerate(trades):
            for b, other in enumerate(trades):
                assert one.sent[b] == other.got[a]
            for name, own in one.owned.items():
                pieces = [*own, *(p for got in one.got for p in got if p.name == name)]
                ends, numel = 0, math.prod(SHAPES[name])
                for piece in sorted(pieces, key=lambda p: p.offset):
                    assert piece.offset == ends
                    ends += piece.numel
                assert ends == numel
                most = max(sum(p.numel for p in held if p.name == name) for held in told)
                assert sum(piece.numel for piece in own) == most


def test_matrices_that_all_replicas_hold_alike_are_shared_out():
    cut = {f"layer {number}": dict.fromkeys(range(4), 100) for number in range(9)}
    owners = list(owners_of(cut).values())
    assert owners == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert owners_of({"a": {0: 3, 1: 5}, "b": {1: 4, 2: 4}}) == {"a": 1, "b": 2}


def test_what_is_computed_of_cut_matrices_is_that_of_whole_ones():
    cases = [(seed, 3) for seed in range(8)]
    for (seed, _), results in zip(cases, run_cases(3, replace_on_ranks, cases)):
        for result in results:
            for (name, offset), values in result.items():
                expected = changed(matrix(name)).flatten()[offset : offset + len(values)]
                torch.testing.assert_close(values, expected, msg=f"{seed} {name} {offset}")


# -- training

FIRST = "text.encoder.layers.1.mlp.fc1.weight"
ALONE = {"muon": [FIRST]}  # a group of one matrix, which has a piece on every replica
ODD = {"muon": ["image.encoder.layers.*", "text.encoder.layers.[12].*"]}  # half cuts one of them
EACH = {"image": {"weight_decay": 0.2, "layer_decay": 0.8}, "text": {"lr": 5e-4}}
FORK = Case("fork", {"image": 1, "text": 1}, {"image": 2, "text": 1}, {"image": 4, "text": 8})
LORA = {"text": {"r": 4, "alpha": 6, "target": "all"}}
ROWS = {"muon": ["text.*.lora_A.weight"]}
CASES = [
    merged_of(1, 1, 8, optimizer=MUON),
    merged_of(1, 2, 4, optimizer=MUON, zero_stage=0),
    merged_of(1, 2, 4, optimizer=UNEQUAL, optimizer_groups=ODD),
    merged_of(1, 2, 4, optimizer=MUON, zero_stage=2, optimizer_groups=ODD | EACH),
    merged_of(1, 3, 4, optimizer=MUON, optimizer_groups=ALONE),
    merged_of(1, 3, 4, optimizer=UNEQUAL, zero_stage=2, clipping={"image": 0.5, "text": 1.0}),
    replace(FORK, optimizer=MUON, optimizer_groups=EACH),
    merged_of(2, 2, 6, optimizer=MUON),
    merged_of(1, 3, 4, optimizer=MUON, zero_stage=3, optimizer_groups=ALONE),
    replace(FORK, optimizer=UNEQUAL, zero_stage=3),
    # of 4 rows over 3 replicas the last has none
    merged_of(1, 3, 4, optimizer=MUON, zero_stage=3, optimizer_groups=ROWS, lora=LORA),
    merged_of(1, 2, 4, optimizer=MUON, precision="bf16", zero_stage=3, optimizer_groups=ODD),
    merged_of(1, 2, 4, optimizer=MUON, precision="bf16", optimizer_groups=ODD),
    merged_of(1, 3, 4, optimizer=MUON, precision="bf16", zero_stage=2, optimizer_groups=ALONE),
    merged_of(1, 2, 4, optimizer=MUON, precision="fp16", optimizer_groups=ODD),
]
# of what is trained: rounded weights have other gradients, and Adam makes full moves of small ones
HALF = {"bf16": 0.02, "fp16": 0.01}


def test_split_training_equals_unsplit_training():
    """fp32: to 1e-5 of each parameter, as sums are taken in another order. Key biases are left out,
    whose gradient is rounding, of which Adam makes full moves."""
    for case, results in run_all(train_split, [replace(case, steps=4) for case in CASES]):
        reference = train_whole(case)
        is_fp32 = case.precision == "fp32"
        losses = [m.loss for m in results[0]["metrics"]]
        assert losses == pytest.approx(reference["losses"], rel=1e-5 if is_fp32 else 5e-3), case
        for name, parameter in (p for result in results for p in result["parameters"].items()):
            if not name.endswith(("k_proj.bias", "in_proj_bias")):
                expected = reference["parameters"][name]
                allowed = HALF.get(case.precision, 1e-5) * float(expected.norm())
                allowed += LR * (1e-2 if is_fp32 else expected.numel() ** 0.5)
                assert float((parameter - expected).norm()) <= allowed, (case, name)
        patterns = case.optimizer_groups.get("muon")
        if patterns and case.zero_stage and not case.lora:
            pieces = [name for result in results for name, _, _ in result["gradients"]]
            cut = max(pieces.count(name) for name in matrices("vit+clip", muon=patterns))
            assert cut == (3 if case.optimizer_groups == ALONE else 2), case


def test_a_slice_keeps_one_number_of_a_matrix_and_two_of_the_rest():
    towers = image_and_text_towers("vit+clip", 0.0)
    shapes = {
        n: s for t in towers.values() for p in t.specs for n, s in p.canonical_parameters.items()
    }
    own = sum(math.prod(shapes[name]) for name in matrices("vit+clip"))
    cases = [merged_of(1, 2, 4, optimizer=each) for each in (MUON, {})]
    muon, adam = (results for _, results in run_all(train_split, cases))
    saved = sum(r["num_state_numbers"] for r in adam) - sum(r["num_state_numbers"] for r in muon)
    assert own - 100 <= saved <= own + 100  # counts of steps, and what fills the last slice
