"""Measured costs: what is counted is exact, equal layers are measured once, the cache never fails,
ranks agree. No test asks how long."""

import dataclasses
import json
import math

import profile_cases
import pytest
import torch
from profile_cases import WIDTH, Builder, LargeSpec, Lookup, inputs, tower
from ranks import run_ranks

from engine.layer_keys import layer_key
from engine.planning.measured import Cache
from engine.planning.profile_layers import Effort, Ranks, profile_layers
from engine.planning.profile_machine import NUM_PARAMETERS, _sample, profile_machine
from engine.processes.out_of_memory import OutOfMemory
from models.towers.building import build_towers, describe_layers, meta_inputs
from models.towers.layers import Tower

CPU = torch.device("cpu")
QUICK = Effort(budget_s=0.0, least_repeats=1)
PASSED_ON = 5 * 8 + 8  # bytes per sample of the mask and the place


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


def measure(specs, builder=None, sizes=(2, 4), dtype=torch.float32):
    return profile_layers(specs, builder or Builder(), inputs, dtype, CPU, sizes, QUICK)


def test_a_layer_that_does_not_fit_is_named_with_what_to_give_instead():
    with pytest.raises(OutOfMemory) as caught:
        measure([*tower(2), LargeSpec("text.2", {"layer_idx": 2})])
    first, says, _, instead = str(caught.value).splitlines()
    assert "measuring the layer text.2 with a micro-batch of 4" in first
    assert says.startswith("the allocator says: ") and caught.value.repeats
    assert '"micro_batch_size"' in instead and '"layout"' in instead
    assert "DefaultCPUAllocator" in str(caught.value.__cause__)
    (smaller,) = measure([LargeSpec("text.2", {"layer_idx": 2})], sizes=[2])
    assert smaller.name == "text.2"


# -- what is counted


def test_bytes_of_linear_and_relu_are_those_worked_out_by_hand():
    """The first layer keeps its input, for nobody else has it, and its output, which ReLU saves and
    the next layer reads. The second keeps its output only: its input is counted with the first.
    Neither keeps what is between Linear and ReLU, or a weight."""
    first, second = measure(tower(2), sizes=[3])
    activation = WIDTH * 4
    assert first.activation_bytes.at(3) == 3 * (activation + activation + PASSED_ON)
    assert second.activation_bytes.at(3) == 3 * activation
    assert first.output_bytes.at(3) == second.output_bytes.at(3) == 3 * (activation + PASSED_ON)
    assert first.num_parameters == WIDTH * WIDTH + WIDTH


def test_half_precision_halves_floats_and_not_integers():
    first, second = measure(tower(2), sizes=[3], dtype=torch.bfloat16)
    assert second.activation_bytes.at(3) == 3 * WIDTH * 2
    assert second.output_bytes.at(3) == 3 * (WIDTH * 2 + PASSED_ON)


def test_bytes_are_linear_in_the_size_and_seconds_are_positive():
    for cost in measure(tower(2), sizes=[8, 2, 4]):
        for curve in (cost.activation_bytes, cost.output_bytes):
            assert curve.sizes == (2, 4, 8)
            assert curve.at(8) == 2 * curve.at(4) == 4 * curve.at(2)
        assert min(*cost.forward_s.values, *cost.backward_s.values) > 0


def test_layers_run_as_the_executor_runs_them():
    """In training mode with gradients, the first on data, which wants none; gradients add up in the
    parameters."""
    builder = Builder()
    measure(tower(2, dropout=0.5), builder, sizes=[2])
    assert [layer.seen for layer in builder.layers] == [
        (True, True, False, torch.float32),
        (True, True, True, torch.float32),
    ]
    assert all(layer.linear.weight.grad is not None for layer in builder.layers)


