"""The claim of `test_towers_equal_library.py` for towers that adapters make: layer by layer they are
the library's model, bit for bit in fp32. Here the weights come from a file that the library's model
was saved to."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import open_clip
import pytest
import timm
import torch
import torchvision
from rounding import assert_equal_rows
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.layer_keys import layer_key
from models.towers.attention import SelfAttention
from models.towers.building import (
    count_flops,
    describe_layers,
    meta_inputs,
    takes_other_sizes,
    with_head,
)
from models.towers.fusion import FusionSizes
from models.towers.image import full_name, image_tower
from models.towers.layers import LibraryModel, library_models_kept
from models.towers.libraries import torchvision as adapter
from models.towers.libraries.torchvision_by_hand import ARCHITECTURES
from models.towers.text import text_tower
from models.weights.reading import open_weights

VOCAB, TOKENS, EOS = 120, 12, 119


def timm_model(architecture: str, **arguments) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(architecture, num_classes=0, **arguments)


def torchvision_model(architecture: str, last: str, **arguments) -> Callable[[], nn.Module]:
    def make():
        model = torchvision.models.get_model(architecture, **arguments)
        model.set_submodule(last, nn.Identity())
        return model

    return make


def sides(name: str, quick_gelu: bool = False, vision=(), text=()) -> open_clip.CustomTextCLIP:
    config = open_clip.get_model_config(name)
    vision = {**config["vision_cfg"], **dict(vision), "output_tokens": False}
    text = {**config["text_cfg"], "vocab_size": VOCAB, **dict(text), "output_tokens": False}
    return open_clip.CustomTextCLIP(config["embed_dim"], vision, text, quick_gelu)


def open_clip_images(name: str, projection: str | None, **vision) -> Callable[[], nn.Module]:
    def make():
        side = sides(name, vision=vision, text={"layers": 1, "width": 64, "heads": 1}).visual
        if projection == "proj":
            side.proj = None
        elif projection:
            side.set_submodule(projection, nn.Identity())
        return side

    return make


def open_clip_texts(name: str, quick_gelu: bool = False, **text) -> Callable[[], nn.Module]:
    def make():
        side = sides(name, quick_gelu, {"layers": 1, "width": 64}, text).text
        if isinstance(side.text_projection, nn.Parameter):
            side.text_projection = None
        return side

    return make


@dataclass(frozen=True)
class Case:
    """A tower's name, the same model by the library's own constructor, its input, and how many
    layers the tower has."""

    name: str
    library: Callable[[], nn.Module]
    size: int
    num_layers: int

    @property
    def branch(self) -> str:
        return "text" if self.size == 0 else "image"

    def tower(self):
        if self.branch == "image":
            return image_tower(self.name, self.size)
        return text_tower(self.name, VOCAB, TOKENS, 0, EOS)

    def inputs(self) -> dict[str, Tensor]:
        if self.branch == "image":
            return {"pixel_values": torch.randn(3, 3, self.size, self.size)}
        ids = torch.randint(1, EOS, (3, TOKENS))
        for row, length in enumerate((TOKENS, 5, 9)):
            ids[row, length - 1], ids[row, length:] = EOS, 0
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


VIT = {"depth": 2, "embed_dim": 48, "num_heads": 3, "drop_path_rate": 0.4, "attn_drop_rate": 0.1}
SWIN = {"embed_dim": 24, "depths": (2, 1, 1, 1), "num_heads": (1, 2, 2, 2), "drop_path_rate": 0.4}
TEXT = {"layers": 2, "width": 64, "heads": 2, "context_length": TOKENS}


def spelled(name: str, values: dict) -> str:
    def word(value):
        if isinstance(value, bool):
            return str(value).lower()
        return "-".join(map(str, value)) if isinstance(value, tuple) else value

    return f"{name}:{','.join(f'{key}={word(value)}' for key, value in values.items())}"


def timm_case(architecture: str, num_layers: int, size=64, sized=False, **arguments) -> Case:
    """`sized`: its constructor takes the size of the images."""
    name = spelled(f"timm:{architecture}", arguments) if arguments else f"timm:{architecture}"
    of_size = {"img_size": size} if sized else {}
    return Case(name, timm_model(architecture, **arguments, **of_size), size, num_layers)


def torchvision_case(architecture: str, last: str, num_layers: int, **arguments) -> Case:
    name = spelled(architecture, arguments) if arguments else architecture
    return Case(name, torchvision_model(architecture, last, **arguments), 64, num_layers)


def open_clip_case(architecture: str, projection: str | None, num_layers: int, **vision) -> Case:
    of_timm = {} if "timm_model_name" in vision else {"image_size": 64}
    library = open_clip_images(architecture, projection, **vision, **of_timm)
    return Case(spelled(f"open_clip:{architecture}", vision), library, 64, num_layers)


def text_case(architecture: str, quick_gelu: bool = False, **more) -> Case:
    library = open_clip_texts(architecture, quick_gelu, **TEXT, **more)
    return Case(spelled(f"open_clip:{architecture}", TEXT), library, 0, 4)


CASES = {
    "timm resnet": timm_case("resnetv2_18", 6, layers=(1, 1, 1, 1), drop_path_rate=0.3),
    "timm vit": timm_case(
        "vit_tiny_patch16_224", 4, sized=True, **VIT, drop_rate=0.2, pos_drop_rate=0.1
    ),
    "timm convnext": timm_case(
        "convnext_atto", 7, dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), drop_path_rate=0.5
    ),
    "timm efficientnet": timm_case("test_efficientnet", 7, drop_path_rate=0.5, drop_rate=0.2),
    "timm mobilenet": timm_case("mobilenetv3_small_050", 14),
    "timm swin": timm_case("swin_tiny_patch4_window7_224", 7, sized=True, **SWIN),
    "timm eva": timm_case("eva02_tiny_patch14_224", 4, size=56, sized=True, depth=2),
    "timm dinov3": timm_case(
        "vit_small_patch16_dinov3", 4, sized=True, depth=2, embed_dim=96, num_heads=3
    ),
    "timm siglip": timm_case("vit_base_patch16_siglip_224", 4, sized=True, **VIT),
    "timm hybrid": timm_case("vit_tiny_r_s16_p8_224", 4, sized=True, depth=2),
    "timm two resolutions": timm_case("pit_ti_distilled_224", 16, sized=True),
    "timm functional dropout": timm_case("ghostnet_050", 19, drop_rate=0.4),
    "timm shapes asked": timm_case("mobilevit_xxs", 12, drop_path_rate=0.2),
    "timm a table of the first forward": timm_case("convit_tiny", 4, sized=True, depth=2),
    "torchvision efficientnet": torchvision_case("efficientnet_b0", "classifier.1", 19),
    "torchvision mobilenet": torchvision_case(
        "mobilenet_v3_small", "classifier.3", 14, dropout=0.3
    ),
    "torchvision regnet": torchvision_case("regnet_y_400mf", "fc", 18),
    "torchvision swin": torchvision_case("swin_t", "head", 17),
    "torchvision densenet": torchvision_case("densenet121", "classifier", 9),
    "open_clip vit": open_clip_case(
        "ViT-B-32", "proj", 4, layers=2, width=64, patch_size=16, patch_dropout=0.5
    ),
    "open_clip attention pool": open_clip_case("RN50", None, 6, layers=(1, 1, 1, 1), width=16),
    "open_clip timm": open_clip_case(
        "convnext_base", "head.proj", 14, timm_model_name="convnext_atto", timm_drop=0.1
    ),
    "open_clip coca": open_clip_case(
        "coca_ViT-B-32", "proj", 4, layers=1, width=64, attn_pooler_queries=4
    ),
    "open_clip texts": text_case("ViT-B-32", pool_type="eos", eos_id=EOS),
    "open_clip texts, quick GELU": text_case("ViT-B-32-quickgelu", True),
    "open_clip texts, siglip": text_case("ViT-B-16-SigLIP"),
    "open_clip texts, coca": text_case("coca_ViT-B-32"),
}


# One of each kind, for what is not about numbers.
SMALL = """timm resnet/timm vit/timm efficientnet/timm two resolutions/timm functional dropout
timm shapes asked/timm a table of the first forward/torchvision mobilenet/open_clip vit
open_clip attention pool/open_clip coca/open_clip texts/open_clip texts, siglip"""
SMALL = {name: CASES[name] for name in SMALL.replace("\n", "/").split("/")}


@pytest.fixture(scope="module")
def models(module_folder):
    """Of each case on demand: the library's model, away from its first values, the tower, and
    layers with weights from the file that the model was saved to."""
    made = {}

    def file(case):
        if case.name not in made:
            torch.manual_seed(0)
            model = case.library()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
            folder = module_folder("weights")
            state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            save_file(state, folder / "model.safetensors")
            made[case.name] = model, case.tower(), folder
        return made[case.name]

    def of(case):
        model, tower, folder = file(case)
        weights = open_weights(case.branch, str(folder), tower)
        with library_models_kept():
            layers = [spec.build(3, weights) for spec in tower.specs]
        # statistics as in the file
        model.load_state_dict({**model.state_dict(), **library_state(layers)}, strict=True)
        return model, tower, layers

    of.file = file
    return of


def library_state(layers) -> dict[str, Tensor]:
    return {
        layer.canonical_names[local].split(".", 1)[1]: tensor
        for layer in layers
        for local, tensor in layer.state_dict().items()
    }


def run(layers, tensors):
    for layer in layers:
        tensors = layer(tensors)
    return tensors


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.all("more networks of a kind")] * (name not in SMALL))
        for name in CASES
    ],
)
def test_outputs_gradients_and_statistics(models, name):
    case = CASES[name]
    model, tower, layers = models(case)
    assert len(layers) == case.num_layers and tower.config["notes"] == []
    for training in (True, False):
        check_equal(case, model, layers, tower.width, training)


def check_equal(case, model, layers, width, training):
    for module in (model, *layers):
        module.train(training)
        module.zero_grad()
    inputs = case.inputs()
    torch.manual_seed(1)  # with dropout both sides draw the same numbers in the same order
    tensors = run(layers, inputs)
    assert set(tensors) == {f"{case.branch}_features"}
    features = tensors[f"{case.branch}_features"]
    torch.manual_seed(1)
    expected = model(next(iter(inputs.values())))
    assert torch.equal(features, expected) and features.shape[1] == width

    weight = torch.randn_like(features)
    (features * weight).sum().backward()
    (expected * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    # those below our own self-attention are sums in another order
    rounded = any(isinstance(m, SelfAttention) for layer in layers for m in layer.modules())
    for layer in layers:
        for local, parameter in layer.named_parameters():
            name = layer.canonical_names[local].split(".", 1)[1]
            gradient = gradients.pop(name)
            error = float((parameter.grad - gradient).norm())
            assert error <= rounded * 1e-5 * float(gradient.norm()), name
        for local, buffer in layer.named_buffers():
            name = layer.canonical_names.get(local, f".{layer.unsaved_names.get(local)}")
            assert torch.equal(buffer, buffers[name.split(".", 1)[1]]), name
    assert all(gradient is None for gradient in gradients.values())


@pytest.mark.parametrize(
    "name", ["timm swin", "timm dinov3", "open_clip coca", "timm shapes asked"]
)
def test_each_layer_by_itself(name, models):
    """As on a stage of its own: what enters is a leaf, and every floating-point tensor that enters
    gets a gradient. To 1e-5, for gradients arrive in another order of memory."""
    case = CASES[name]
    model, _, layers = models(case)
    for module in (model, *layers):
        module.train()
        module.zero_grad()
    (pixels,) = case.inputs().values()
    tensors, kept = {"pixel_values": pixels}, []
    torch.manual_seed(1)
    for layer in layers:
        given = {
            key: t.detach().requires_grad_(t.is_floating_point() and key != "pixel_values")
            for key, t in tensors.items()
        }
        tensors = layer(given)
        kept.append((given, tensors))
    torch.manual_seed(1)
    expected = model(pixels)
    gradients = {"image_features": torch.randn_like(expected)}
    expected.backward(gradients["image_features"])
    for given, made in reversed(kept):
        sent = [key for key, tensor in made.items() if tensor.requires_grad]
        torch.autograd.backward([made[key] for key in sent], [gradients[key] for key in sent])
        gradients = {key: t.grad for key, t in given.items() if t.requires_grad}
        assert all(gradient is not None for gradient in gradients.values())
    for layer in layers:
        for local, parameter in layer.named_parameters():
            name = layer.canonical_names[local].split(".", 1)[1]
            expected = model.get_parameter(name).grad
            assert_equal_rows(parameter.grad.flatten(), expected.flatten())


def test_first_values_random_numbers_and_costs(forward, subtests):
    """First values are the library's and the same for every split, a layer draws where it says so,
    and costs are counted without memory, with nothing left in the templates."""
    for name, case in SMALL.items():
        with subtests.test(name):
            tower = case.tower()
            last = max(range(len(tower.specs)), key=lambda i: tower.specs[i].num_parameters)
            with library_models_kept():
                layers = [spec.build(7) for spec in tower.specs]
                other = tower.specs[last].build(8).state_dict()
            state = case.library().state_dict()
            for local, tensor in library_state(layers).items():
                theirs = state[local]
                assert tensor.shape == theirs.shape and tensor.isfinite().all()
                if theirs.numel() > 1000 and theirs.is_floating_point():
                    deviation = pytest.approx(theirs.std().item(), rel=0.2, abs=1e-6)
                    assert tensor.std().item() == deviation, local
            alone = tower.specs[last].build(7).state_dict()
            together = layers[last].state_dict()
            assert all(torch.equal(alone[key], tensor) for key, tensor in together.items())
            assert any(not torch.equal(alone[key], tensor) for key, tensor in other.items())

            tensors = case.inputs()
            for layer in layers:
                before = torch.get_rng_state()
                tensors = layer(tensors)
                assert layer.draws == (not torch.equal(torch.get_rng_state(), before))
            inputs, before = case.inputs(), torch.get_rng_state()
            forward([layer.eval() for layer in layers], inputs)
            assert torch.equal(torch.get_rng_state(), before)

            tower = with_head(tower, 8)
            counts = describe_layers(tower, 2)
            assert [c.name for c in counts] == [spec.name for spec in tower.specs]
            assert sum(c.num_parameters for c in counts) == tower.num_parameters
            flops = count_flops(tower, meta_inputs(tower, 2))
            assert all(number >= 0 for number in flops) and sum(flops) > 0
            templates = [spec.template.state_dict() for spec in tower.specs]
            assert all(tensor.is_meta for state in templates for tensor in state.values())
            json.dumps(tower.config)


def test_a_file_is_read_without_the_librarys_whole_model(models, monkeypatch, subtests):
    """To the last bit what was drawn as a whole and then filled, tensors outside the state too."""
    made = []
    library = LibraryModel._model

    def watched(self, seed):
        found = library(self, seed)
        made.append([t for t in found.values() if isinstance(t, nn.Parameter) and not t.is_meta])
        return found

    monkeypatch.setattr(LibraryModel, "_model", watched)
    for name, case in CASES.items():
        with subtests.test(name), library_models_kept():
            _, tower, folder = models.file(case)
            reader = open_weights(case.branch, str(folder), tower)
            for spec in tower.specs:
                made.clear()
                layer = spec.build(3, reader)
                assert not any(made), "a parameter is real"
                expected = spec.build(3)
                reader.fill(expected)
                for kind in ("named_parameters", "named_buffers"):
                    ours, theirs = (
                        dict(getattr(each, kind)(remove_duplicate=False))
                        for each in (layer, expected)
                    )
                    assert ours.keys() == theirs.keys()
                    for key, tensor in theirs.items():
                        assert torch.equal(ours[key], tensor), (spec.name, key)
                        assert ours[key].requires_grad == tensor.requires_grad


def test_causal_texts_are_attended_without_a_mask(monkeypatch, forward):
    """Which the fastest kernels of a GPU do not take. That the outcome is the library's, for short
    texts too, is tested above."""
    asked = []
    attend = nn.functional.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        asked.append((attn_mask, is_causal))
        return attend(query, key, value, attn_mask, dropout_p, is_causal, **more)

    case = CASES["open_clip texts"]
    with library_models_kept():
        layers = [spec.build(0) for spec in case.tower().specs]
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    forward(layers, case.inputs())
    assert asked == [(None, True)] * TEXT["layers"]


@pytest.mark.all("more networks of a kind")
def test_half_precision(forward, subtests):
    """With batch norms, tables and functions that a library has of its own: a CPU takes long."""
    kinds = "timm resnet/timm vit/timm efficientnet/timm shapes asked"
    kinds += "/timm a table of the first forward/open_clip attention pool/open_clip texts"
    for name in kinds.split("/"):
        case = CASES[name]
        with subtests.test(name):
            with library_models_kept():
                layers = [spec.build(0).eval() for spec in with_head(case.tower(), 16).specs]
            inputs, made = case.inputs(), f"{case.branch}_embeds"
            expected = forward(layers, inputs)[made]
            parameters = [p for layer in layers for p in layer.parameters()]
            for parameter in parameters:  # as DeepSpeed: buffers stay in fp32
                parameter.data = parameter.data.to(torch.bfloat16)
            half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in inputs.items()}
            found = forward(layers, half)[made]
            # a random EfficientNet makes so little of an image that its embeddings are not of
            # length 1
            assert nn.functional.cosine_similarity(found, expected, eps=1e-30).min() > 0.9
            forward([layer.train() for layer in layers], half)[made].sum().backward()
            assert {p.dtype for p in parameters} == {torch.bfloat16}
            buffers = [b for layer in layers for b in layer.buffers() if b.is_floating_point()]
            assert {b.dtype for b in buffers} <= {torch.float32}
            for parameter in (p for layer in layers[:-1] for p in layer.parameters()):
                assert parameter.grad is not None and parameter.grad.isfinite().all()


def test_equal_blocks_are_measured_once():
    tower = image_tower(spelled("timm:vit_tiny_patch16_224", {"depth": 3}), 64)
    first, second, third = (layer_key(spec.template) for spec in tower.specs[1:4])
    assert first == second == third != layer_key(tower.specs[4].template)


# -- names


def test_names_that_people_type():
    for given, full in (
        ("ViT-B/32", "open_clip:ViT-B-32"),
        ("ViT-B-32:layers=2", "open_clip:ViT-B-32:layers=2"),
        ("vit-b-32", "vit_b_32"),
        ("vit_base_patch16_224.augreg_in21k", "timm:vit_base_patch16_224.augreg_in21k"),
        ("EfficientNet_B0:dropout=0.1", "efficientnet_b0:dropout=0.1"),
        ("resnet50", "resnet50"),
        ("resnet50d", "timm:resnet50d"),
        ("RN50", "open_clip:RN50"),
        ("timm:resnet50", "timm:resnet50"),
        ("ViT-L/14@336px", "open_clip:ViT-L-14-336"),
        ("timm/resnet50.a1_in1k", "timm:resnet50.a1_in1k"),
        ("hf-hub:timm/resnet50.a1_in1k", "timm:resnet50.a1_in1k"),
        ("openai/clip-vit-base-patch32", "hf:openai/clip-vit-base-patch32"),
        ("clip-vit-base-patch32:pool=avg", "hf:clip-vit-base-patch32:pool=avg"),
        ("facebook/dinov2-base", "hf:facebook/dinov2-base"),
    ):
        assert full_name(given) == full


def test_image_names_refused(subtests):
    for name, message in (
        ("timm:resnet5", r"did you mean timm:resnet5\d\w*\? timm.list"),
        ("timm:resnet18.a1", r"tag 'a1' is not known; did you mean 'a\d_in1k'\?"),
        ("timm:resnet18:drop_path=1", r"'drop_path' is not known; did you mean 'drop_path_rate'"),
        ("timm:resnet18:num_classes=3", "key 'num_classes' is not known"),
        ("timm:resnet18:layers=1-x", "layers=1-x must be integers joined by '-'"),
        ("timm:resnet18:layers=1-1,pool=avg", "does not take images of 64 .*attribute 'layer3'"),
        ("timm:convnext_atto:pool=attentive", "cannot make convnext_atto"),
        ("timm:crossvit_9_240", "does not take images of 64 pixels a side .*give another"),
        ("efficientnet_b0:droput=1", r"key 'droput' is not known; did you mean 'dropout'\?"),
        ("efficientnet_b9", r"did you mean '(timm:)?efficientnet_b\d'\? Known: convnext_base"),
        ("dinov2-bse", "did you mean 'hf:dinov2-base'"),
        ("ViT-B/3", "a model of the .* hub is written hf:ViT-B/3, .* open_clip:MODEL"),
        ("swin_t:pool=cls", "pool 'cls' is not known; .*Known: avg, max"),
        ("maxvit_t", "torchvision cannot make maxvit_t with input_size=.64, 64."),
        ("open_clip:ViT-B-3", r"OpenCLIP has no 'ViT-B-3'; did you mean open_clip:ViT-B-32\?"),
        ("open_clip:ViT-B-32:head_width=50", "OpenCLIP cannot make it"),
        ("open_clip:ViT-B-32:widht=65", r"key 'widht' is not known; did you mean 'width'\?"),
        ("open_clip:ViT-B-16-SigLIP", "does not take images of 64 .*give --image-size 224"),
    ):
        with subtests.test(name), pytest.raises(ValueError, match=message):
            image_tower(name, 64)


def test_text_names_refused(tmp_path):
    for name, message in (
        ("open_clip:ViT-B-3", "did you mean open_clip:ViT-B-32"),
        ("open_clip:ViT-B-32:image_size=3", "key 'image_size' is not known"),
        (
            "open_clip:xlm-roberta-base-ViT-B-32",
            "--text-tower xlm-roberta-base:pool=mean,mlp_proj=512, or --import",
        ),
        ("open_clip:ViT-B-32:context_length=8", "has 8 positions, so max_text_tokens=12"),
        ("open_clip:ViT-B-32:pool=mean", "OpenCLIP cannot make it"),
    ):
        with pytest.raises(ValueError, match=message):
            text_tower(name, VOCAB, TOKENS, 0, EOS)
    with pytest.raises(
        ValueError, match="the tokenizer has no token that ends one; give .*pool=last"
    ):
        text_tower("open_clip:ViT-B-32", VOCAB, TOKENS)
    assert text_tower("open_clip:ViT-B-32", None, TOKENS).config["pool"] == "argmax"
    assert text_tower("open_clip:ViT-B-32:pool=last", VOCAB, TOKENS).config["pool"] == "last"
    with pytest.raises(FileNotFoundError, match="has no open_clip_config.json"):
        image_tower(f"open_clip:{tmp_path}", 64)


def test_a_folder_of_open_clip(tmp_path):
    config = open_clip.get_model_config("ViT-B-32")
    config["vision_cfg"] |= {"layers": 1, "width": 64}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    assert image_tower(f"open_clip:{tmp_path}", 64).width == 64


def test_texts_are_cut_to_the_longest_of_a_micro_batch(models):
    """A causal tower that pools where the text ends does not see what it is not given; others are
    padded to the length that they were trained with."""
    for name in ("open_clip texts", "open_clip texts, siglip"):
        case = CASES[name]
        model, _, layers = models(case)
        ids = case.inputs()["input_ids"][1:]
        shorter = {"input_ids": ids[:, :9], "attention_mask": (ids > 0).long()[:, :9]}
        with torch.no_grad():
            found = run([layer.eval() for layer in layers], shorter)["text_features"]
            assert_equal_rows(found, model.eval()(ids))
    with pytest.raises(ValueError, match="max_text_tokens=13 must be from 1 to 12"):
        text_tower(CASES["open_clip texts"].name, VOCAB, 13, 0, EOS)


# -- pooling


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        (spelled("timm:vit_tiny_patch16_224", {"depth": 1}), -1),
        (spelled("timm:swin_tiny_patch4_window7_224", SWIN), -1),
        ("timm:mobilenetv3_small_050", 1),
    ],
)
def test_attention_over_what_the_library_does_not_pool(name, channels, forward):
    join = "," if name.count(":") > 1 else ":"
    tower = image_tower(f"{name}{join}pool=attention", 64)
    with library_models_kept():
        layers = [spec.build(0).eval() for spec in tower.specs]
    given = {"pixel_values": torch.randn(2, 3, 64, 64)}
    hidden = forward(layers[:-1], given)["image_hidden"]
    expected = layers[-1].pool(hidden.movedim(channels, -1).flatten(1, -2))
    assert torch.equal(forward(layers, given)["image_features"], expected)
    assert layers[-1].canonical_names["pool.probe"] == "image.attention_pool.probe"
    assert 0 < layers[-1].pool.mlp["fc2"].bias.std() < 2e-6  # drawn, by the rule of big_vision


def test_other_poolings_of_the_library(forward):
    name = spelled("timm:vit_tiny_patch16_224", {"depth": 1})
    for pool, theirs in (("avg", "avg"), ("map", "map"), ("cls", "token")):
        tower = image_tower(f"{name},pool={pool}", 64)
        arguments = {"num_classes": 0, "img_size": 64, "depth": 1, "global_pool": theirs}
        model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
        with library_models_kept():
            layers = [spec.build(0).eval() for spec in tower.specs]
        model.load_state_dict(library_state(layers))
        given = {"pixel_values": torch.randn(2, 3, 64, 64)}
        features = forward(layers, given)["image_features"]
        assert torch.equal(features, model(given["pixel_values"]))


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        (spelled("timm:swin_tiny_patch4_window7_224", SWIN), [96, 192]),
        ("timm:mobilenetv3_small_050", [24, 288]),
        (spelled("timm:vit_tiny_patch16_224", {"depth": 1}), [192]),
    ],
)
def test_maps_for_fusion(name, channels, forward):
    """Of the last two sizes, with their channels where the library has them."""
    tower = with_head(image_tower(name, 64), 16, fusion=FusionSizes(1, 16, 2))
    maps = {n: s for n, s in tower.specs[-1].template.image_tokens.named_children()}
    assert [m[0].normalized_shape[0] for m in maps.values()] == channels
    with library_models_kept():
        layers = [spec.build(0) for spec in tower.specs]
    made = forward(layers, {"pixel_values": torch.randn(2, 3, 64, 64)})
    assert made["image_tokens"].shape == (2, tower.config["num_image_tokens"], 16)


# pixels a side of a patch, and how many tokens come before those of patches
LEAVE_OUT = {
    spelled("timm:vit_tiny_patch16_224", {"depth": 2}): (16, 1),
    "timm:vit_small_patch14_reg4_dinov2:depth=1": (14, 5),
    "timm:deit_tiny_distilled_patch16_224": (16, 2),
    "timm:vit_base_patch16_siglip_224:depth=1,embed_dim=48,num_heads=3": (16, 0),
    "timm:cait_xxs24_224:depth=1": (16, 0),
    "open_clip:ViT-B-32:layers=2,width=64,patch_size=16": (16, 1),
    "vit_h_14": (14, 1),
}


@pytest.mark.parametrize("name", LEAVE_OUT)
def test_a_vit_leaves_patches_out(name, forward):
    """Those that are not kept are not seen, and with all of them kept nothing changes."""
    side, prefix = LEAVE_OUT[name]
    grid = 14 if "deit" in name else 4  # timm's deit takes images of one size
    tower = image_tower(name, grid * side)
    stem = tower.specs[0].template
    assert tower.config["patch_size"] == side and stem.prefix == prefix
    assert "kept_patches" in tower.inputs
    if name == "vit_h_14":  # of 2.5 GB
        return
    with library_models_kept():
        layers = [spec.build(3).eval() for spec in tower.specs]
    pixels = torch.randn(2, 3, grid * side, grid * side)
    other, patch = pixels.clone(), grid + 2
    other[:, :, side : 2 * side, 2 * side : 3 * side] += 1
    before, behind = (layers[0]({"pixel_values": p})["image_hidden"] for p in (pixels, other))
    changed = (before != behind).flatten(2).any(2)
    assert changed.nonzero()[:, 1].tolist() == [prefix + patch] * 2

    def features(pixels, kept):
        given = {"pixel_values": pixels, "kept_patches": torch.tensor(kept).expand(2, -1)}
        made = forward(layers, given)
        assert "kept_patches" not in made
        return made["image_features"]

    whole = forward(layers, {"pixel_values": pixels})["image_features"]
    assert torch.equal(features(pixels, range(grid * grid)), whole)
    some = features(pixels, [0, 3, 9, 14, 15])
    assert torch.equal(features(other, [0, 3, 9, 14, 15]), some)
    assert not torch.equal(features(other, [0, 3, patch, 14, 15]), some)
    assert not torch.allclose(some, whole)


def test_other_networks_leave_no_patches_out(subtests):
    """Angles and biases of all positions, mixing over them, windows, patches dropped by the library
    itself; and what takes other sizes, whose sides would become multiples of another number."""
    for name, size in (
        (spelled("timm:eva02_tiny_patch14_224", {"depth": 1}), 56),
        (spelled("timm:beit_base_patch16_224", {"depth": 1}), 64),
        ("timm:mixer_s16_224", 64),
        ("timm:xcit_nano_12_p16_224:depth=1", 64),
        ("timm:swin_tiny_patch4_window7_224", 224),
        ("timm:hiera_tiny_224", 224),
        ("timm:mobilenetv3_small_050", 64),
        ("open_clip:ViT-B-32:layers=1,width=64,patch_size=16,patch_dropout=0.5", 64),
        (spelled("timm:vit_tiny_patch16_224", {"depth": 1, "dynamic_img_size": True}), 64),
    ):
        with subtests.test(name):
            tower = image_tower(name, size)
            assert "patch_size" not in tower.config
            assert "kept_patches" not in tower.inputs


def test_towers_say_whether_they_take_other_sizes():
    for name, takes in (
        ("timm:mobilenetv3_small_050", True),
        ("resnet18", True),
        ("vit_b_16:num_layers=1", True),
        (spelled("timm:vit_tiny_patch16_224", {"depth": 1}), False),
        (spelled("timm:vit_tiny_patch16_224", {"depth": 1, "dynamic_img_size": True}), True),
        (spelled("timm:vit_small_patch16_dinov3", {"depth": 1}), False),
        ("timm:mobilevit_xxs", True),
    ):
        assert takes_other_sizes(image_tower(name, 64)) == takes, name


# -- packages


def test_a_missing_package_is_one_error():
    code = (
        "import sys; sys.modules |= {'timm': None, 'open_clip': None}\n"
        "from models.towers.image import image_tower\n"
        "image_tower('resnet18', 64)\n"
        "for tower in ('timm:resnet18', 'open_clip:ViT-B-32'):\n"
        "    try: image_tower(tower, 64)\n"
        "    except ImportError as error: print(error)"
    )
    made = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=300)
    for line, package in zip(
        made.stdout.splitlines()[-2:], ("timm", "open_clip_torch"), strict=True
    ):
        assert f"need the package {package}; install it with pip install -r" in line, made.stderr


def test_a_name_of_torchvision_is_either_cut_by_hand_or_traced():
    assert set(ARCHITECTURES) < set(adapter.names())
    assert "inception_v3" in adapter.names()
