"""Video towers: image towers on frames, what happens in time, weights from files, refusals."""

import pytest
import torch
import torchvision
from rounding import assert_equal_rows
from transformers import (
    TimesformerConfig,
    TimesformerForVideoClassification,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    XCLIPConfig,
    XCLIPModel,
)

from models.towers.building import count_flops, describe_layers, meta_inputs, with_head
from models.towers.image import image_tower
from models.towers.layers import library_models_kept
from models.towers.libraries.configurations import saved_state
from models.towers.of_image import OfImage, image_inside
from models.towers.video import TimeBlock, positions, video_tower
from models.weights.of_image import open_inner_weights
from models.weights.reading import canonical_names, published_weights

SIZE = 32
RESNET = "resnet18:layers=1-1-1-1"
CLIP = "hf:clip-vit-base-patch32:hidden_size=32,num_hidden_layers=2,num_attention_heads=2"
CLIP += ",intermediate_size=48,patch_size=16"
TIMED = f"{CLIP},time=transformer,time_layers=2,time_heads=4"
VIDEOMAE = "hf:videomae-base:hidden_size=32,num_hidden_layers=1,num_attention_heads=2"
VIDEOMAE += ",intermediate_size=48,patch_size=8"
COUNTS = (3, 1, 4)  # frames of each clip


def built(tower, seed=0):
    with library_models_kept():
        return [spec.build(seed).eval() for spec in tower.specs]


def awakened(layers):
    """The same, whose temporal part does something."""
    torch.manual_seed(1)
    for layer in layers:
        if isinstance(layer, TimeBlock):
            for linear in (layer.out, layer.fc2):
                torch.nn.init.normal_(linear.weight, std=0.2)
    return layers


def clips(counts=COUNTS, size=SIZE):
    torch.manual_seed(0)
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    time = torch.cat([torch.arange(count) * 0.5 for count in counts])
    frames = torch.randn(len(row), 3, size, size)
    return {"video_frames": frames, "video_row": row, "video_time": time}


def features(layers, tensors):
    for layer in layers:
        tensors = layer(tensors)
    assert set(tensors) == {"video_features"}
    return tensors["video_features"]


def test_mean_is_that_of_the_image_towers_features(subtests):
    for name in (RESNET, "efficientnet_b0", f"{CLIP},pool=avg", "vit_b_32:num_layers=1"):
        with subtests.test(name):
            tower, of_images = video_tower(name, SIZE, 4), image_tower(name, SIZE)
            assert tower.branch == "video" and tower.width == of_images.width
            assert tower.config["video_input"] == {"num_frames": 4, "image_size": SIZE}
            ours, theirs = built(tower), built(of_images)
            for own, other in zip(ours[:-1], theirs, strict=True):
                assert {own.canonical_names[key] for key in own.state_dict()} == {
                    "video." + each.split(".", 1)[1] for each in other.canonical_names.values()
                }
                own.inner.load_state_dict(other.state_dict())  # other names are other seeds
            inputs = clips()
            tensors = {"pixel_values": inputs["video_frames"]}
            with torch.no_grad():
                for layer in theirs:
                    tensors = layer(tensors)
                each = tensors["image_features"].split(COUNTS)
                found = features(ours, inputs)
                assert torch.equal(found[1], each[1][0])  # of one frame
                torch.testing.assert_close(found, torch.stack([of.mean(0) for of in each]))


def test_a_transformer_begins_as_the_mean_and_sees_the_order():
    tower = video_tower(TIMED, SIZE, 4)
    layers, inputs = built(tower), clips()
    plain = [layer for layer in layers if not isinstance(layer, TimeBlock)]
    order = torch.tensor([2, 0, 1, 3, 6, 7, 5, 4])  # within each clip
    turned = {**inputs, "video_frames": inputs["video_frames"][order]}
    with torch.no_grad():
        mean = features(plain, inputs)
        assert torch.equal(features(layers, inputs), mean)
        torch.testing.assert_close(features(plain, turned), mean)
        awakened(layers)
        assert (features(layers, inputs) - mean).abs().max() > 0.01
        change = (features(layers, turned) - features(layers, inputs)).abs().amax(1)
    assert change[0] > 0.01 and change[2] > 0.01 and change[1] < 1e-5  # which has one frame