def test_the_run_draws_as_if_nothing_had_been_measured():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    measure(tower(1, dropout=0.5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("width", [64, 128])
def test_counts_on_the_meta_device_are_the_measured_bytes(width):
    """Transformer blocks: to the byte. Residual blocks: batch normalisation keeps two numbers per
    channel and micro-batch, which the counts, made at two samples, take for one sample's; at 8
    samples that is below 1 % of a block whose image is 16 pixels wide."""
    # with dropout CPUs take the unfused attention, which GPUs do not
    dropout = "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    text = f"bert-tiny:hidden_size={width},num_attention_heads=2,intermediate_size={2 * width},{dropout}"
    for built, tolerance in zip(
        build_towers("resnet18:layers=2-1-1-1", text, 16, 64, 50, 12, 0), (0.01, 0.0)
    ):
        blocks = Tower(built.branch, built.name, built.width, built.specs[:3], built.config)

        def real(size, tower=blocks):
            return {
                name: (torch.randn if t.is_floating_point() else torch.ones)(t.shape).to(t.dtype)
                for name, t in meta_inputs(tower, size).items()
            }

        costs = profile_layers(
            blocks.specs, lambda spec: spec.build(0), real, torch.float32, CPU, [8], QUICK
        )
        for cost, counts in zip(costs[1:], describe_layers(blocks, 4)[1:]):
            counted = pytest.approx(8 * counts.activation_bytes, rel=tolerance, abs=0)
            assert cost.activation_bytes.at(8) == counted
            assert cost.output_bytes.at(8) == 8 * counts.output_bytes
            assert (cost.name, cost.num_parameters) == (counts.name, counts.num_parameters)


# -- equal layers


def test_equal_layers_are_measured_once():
    builder = Builder()
    costs = measure([*tower(4), *tower(1, heads=2)], builder)
    # the first has data for input; 1, 2, 3 are one; another number of heads
    assert builder.built == ["text.0", "text.1", "text.0"]
    assert [cost.name for cost in costs] == ["text.0", "text.1", "text.2", "text.3", "text.0"]
    assert costs[1].forward_s == costs[2].forward_s == costs[3].forward_s


def test_every_block_of_a_library_model_has_the_same_key():
    image, text = build_towers("vit_b_16:num_layers=3", "bert-mini", 16, 32, 50, 12, 0)
    for blocks in (image.specs[1:4], text.specs[1:5]):
        assert len({layer_key(spec.template) for spec in blocks}) == 1
    wider = build_towers("resnet18", "bert-mini:num_attention_heads=8", 16, 32, 50, 12, 0)[1]
    # the same parameters, more heads
    assert layer_key(wider.specs[1].template) != layer_key(text.specs[1].template)


def test_a_dropout_matters_in_being_there():
    keys = [layer_key(tower(1, dropout=p)[0].template) for p in (0.0, 0.1, 0.2)]
    assert keys[0] != keys[1] == keys[2]


# -- the cache


def test_a_second_call_measures_nothing_and_says_the_same():
    first, builder = measure(tower(3)), Builder()
    assert measure(tower(3), builder) == first and builder.built == []


def test_what_changes_the_cost_is_measured_again():
    measure(tower(2))
    for other in (
        {"dtype": torch.bfloat16},
        {"sizes": [3]},
        {"specs": tower(2, heads=2)},
        {"specs": tower(2, dropout=0.5)},
    ):
        builder = Builder()
        measure(**{"specs": tower(2), "builder": builder, **other})
        assert builder.built == ["text.0", "text.1"], other


def test_precision_counts_where_inputs_do_not_show_it():
    """As for token ids, which are integers in any precision."""

    def ids(size):
        return {"ids": torch.zeros(size, dtype=torch.int64)}

    for dtype in (torch.float32, torch.bfloat16):
        builder = Builder()
        profile_layers([Lookup()], builder, ids, dtype, CPU, [2], QUICK)
        assert builder.built == ["text.embeddings"]


def test_another_number_of_threads_is_other_hardware(monkeypatch):
    measure(tower(1))
    builder, threads = Builder(), torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    measure(tower(1), builder)
    assert builder.built == ["text.0"]


def test_a_damaged_file_is_as_good_as_none(own_cache):
    measure(tower(1), sizes=[2])
    (file,) = own_cache.glob("*.json")
    outputs, seconds = json.loads(file.read_text()), json.loads(file.read_text())
    outputs["measured"]["outputs"] = [["hidden", "no_such_dtype", [2, 8], True]]
    seconds["measured"]["forward_s"] = float("nan")
    damaged = ["", "{", "[]", '{"measured": null}', '{"measured": {}}', "\x00" * 40]
    for content in (*damaged, json.dumps(outputs), json.dumps(seconds)):
        file.write_text(content)
        builder = Builder()
        measure(tower(1), builder, sizes=[2])
        assert builder.built == ["text.0"], content
        assert Cache().read(file.stem) is not None and not list(own_cache.glob("*.part"))


def test_a_folder_that_cannot_be_written_is_no_failure(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WYE_CACHE", str(tmp_path / "file"))
    builder = Builder()
    assert measure(tower(4), builder) and measure(tower(4), builder)
    # within a call equal layers are still measured once
    assert builder.built == ["text.0", "text.1"] * 2


# -- what is no layer's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_machine_has_finite_costs(dtype, monkeypatch):
    monkeypatch.setattr("engine.planning.profile_machine.NUM_PARAMETERS", 1 << 16)
    machine = profile_machine(CPU, dtype, [100, 5000, 7], batch_size=32, embed_dim=16)
    assert machine.measured
    others = ("name", "node_bytes_per_s", "node_latency_s", "collective_s_per_byte")
    numbers = dataclasses.asdict(machine)
    assert numbers.pop("communicator_bytes") == 0  # there is no NCCL
    assert all(0 < numbers[name] < math.inf for name in numbers.keys() - {*others})
    assert machine.name


def test_a_sample_of_parameters_is_bounded_and_keeps_the_mean_size():
    for sizes in ([3, 5], [100] * 1000, [1_000_000] * 300):
        sample = _sample(sizes)
        assert sum(sample) / len(sample) == sum(sizes) / len(sizes)
        assert 0 < sum(sample) <= 2 * NUM_PARAMETERS
    for sizes in ([], [0], [30_000_000, *[768] * 100]):
        assert 0 < sum(_sample(sizes)) <= 2 * NUM_PARAMETERS


def test_effort_is_bounded_below_and_above():
    effort = Effort(least_repeats=2, most_repeats=9)
    assert [effort.repeats(share_s=1.0, pass_s=s) for s in (100.0, 0.3, 0.2, 0.0)] == [2, 3, 5, 9]


def test_one_process_agrees_with_itself():
    assert Ranks().all(False) is False and Ranks().least(3) == 3
    assert Ranks().mean([1.0, 2.0]) == [1.0, 2.0]


# -- all ranks


def test_ranks_get_the_same_numbers_and_measure_again_when_one_knows_nothing(tmp_path):
    first, second = run_ranks(2, profile_cases.together, str(tmp_path / "shared"))
    assert first == second
    new, known, forgotten = first
    assert new["built"] == forgotten["built"] == ["text.0", "text.1"] * 2  # of each tower
    assert known["built"] == [] and known["layers"] == new["layers"]
    assert new["machine"].ranks_per_node == 2 and 0 < new["machine"].link_bytes_per_s < math.inf
    assert new["machine"].node_bytes_per_s == math.inf
