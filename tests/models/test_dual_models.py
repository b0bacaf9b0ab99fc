"""Both towers of a published image-text model, made and filled from its one folder; and what is
particular to image towers of transformers."""

import pytest
import torch
from rounding import assert_equal_rows
from transformers import (
    BertConfig,
    ChineseCLIPConfig,
    ChineseCLIPModel,
    CLIPConfig,
    CLIPModel,
    Siglip2Config,
    Siglip2Model,
    SiglipConfig,
    SiglipModel,
    ViTConfig,
    ViTModel,
)

from models.defaults import audio_name, image_name, text_name, video_name
from models.towers.image import image_tower
from models.towers.text import text_tower
from models.weights.reading import open_weights

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48}
IMAGES = {**SIZES, "patch_size": 8}
TEXTS = {**SIZES, "vocab_size": 60, "max_position_embeddings": 12}
IDS = {"bos_token_id": None, "eos_token_id": 5}
DUAL = {
    "clip": lambda: CLIPModel(
        CLIPConfig(text_config={**TEXTS, **IDS}, vision_config={**IMAGES, "image_size": 32})
    ),
    "siglip": lambda: SiglipModel(
        SiglipConfig(text_config={**TEXTS, **IDS}, vision_config={**IMAGES, "image_size": 32})
    ),
    "siglip2": lambda: Siglip2Model(
        Siglip2Config(text_config={**TEXTS, **IDS}, vision_config={**IMAGES, "num_patches": 16})
    ),
    "chinese-clip": lambda: ChineseCLIPModel(
        ChineseCLIPConfig(
            text_config={**TEXTS, "type_vocab_size": 2}, vision_config={**IMAGES, "image_size": 32}
        )
    ),
}


@pytest.mark.parametrize("name", DUAL)
def test_the_towers_of_a_model_of_images_and_texts(tmp_path, forward, name):
    """With nothing said but the folder, the features are what enters the model's projections."""
    torch.manual_seed(1)
    model = DUAL[name]().eval()
    model.save_pretrained(tmp_path)
    where = str(tmp_path)
    image = image_tower(image_name(f"hf:{where}", where), 32)
    text = text_tower(text_name(where, where), 60, 12, 1, 5)
    built = [
        [spec.build(0, open_weights(tower.branch, where, tower)).eval() for spec in tower.specs]
        for tower in (image, text)
    ]
    pixels = torch.randn(3, 3, 32, 32)
    ids = torch.randint(6, 60, (3, 12))
    mask = torch.ones_like(ids)
    for row, length in enumerate((12, 4, 8)):
        ids[row, length - 1], ids[row, length:], mask[row, length:] = 5, 1, 0
    with torch.no_grad():
        images = forward(built[0], {"pixel_values": pixels})["image_features"]
        texts = forward(built[1], {"input_ids": ids, "attention_mask": mask})["text_features"]
        if name == "siglip2":
            # patches of 8 x 8 with their channels last, and 4 rows and columns of them
            patches = pixels.unflatten(3, (4, 8)).unflatten(2, (4, 8)).permute(0, 2, 4, 3, 5, 1)
            given = patches.reshape(3, 16, 192), torch.ones(3, 16), torch.tensor([[4, 4]] * 3)
            assert torch.equal(images, model.vision_model(*given).pooler_output)
        else:
            assert torch.equal(images, model.vision_model(pixels).pooler_output)
        if name.startswith("siglip"):
            expected = model.text_model(ids).pooler_output
        elif name == "clip":
            expected = model.text_model(ids, mask).pooler_output
        else:
            expected = model.text_model(ids, mask).last_hidden_state[:, 0]
        assert torch.equal(texts, expected)


def test_a_vits_pooler_is_used_where_the_weights_have_one(tmp_path):
    config = ViTConfig(**IMAGES, image_size=32)
    ViTModel(config).save_pretrained(tmp_path / "with")
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "without")
    name = f"hf:{tmp_path}/with"
    assert image_name(name, f"{tmp_path}/with") == f"{name}:pool=pooler"
    assert image_name(name, f"{tmp_path}/without") == f"{name}:pool=cls"
    assert image_name(name, None) == f"{name}:pool=cls"
    assert image_name(f"{name}:pool=avg", None) == f"{name}:pool=avg"
    assert image_name("hf:clip-vit-base-patch32", None) == "hf:clip-vit-base-patch32"
    # the same inside of other towers, where these start from weights
    with_time = f"{name}:time=transformer,time_layers=1"
    for complete, given in ((audio_name, name), (video_name, name), (video_name, with_time)):
        more = f"{given}{',' if given is with_time else ':'}pool="
        assert complete(given, f"{tmp_path}/without") == f"{more}cls"
        assert complete(given, f"{tmp_path}/with") == f"{more}pooler"
        assert complete(given, None) == given
    for complete, whole in ((audio_name, "hf:ast"), (video_name, "hf:videomae-base")):
        assert complete(whole, "DEFAULT") == whole


POOLS = {
    "hf-clip": ("cls", "avg", "max", "attention"),
    "hf-siglip": ("head", "avg", "max"),
    "hf-vit": ("pooler", "cls", "avg", "max", "attention"),
    "hf-dinov2-registers": ("cls", "avg", "max", "attention"),
    "hf-convnextv2": ("avg", "max", "attention"),
    "hf-swin": ("avg", "max", "attention"),
}