def test_times_are_exact_whole_milliseconds():
    frames, time, row = torch.randn(2, 3, SIZE, SIZE), torch.tensor([0.0, 1.2344]), torch.zeros(2)
    made = (
        video_tower(RESNET, SIZE, 2)
        .specs[0]
        .build(0)({"video_frames": frames, "video_time": time, "video_row": row.long()})
    )
    assert made["video_ms"].tolist() == [0, 1234] and "video_time" not in made
    assert not any(made[name].is_floating_point() for name in ("video_ms", "video_row"))
    whole = (
        video_tower(RESNET, SIZE, 2)
        .specs[0]
        .build(0)(
            {
                "video_frames": frames,
                "video_time": torch.tensor([0, 60_125]),
                "video_row": row.long(),
            }
        )
    )
    assert whole["video_ms"].tolist() == [0, 60_125]
    ms = torch.tensor([0, 125, 250, 3_600_000])
    found = positions(ms, 33)
    assert found.shape == (4, 33) and torch.equal(found, positions(ms.flip(0), 33).flip(0))
    assert (found[None, :3] - found[:3, None]).abs().amax(2).fill_diagonal_(1).min() > 0.1


def test_unequal_numbers_of_frames_equal_each_clip_by_itself():
    layers, inputs = awakened(built(video_tower(TIMED, SIZE, 4))), clips()
    with torch.no_grad():
        together = features(layers, inputs)
        for clip in range(len(COUNTS)):
            own = inputs["video_row"] == clip
            alone = {name: tensor[own] for name, tensor in inputs.items()}
            alone["video_row"] = torch.zeros_like(alone["video_row"])
            torch.testing.assert_close(features(layers, alone)[0], together[clip])
        counted = {**inputs, "video_clips": torch.tensor(COUNTS)}
        assert torch.equal(features(layers, counted), together)


@pytest.mark.parametrize("name", [RESNET, TIMED, "r3d_18", VIDEOMAE])
def test_frames_that_clips_share_are_seen_once(name):
    """The image tower sees no frame twice, each clip has times of its own, and the features are
    those of the whole clips."""
    layers, seen = awakened(built(with_head(video_tower(name, SIZE, 4), 24))), []
    rows = torch.tensor([0, 0, 1, 3, 1, 1, 2, 0, 3, 2, 2, 2])  # also twice in a clip
    inputs = clips((4, 4, 4))
    inputs["video_time"] = torch.tensor([0, 40, 90, 500, 0, 10, 700, 800, 0, 300, 310, 320])
    distinct = inputs["video_frames"][:4]
    whole = {**inputs, "video_frames": distinct[rows]}
    shared = {**inputs, "video_frames": distinct, "video_frame_row": rows}
    layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]["video_hidden"]))
    with torch.no_grad():
        for layer in layers:
            whole, shared = layer(whole), layer(shared)
    assert set(shared) == set(whole) == {"video_embeds"}
    assert_equal_rows(shared["video_embeds"], whole["video_embeds"])
    assert (whole["video_embeds"][0] - whole["video_embeds"][1]).norm() > 1e-3
    by_frame = name in (RESNET, TIMED)
    assert [len(hidden) for hidden in seen] == ([12, 4] if by_frame else [3, 3])


def test_meta_tensors_say_the_shapes_of_real_ones():
    """Between any two layers, which is what a stage tells the next one ahead."""
    tower, inputs = with_head(video_tower(TIMED, SIZE, 4), 24), clips()
    inputs["video_clips"] = torch.tensor(COUNTS)
    on_meta = {name: tensor.to("meta") for name, tensor in inputs.items()}
    for spec in tower.specs:
        inputs, on_meta = spec.build(0)(inputs), spec.template(on_meta)
        assert {n: (t.shape, t.dtype) for n, t in inputs.items()} == {
            n: (t.shape, t.dtype) for n, t in on_meta.items()
        }
        # a gradient comes back for each number with a fraction
        assert {n for n, t in inputs.items() if t.is_floating_point()} == {
            n for n, t in inputs.items() if t.requires_grad
        }
    assert inputs["video_embeds"].shape == (3, 24)


