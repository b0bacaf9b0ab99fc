"""The claim: a tower with adapters, run layer by layer, is `peft.get_peft_model` on the library's
whole model with the same weights: output and gradients, also where it is cut in two.

Equal to rounding: peft adds the adapter of an nn.MultiheadAttention to its weight in another order.
"""

from functools import cache

import pytest
import torch
from neighbours import neighbour
from rounding import assert_equal_rows
from torch import nn

from engine.module import learned_parameters
from models.towers.adapters.layers import (
    adapted_tower,
    adapter_state,
    plain_tower,
    without_adapters,
)
from models.towers.adapters.lora import LoRA
from models.towers.adapters.targets import kind_of, modules_of
from models.towers.building import describe_layers, with_head
from models.towers.layers import library_models_kept

peft = pytest.importorskip("peft", reason="adapters are made by peft")
CASES = neighbour("models/conftest.py").CASES
RECORDED = neighbour("models/test_libraries.py").CASES

# adapted modules of a block with "attention" and with "mlp"
FAMILIES = dict.fromkeys(
    """hf-clip/hf-siglip/hf-siglip2/hf-vit/hf-dinov2/hf-swin/bert/roberta/distilbert/clip/siglip
chinese-clip/mpnet/electra/xlm/t5""".replace("\n", "/").split("/"),
    (4, 2),
)
FAMILIES |= {"vit": (1, 2), "modernbert": (2, 2), "mt5": (4, 3)}
FAMILIES |= {"timm vit": (2, 2), "timm swin": (2, 2), "timm siglip": (2, 2)}
FAMILIES |= {"open_clip vit": (1, 2), "open_clip texts": (1, 2)}
WITHOUT_ATTENTION = ("hf-convnext", "hf-convnextv2")


@cache
def tower_of(name):
    return with_head({**CASES, **RECORDED}[name].tower(), 16)


def random_adapters(layers, seed=5):
    """B is zero at the start, and then nothing of A could be seen."""
    draw = torch.Generator().manual_seed(seed)
    for layer in layers:
        for name, tensor in layer.state_dict().items():
            if ".lora_B." in name:
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=draw))
    return layers


def built(tower):
    with library_models_kept():
        return random_adapters([spec.build(seed=3) for spec in tower.specs[:-1]])


def by_peft(name, tower, layers):
    """peft's model around the library's, with the weights and the adapters of `layers`; and the
    names in the run of peft's parameters."""
    plain = built(plain_tower(tower))
    if name in CASES:
        model = CASES[name].reference(plain)
        saved = {saved: id(tensor) for saved, tensor in CASES[name].named(model).items()}
    else:
        model = RECORDED[name].library()
        state = {
            layer.canonical_names[local].partition(".")[2]: tensor
            for layer in plain
            for local, tensor in layer.state_dict().items()
        }
        model.load_state_dict(state, strict=False)
        saved = {saved: id(tensor) for saved, tensor in model.state_dict(keep_vars=True).items()}
    live = {id(tensor): live for live, tensor in model.named_parameters(remove_duplicate=False)}
    names = {}  # module in the run -> module of the library's model
    for canonical in adapter_state(layers):
        module = canonical.partition(".")[2].rpartition(".lora_")[0]
        last = "weight" if f"{module}.weight" in saved else "in_proj_weight"
        names[module] = live[saved[f"{module}.{last}"]].removesuffix(f".{last}")
    lora = next(spec.lora for spec in tower.specs if hasattr(spec, "lora"))
    wrapped = peft.get_peft_model(model, lora.config(sorted(names.values())))
    ours = {}
    with torch.no_grad():
        theirs = dict(wrapped.named_parameters())
        for canonical, tensor in adapter_state(layers).items():
            module, _, matrix = canonical.partition(".")[2].rpartition(".lora_")
            full = f"base_model.model.{names[module]}.lora_{matrix[0]}.default.weight"
            theirs[full].copy_(tensor)
            ours[canonical] = theirs[full]
    return wrapped, ours


def reference(name, wrapped, inputs):
    if name in CASES:
        return CASES[name].run_reference(wrapped, inputs)
    return wrapped(*[inputs[key] for key in ("pixel_values", "input_ids") if key in inputs])


def run(layers, tensors):
    for layer in layers:
        tensors = layer(tensors)
    return tensors


def test_a_cut_tower_equals_peft_on_the_whole_model(subtests):
    pairs = [(name, "attention") for name in FAMILIES]
    pairs += [(name, "mlp") for name in WITHOUT_ATTENTION]
    pairs += [("hf-siglip", "all"), ("timm vit", ("attn.qkv", "fc2")), ("open_clip vit", "all")]
    for name, target in pairs:
        with subtests.test(f"{name}, {target}"):
            check_a_cut_tower(name, target)