def test_pools(cases, forward, subtests):
    """Against the library's last states: behind its norm, without tokens of no patch; CLIP's norm,
    and ConvNeXt's of a mean or a maximum, come behind the pooling."""
    for name, pool in [(name, pool) for name, pools in POOLS.items() for pool in pools]:
        with subtests.test(f"{name}, {pool}"):
            check_pool(cases[name], forward, name, pool)


def check_pool(case, forward, name, pool):
    tower = image_tower(f"{case.tower().name},pool={pool}", 32)
    layers = [spec.build(3).eval() for spec in tower.specs]
    made = forward(layers, case.inputs())["image_features"]
    last, hidden = layers[-1], forward(layers[:-1], case.inputs())["image_hidden"]
    assert made.shape == (4, tower.width)
    if hidden.dim() == 4:
        hidden = hidden.flatten(2).transpose(1, 2)
    if isinstance(last.norm, torch.nn.LayerNorm):
        hidden = last.norm(hidden)
    first = {"hf-clip": 1, "hf-vit": 1, "hf-dinov2-registers": 4}.get(name, 0)
    pooled = {
        "cls": lambda: hidden[:, 0],
        "avg": lambda: hidden[:, first:].mean(1),
        "max": lambda: hidden[:, first:].amax(1),
    }.get(pool, lambda: last.pool(hidden))()
    assert_equal_rows(made, last.behind(pooled))


def test_left_out_patches_are_not_seen(cases, forward, subtests):
    """Patches that are not kept have no influence, and with all of them kept nothing changes."""
    for name in ("hf-clip", "hf-siglip", "hf-dinov2-registers"):
        with subtests.test(name):
            case = cases[name]
            layers = [spec.build(3).eval() for spec in case.tower().specs]
            inputs = case.inputs()
            whole = forward(layers, inputs)["image_features"]
            inputs["kept_patches"] = torch.arange(16).expand(4, -1)
            assert torch.equal(forward(layers, inputs)["image_features"], whole)
            inputs["kept_patches"] = torch.tensor([[0, 5, 6, 15]]).expand(4, -1)
            some = forward(layers, inputs)["image_features"]
            hidden = forward(layers[:1], inputs)["image_hidden"]
            assert hidden.shape[1] == layers[0].prefix + 4 and not torch.allclose(some, whole)
            inputs["pixel_values"][:, :, :8, 8:16] += 1  # patch 1
            assert torch.equal(forward(layers, inputs)["image_features"], some)


def test_a_small_image_leaves_swin_as_it_was(cases, forward):
    """The library shrinks a block's window for good where a map is smaller."""
    layers = [spec.build(3).eval() for spec in cases["hf-swin"].tower().specs]
    large = torch.randn(2, 3, 64, 64)
    before = forward(layers, {"pixel_values": large})["image_features"]
    forward(layers, {"pixel_values": torch.randn(2, 3, 32, 32)})
    assert torch.equal(forward(layers, {"pixel_values": large})["image_features"], before)
    wide = forward(layers, {"pixel_values": torch.randn(2, 3, 32, 64)})["image_features"]
    assert wide.shape == before.shape


def test_names_refused(subtests):
    for name, size, message in (
        ("hf:clip-vit-base-patch31", 224, "did you mean 'clip-vit-base-patch32'.*Known: clip-vit"),
        ("hf:clip-vit-base-patch32:hiden_size=8", 224, "did you mean 'hidden_size'"),
        ("hf:clip-vit-base-patch32:pool=pooler", 224, "Known: attention, avg, cls, max$"),
        ("hf:clip-vit-base-patch32", 16, "image_size=16 must be at least 32 for this arch"),
        ("hf:swin-tiny", 192, "image_size=192 must be at least 193 for this architecture"),
        ("hf:convnext-tiny-224:depths=1-1", 224, "hidden_sizes and depths must be equally many"),
    ):
        with subtests.test(name), pytest.raises(ValueError, match=message):
            image_tower(name, size)


def test_folders_of_other_models_are_refused(tmp_path, cases):
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is of type 'bert'; supported types: chinese_clip_vision"):
        image_tower(f"hf:{tmp_path}", 32)
    with pytest.raises(FileNotFoundError, match="'/nowhere/x' looks like a path but is no folder"):
        image_tower("hf:/nowhere/x", 32)
    tower = cases["hf-clip"].tower()
    with pytest.raises(ValueError, match="image weights for tower 'hf:.*: 'IMAGENET' is not known"):
        open_weights("image", "IMAGENET", tower)


def test_presets_have_the_published_sizes(subtests):
    for name, size, millions in (
        # as the models' pages and papers say, less classifiers, projections and mask tokens
        ("clip-vit-base-patch32", 224, 87.46),
        ("openai/clip-vit-large-patch14", 224, 303.18),
        ("siglip-base-patch16-224", 224, 92.88),
        ("siglip-so400m-patch14-384", 384, 428.23),
        ("dinov2-small", 518, 22.06),
        ("dinov2-base", 518, 86.58),
        ("convnext-tiny-224", 224, 27.82),
        ("convnextv2-atto-1k-224", 224, 3.39),
        ("convnextv2-base-1k-224", 224, 87.69),
        ("swin-tiny", 224, 27.52),
    ):
        with subtests.test(name):
            tower = image_tower(f"hf:{name}", size)
            assert tower.num_parameters / 1e6 == pytest.approx(millions, abs=0.005)