@pytest.mark.parametrize("name", [TIMED, "r3d_18", "swin3d_t", VIDEOMAE])
def test_layers_cut_anywhere_give_the_same(name):
    """Each in a stage of its own, where a gradient comes back for every number with a fraction."""
    layers = awakened(built(video_tower(name, SIZE, 4)))
    tensors = clips() if name == TIMED else clips((4, 4))
    whole = features(layers, tensors)
    whole.square().sum().backward()
    expected = [parameter.grad for layer in layers for parameter in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    given, made = [], []
    for layer in layers:
        tensors = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
        given.append({n: t for n, t in tensors.items() if t.requires_grad})
        tensors = layer(tensors)
        made.append(tensors)
    assert torch.equal(tensors["video_features"], whole)
    grads = {"video_features": 2 * whole.detach()}
    for inputs, outputs, layer in reversed(list(zip(given, made, layers))):
        assert set(grads) == {name for name, t in outputs.items() if t.is_floating_point()}
        torch.autograd.backward([outputs[n] for n in grads], list(grads.values()))
        grads = {name: tensor.grad for name, tensor in inputs.items()}
        if layer is not layers[0]:
            assert all(grad is not None for grad in grads.values())
    for parameter, grad in zip((p for each in layers for p in each.parameters()), expected):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.all("more networks of a kind")
def test_half_precision_is_near_fp32(dtype, subtests):
    """As DeepSpeed keeps a stage: parameters in half precision, buffers in fp32."""
    for name in (TIMED, "r3d_18", VIDEOMAE):
        with subtests.test(name):
            layers, inputs = awakened(built(video_tower(name, SIZE, 4))), clips((4, 4))
            with torch.no_grad():
                expected = features(layers, inputs)
                for layer in layers:
                    for parameter in layer.parameters():
                        parameter.data = parameter.data.to(dtype)
                inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
                found = features(layers, inputs)
            assert found.dtype == dtype
            error = (found.float() - expected).norm() / expected.norm()
            assert error < 0.03


def test_examples_have_the_frames_of_each_sample():
    tower = with_head(video_tower(TIMED, SIZE, 5), 24)
    example = meta_inputs(tower, 3)
    assert set(example) == {"video_frames", "video_row", "video_time"}
    assert set(tower.inputs) == {*example, "video_clips", "video_frame_row"}
    assert example["video_frames"].shape == (15, 3, SIZE, SIZE)
    assert example["video_row"].dtype == torch.int64
    flops = count_flops(tower, example)
    assert len(flops) == len(tower.specs) and flops[-1] == 2 * 3 * tower.width * 24
    assert all(each.num_kernels for each in describe_layers(tower, 2))


@pytest.mark.parametrize("name", [RESNET + ",time=transformer,time_layers=1", TIMED])
def test_gradients_reach_all_that_learns(name):
    layers = [layer.train() for layer in awakened(built(video_tower(name, SIZE, 4)))]
    found = features(layers, clips())
    assert found.dtype == torch.float32 and found.shape == (3, layers[-2].norm_1.weight.numel())
    found.square().sum().backward()
    for layer in layers:
        for key, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), key
            assert parameter.grad.any(), key