def check_a_cut_tower(name, target):
    tower = adapted_tower(tower_of(name), LoRA(r=3, alpha=6, target=target))
    case = {**CASES, **RECORDED}[name]
    torch.manual_seed(0)
    inputs, branch = case.inputs(), case.branch
    layers = [layer.eval() for layer in built(tower)]  # nothing draws
    wrapped, theirs = by_peft(name, tower, layers)
    expected = reference(name, wrapped.eval(), inputs)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (expected * weight).sum().backward()

    middle = len(layers) // 2
    sent = run(layers[:middle], inputs)
    received = {
        key: tensor.detach().requires_grad_(tensor.requires_grad) for key, tensor in sent.items()
    }
    found = run(layers[middle:], received)[f"{branch}_features"]
    assert_equal_rows(found, expected)
    (found * weight).sum().backward()
    crossed = [key for key, tensor in sent.items() if tensor.requires_grad]
    torch.autograd.backward([sent[key] for key in crossed], [received[key].grad for key in crossed])

    gradients = {
        layer.canonical_names[local]: parameter.grad
        for layer in layers
        for local, parameter in layer.named_parameters()
        if parameter.requires_grad
    }
    assert gradients.keys() == theirs.keys(), "the adapters learn, and nothing else"
    for canonical, gradient in gradients.items():
        expected = theirs[canonical].grad
        assert expected.abs().max() > 0, canonical
        assert_equal_rows(gradient.flatten(), expected.flatten())

    merged = [without_adapters(*pair, merge=True) for pair in zip(layers, tower.specs)]
    assert [m.canonical_names for m in merged] == [
        spec.template.canonical_names for spec in plain_tower(tower).specs[:-1]
    ]
    with torch.no_grad():
        again = run(merged, inputs)[f"{branch}_features"]
    assert_equal_rows(again, found)


def test_out_proj_as_peft_computes_it_is_why_it_has_no_adapter():
    """peft adds the adapter of `out_proj` twice. Where this fails, peft does so no more, and
    `models/towers/adapters.py` can adapt it."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.eye_(attention.out_proj.weight)  # its bias is zero: what comes out are the heads
    states = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        heads = attention(states, states, states)[0]
        model = peft.get_peft_model(nn.ModuleDict({"attn": attention}), LoRA(r=2).config(["attn"]))
        wrapped = model.base_model.model["attn"]
        wrapped.base_layer.out_proj.lora_B["default"].weight.fill_(0.5)
        delta = wrapped.base_layer.out_proj.get_delta_weight("default")
        found = wrapped(states, states, states)[0]
    assert delta.abs().max() > 0.01
    assert_equal_rows(found, heads + 2 * heads @ delta.T)


def test_the_modules_of_a_block_by_kind():
    for name, expected in FAMILIES.items():
        found = {}
        for spec in tower_of(name).specs[:-1]:
            modules = [module for module in modules_of(spec.template) if module.takes_adapter]
            kinds = [kind_of(module) for module in modules]
            found[kinds.count("attention"), kinds.count("mlp")] = spec.name
        assert expected in found, (name, found)


def test_first_values_depend_on_the_layer_alone():
    tower = adapted_tower(tower_of("hf-clip"), LoRA(r=2, target="all"))
    first = [spec.build(seed=3) for spec in tower.specs]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    alone = tower.specs[2].build(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    plain = plain_tower(tower).specs[2].build(seed=3)
    for local, tensor in alone.state_dict().items():
        assert torch.equal(tensor, first[2].state_dict()[local])
        if ".lora_B." in local:
            assert not tensor.any()
        elif ".lora_A." not in local:
            assert torch.equal(tensor, plain.state_dict()[local.replace(".base_layer.", ".")])
    of_a = [t for layer in first for n, t in layer.state_dict().items() if ".lora_A." in n]
    assert not any(torch.equal(one, two) for one, two in zip(of_a, of_a[1:]))
    assert tower.specs[0].num_learned == 0 and not learned_parameters(tower.specs[0])
    assert sorted(learned_parameters(tower.specs[2])) == sorted(
        name for name in tower.specs[2].canonical_parameters if ".lora_" in name
    )
    assert len(describe_layers(tower, 2)) == len(tower.specs)


def test_rslora_and_alpha_scale_as_in_peft():
    for lora, scale in ((LoRA(r=4, alpha=16), 4.0), (LoRA(r=4, alpha=16, use_rslora=True), 8.0)):
        layer = adapted_tower(tower_of("bert"), lora).specs[1].build(seed=0)
        adapted = [module for module in layer.modules() if hasattr(module, "lora_A")]
        scales = {scale for module in adapted for scale in module.scaling.values()}
        assert scales == {scale}


def test_what_cannot_be_adapted_is_refused():
    for name, lora, words in (
        ("resnet-basic", {"target": "all"}, ["convolutions take no adapters", '"locked"']),
        ("convnext", {"target": "attention"}, ["matches no linear layer", '"all"', "block.3"]),
        ("bert", {"target": ["qury"]}, ["'qury' matches no linear layer", "query, key, value"]),
        ("bert", {"target": ["query", "LayerNorm"]}, ["is a LayerNorm"]),
        ("hf-clip", {"target": ["patch_embedding"]}, ["is a Conv2d"]),
        ("vit", {"target": ["out_proj"]}, ["matches no linear layer", "self_attention"]),
        ("vit", {"dropout": 0.1}, ["lora.dropout", "nn.MultiheadAttention"]),
        ("torchvision swin", {}, ["without calling the module", "attn.qkv"]),
    ):
        with pytest.raises(ValueError) as error:
            adapted_tower(tower_of(name), LoRA(**lora))
        assert all(word in str(error.value) for word in [*words, "branches.train."]), error.value
