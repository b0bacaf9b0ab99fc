"""Compiled layers: the same draws again in a second forward, and "auto" goes by what was measured.
That they train as others do: `test_parity.py -k compiled`."""

from dataclasses import replace

import pytest
import torch
from compilers import needs_a_compiler
from cost_models import proportional
from profile_cases import Builder, inputs, tower
from refusals import not_refused
from rounding import assert_equal_rows

from engine.compiling import compile_layer, compiles, compiling
from engine.config.reading import check_config
from engine.planning.costs import Loading, cost_model_from_json, cost_model_to_json
from engine.planning.planner import plan_run
from engine.planning.profile_layers import Effort, profile_layers
from models.towers.building import build_towers

COSTS = proportional({"image": [1.0, 1.0], "text": [1.0, 1.0]})


@pytest.mark.all("compiles layers")
def test_a_second_compiled_forward_draws_the_same_again():
    """With and without gradients, as the two forwards of a schedule that recomputes; other seeds
    draw other numbers."""
    needs_a_compiler()
    text = (
        "bert-tiny:hidden_size=32,num_hidden_layers=1,intermediate_size=32,hidden_dropout_prob=0.3"
    )
    _, text = build_towers("resnet18", text, 8, 32, 50, 12, 0)
    block = text.specs[1].build(seed=0).train()
    compile_layer(block)
    given = {"text_hidden": torch.randn(3, 7, 32), "attention_mask": torch.ones(3, 7).long()}

    def forward(seed, gradients):
        torch.manual_seed(seed)
        with compiling(), torch.set_grad_enabled(gradients):
            return block(given)["text_hidden"].detach()

    assert_equal_rows(forward(1, False), forward(1, True))
    assert not torch.allclose(forward(1, True), forward(2, True), atol=1e-2)


def test_names_of_tensors_stay():
    (spec,) = tower(1)
    layer = Builder()(spec)
    names = [*layer.state_dict()]
    compile_layer(layer)
    assert [*layer.state_dict()] == names


def test_a_layer_that_cannot_be_compiled_is_one_clear_error():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return x + 1

    def backend(graph, example):
        raise OSError("no compiler")

    layer = Layer()
    layer.compile(backend=backend)
    with pytest.raises(RuntimeError, match=r'no compiler[\s\S]*branches.compile: write "off"'):
        with compiling():
            layer(torch.ones(2))


# -- what is chosen


def block_of(compile, **others):
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return check_config(
        {**config, "branches": {"layout": "merged", "compile": compile, **others}},
        ("image", "text"),
    )


def test_the_plan_says_which_branches_are_compiled():
    costs = replace(COSTS, compiled_share={"image": 0.8, "text": 0.99})
    for written, compiled in (
        ("off", ()),
        ("layers", ("image", "text")),
        ({"text": "layers"}, ("text",)),
        ("auto", ("image",)),
        ({"image": "off", "text": "auto"}, ()),
    ):
        plan = plan_run(*block_of(written), 1, costs)
        assert plan.compiled == compiled, written
        if written == "auto":
            assert "torch.compile: image 0.80 of the time of its layers: on" in plan.reasons
            assert "text 0.99 of the time of its layers: off" in plan.reasons


def test_auto_compiles_nothing_that_was_not_measured():
    plan = plan_run(*block_of("auto"), 1, COSTS)
    assert not plan.compiled and "image not measured: off" in plan.reasons


def test_what_was_measured_is_kept_with_the_costs():
    loading = Loading({"image": 0.001, "text": 0.0001}, 2, 16, shared=False)
    costs = replace(COSTS, compiled_share={"image": 0.8}, loading=loading)
    assert cost_model_from_json(cost_model_to_json(costs)) == costs


def test_what_is_not_known_is_refused():
    cases = [
        ("on", "branches.compile: unknown value 'on'"),
        ({"image": "layer"}, "did you mean 'layers'"),
        ({"picture": "layers"}, "'branches.compile.picture'"),
    ]
    assert not_refused(block_of, cases) == []


@pytest.mark.all("compiles layers")
def test_compiled_layers_are_measured_apart_from_others(tmp_path, monkeypatch):
    needs_a_compiler()
    monkeypatch.setenv("WYE_CACHE", str(tmp_path))
    builder = Builder()

    def measure(compiled):
        effort = Effort(budget_s=0.0, least_repeats=1)
        given = (tower(1), builder, inputs, torch.float32, torch.device("cpu"), [2])
        return profile_layers(*given, effort, None, compiled)

    first = measure(False)
    assert len(builder.layers) == 1
    compiled = measure(True)
    assert len(builder.layers) == 2 and compiled != first
    assert measure(True) == compiled and len(builder.layers) == 2

    assert compiles("layers") and not compiles("off") and not compiles("auto", 0.99)