OF_CLIPS = {  # size, frames, the last layer of the classifier
    "r3d_18": (32, 4, "fc"),
    "r2plus1d_18": (32, 4, "fc"),
    "mc3_18": (32, 4, "fc"),
    "swin3d_t": (32, 4, "head"),
    "s3d": (224, 14, "classifier.1"),
    "mvit_v2_s": (224, 16, "head.1"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.all("larger networks")] * (name in ("s3d", "mvit_v2_s"))
        )
        for name in OF_CLIPS
    ],
)
def test_networks_of_clips_are_torchvisions(name):
    size, number, classifier = OF_CLIPS[name]
    samples = 2 if size < 224 else 1
    tower = video_tower(name, size, number)
    assert not tower.config["notes"] and len(tower.specs) > 9  # cut into its blocks
    assert [spec.name for spec in tower.specs][0].startswith("video.")
    layers = built(tower)
    theirs = torchvision.models.get_model(name)
    theirs.set_submodule(classifier, torch.nn.Identity())
    state = theirs.state_dict()
    ours = {
        layer.canonical_names[key].removeprefix("video."): tensor
        for layer in layers
        for key, tensor in layer.state_dict().items()
    }
    theirs.load_state_dict({key: ours[key] for key in state})
    inputs = clips([number] * samples, size=size)
    pixels = inputs["video_frames"].unflatten(0, (samples, number)).transpose(1, 2)
    with torch.no_grad():
        found, expected = features(layers, inputs), theirs.eval()(pixels)
    assert found.shape == (samples, tower.width)
    assert_equal_rows(found, expected)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 48}
SEEN = {**SMALL, "image_size": SIZE, "patch_size": 8, "num_frames": 4}


def xclip():
    mit = {"mit_hidden_size": 16, "mit_intermediate_size": 24, "mit_num_attention_heads": 2}
    text = {**SMALL, "vocab_size": 50, "max_position_embeddings": 20}
    config = XCLIPConfig(vision_config=SEEN | mit, text_config=text, projection_dim=16)
    return XCLIPModel(config)


OF_TRANSFORMERS = {  # the library's whole model, and its own features of clips
    "videomae": (
        lambda: VideoMAEForVideoClassification(VideoMAEConfig(**SEEN)),
        lambda model, clips: model.videomae(clips).last_hidden_state.mean(1),
    ),
    "videomae with a norm": (
        lambda: VideoMAEForVideoClassification(VideoMAEConfig(**SEEN, use_mean_pooling=False)),
        lambda model, clips: model.videomae(clips).last_hidden_state.mean(1),
    ),
    "timesformer": (
        lambda: TimesformerForVideoClassification(TimesformerConfig(**SEEN)),
        lambda model, clips: model.timesformer(clips).last_hidden_state[:, 0],
    ),
    "xclip": (xclip, lambda model, clips: model.get_video_features(clips).pooler_output),
}


def source_of(model):
    """Its tensors by the names that they have in the tower."""
    names = canonical_names("image", saved_state(model))
    state = saved_state(model)
    return {name.removeprefix("image."): state[key] for name, key in names.items()}


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_networks_of_clips_are_those_of_transformers(kind, tmp_path):
    """Of a whole model, saved by the library: its configuration, its weights, what it makes."""
    make, theirs = OF_TRANSFORMERS[kind]
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path)
    tower = video_tower(f"hf:{tmp_path}", SIZE, 4)
    reader = open_inner_weights(str(tmp_path), tower)
    layers = [spec.build(0, reader).eval() for spec in tower.specs]
    assert len(layers) == 4  # start, two blocks, pool
    inputs = clips((4, 4))
    found = features(layers, inputs)
    pixels = inputs["video_frames"].unflatten(0, (2, 4))
    assert found.shape == (2, tower.width)
    assert_equal_rows(found, theirs(model, pixels))
    found.square().sum().backward()
    for layer in layers:
        assert all(each.grad is not None for each in layer.parameters())
    # without weights, first values are spread as the library's
    theirs_first = source_of(make())
    for layer in (spec.build(0) for spec in tower.specs):
        for key, tensor in layer.state_dict().items():
            name = layer.canonical_names[key].removeprefix("video.")
            if tensor.numel() > 200:
                spread = theirs_first[name].std()
                torch.testing.assert_close(tensor.std(), spread, rtol=0.2, atol=1e-4)


def test_a_network_of_clips_pools_by_its_maximum():
    layers = built(video_tower("r3d_18:pool=max", SIZE, 4))
    tensors = clips((4, 4))
    for layer in layers[:-1]:
        tensors = layer(tensors)
    assert torch.equal(features(layers[-1:], tensors), tensors["video_hidden"].amax((2, 3, 4)))


def test_networks_of_clips_refuse_other_numbers_of_frames():
    start = video_tower("r3d_18", SIZE, 4).specs[0].build(0)
    for counts in ((4, 3), (3, 5)):
        with pytest.raises((ValueError, RuntimeError), match="clips of 4 frames and no others"):
            start(clips(counts))
    assert "video_clips" not in start({**clips((4, 4)), "video_clips": torch.tensor([4, 4])})


def test_weights_of_torchvision_go_into_a_network_of_clips(tmp_path):
    state = torchvision.models.get_model("r3d_18").state_dict()
    torch.save(state, tmp_path / "r3d.pth")
    tower = video_tower("r3d-18", SIZE, 4)
    with library_models_kept():
        reader = open_inner_weights(str(tmp_path / "r3d.pth"), tower)
        layers = [spec.build(0, reader) for spec in tower.specs]
    for layer in layers:
        for key, tensor in layer.state_dict().items():
            assert torch.equal(tensor, state[layer.canonical_names[key].removeprefix("video.")])
    assert published_weights(tower) == "DEFAULT"
    assert published_weights(video_tower("resnet18:time=transformer", SIZE, 4)) == "DEFAULT"
    assert published_weights(video_tower(RESNET, SIZE, 4)) is None


def test_weights_go_into_the_tower_of_frames(tmp_path):
    of_images = built(image_tower(CLIP, SIZE), seed=5)
    state = {
        layer.canonical_names[key].split(".", 1)[1]: tensor
        for layer in of_images
        for key, tensor in layer.state_dict().items()
    }
    torch.save({f"vision_model.{key}": t for key, t in state.items()}, tmp_path / "model.pth")
    tower = with_head(video_tower(TIMED, SIZE, 4), 24)
    reader = open_inner_weights(str(tmp_path / "model.pth"), tower)
    random, filled = built(tower), [spec.build(0, reader).eval() for spec in tower.specs]
    for own, other in zip(filled, of_images):
        assert all(torch.equal(own.inner.state_dict()[k], t) for k, t in other.state_dict().items())
    for own, other in zip(filled[len(of_images) :], random[len(of_images) :], strict=True):
        assert all(torch.equal(own.state_dict()[k], t) for k, t in other.state_dict().items())
    for spec, own in zip(tower.specs, filled):
        taken = own.state_dict() if isinstance(own, OfImage) else {}
        assert {*reader.given(spec.template)} == {*taken}, spec.name
    assert image_inside(tower).branch == "image"


def test_what_a_tower_cannot_be(subtests):
    for name, frames, words in (
        (RESNET, 0, "num_frames"),
        (f"{RESNET},time=lstm", 4, "did you mean.*Known: mean, transformer"),
        (f"{RESNET},time_layers=2", 4, "time_layers.*time=transformer"),
        (f"{RESNET},time=transformer,time_layers=0", 4, "time_layers"),
        (f"{RESNET},time=transformer,time_heads=7", 4, "must divide.*512"),
        (f"{RESNET},time=transformer,time_heads=x", 4, "an integer"),
        (f"{RESNET},time_layer=2", 4, "time_layer"),
        ("resnet19", 4, "did you mean"),
        ("r3d_18:time=mean", 4, "whole clips"),
        ("mvit_v2_s", 8, "clips of 8 frames of 32"),
        ("hf:videomae-base", 5, "a multiple"),
        ("hf:xclip-base-patch32:time=mean", 8, "whole clips"),
        ("hf:videomea", 8, "is not known"),
    ):
        with subtests.test(name), pytest.raises(ValueError, match=words):
            video_tower(name, SIZE, frames)
