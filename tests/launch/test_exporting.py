"""Exported folders: the embeddings of the training stages, by public libraries alone; and the way
back."""

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import (
    CAPTIONS,
    CLIP,
    SIZE,
    TOKENS,
    assert_same,
    embed_by_pages,
    embeddings,
    encoded,
    evaluated,
    files,
    model_with_depth,
    sample_image,
    tokenizer_for,
    towers_for,
    trained_model,
)
from PIL import Image
from rounding import assert_equal_rows
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    ConvNextConfig,
    Dinov2Config,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
)

from common import __version__
from common.boxes import WHOLE
from data.modalities.tokenizer import batch_tokens, load_tokenizer
from data.modalities.transforms import EvalTransform, normalise, stacked
from data.options import loss_names
from launch.config.imported import options_of_export
from launch.config.options import parse_options
from launch.exporting import modeling_export
from launch.exporting.page import _recalls
from launch.exporting.writing import canonical_state, write_export
from launch.inference.trained import (
    Trained,
    find_checkpoint,
    open_model_folder,
    open_run,
)
from launch.reporting.reading import read_folder
from launch.setup.model import RunModel
from models.towers.annotations import learned_names
from models.towers.building import with_head
from models.towers.fusion import FusionSizes
from models.towers.head import FUSION_NAMES
from models.weights.reading import open_model

PAIRS = "image:text,region:text"
RESNET, RESNET50 = "resnet18:layers=1-1-1-1", "resnet50:layers=1-1-1-1,width_per_group=8"
VIT = "vit_b_16:patch_size=16,num_layers=2,num_heads=4,hidden_dim=48,mlp_dim=96"
CONVNEXT = "convnext_tiny:dims=16-24-32-40,depths=1-1-2-1"
BERT = "bert-tiny:hidden_size=48,num_attention_heads=4"
ROBERTA = (
    "roberta-base:hidden_size=48,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64"
)
DISTILBERT = "distilbert-base-uncased:dim=48,n_layers=2,n_heads=4,hidden_dim=64"
_HF = "hidden_size=48,num_hidden_layers=2,num_attention_heads=4"
HF_CLIP = f"hf:clip-vit-base-patch32:{_HF},intermediate_size=64,patch_size=16"
HF_SIGLIP = f"hf:siglip-base-patch16-224:{_HF},intermediate_size=64"
HF_SIGLIP2 = f"hf:siglip2-base-patch16-naflex:{_HF},intermediate_size=64,num_patches=9"
HF_VIT = f"hf:vit-base-patch16-224:{_HF},intermediate_size=64"
HF_DINO = f"hf:dinov2-base:{_HF},patch_size=16"
HF_REGISTERS = f"hf:dinov2-with-registers-base:{_HF},patch_size=16"
HF_CONVNEXT = "hf:convnextv2-tiny-1k-224:hidden_sizes=16-24-32-40,depths=1-1-2-1"
HF_SWIN = "hf:swin-tiny:embed_dim=16,depths=2-2,num_heads=2-4,window_size=4"
MPNET = f"mpnet-base:{_HF},intermediate_size=64"
XLM_ROBERTA = f"xlm-roberta-base:{_HF},intermediate_size=64"
CHINESE = f"chinese-clip-text-base:{_HF},intermediate_size=64"
SIGLIP = f"siglip-text-base:{_HF},intermediate_size=64"
MODERN = f"modernbert-base:{_HF},intermediate_size=64"
T5 = "t5-small:d_model=48,d_kv=16,d_ff=64,num_layers=2,num_heads=3"
XLM = "xlm-mlm-en-2048:emb_dim=48,n_layers=2,n_heads=4,n_langs=2"
TIMM_VIT = "timm:vit_tiny_patch16_224:depth=2,embed_dim=48,num_heads=3"
OPEN_CLIP = "open_clip:ViT-B-32:layers=2,width=64"
CLIP_TEXT, CLIP_RN50 = f"{OPEN_CLIP},heads=2", "open_clip:RN50:layers=1-1-1-1,width=16"
SIGLIP_TEXT = "open_clip:ViT-B-16-SigLIP:layers=2,width=64,heads=2,context_length=16"
POOLS = ("attention", "avg", "cls", "eos", "first", "last", "max", "mean")
ATTENTION, AVG, CLS, EOS, FIRST, LAST, MAX, MEAN = (f",pool={name}" for name in POOLS)
NO_MODEL = "transformers has no model with the towers"
# name: image tower, text tower, and whether it learned by sigmoid
MODELS = {
    "hf clip+clip": (HF_CLIP, CLIP),
    "vit+bert": (VIT, BERT),
    "convnext+clip": (CONVNEXT, CLIP),
    "vit+roberta": (VIT, ROBERTA),
    "resnet+distilbert": (RESNET, DISTILBERT),
    "resnet50+bert+sigmoid": (RESNET50, BERT, "sigmoid"),
    "vit+bert, two layers": (VIT, f"{BERT},mlp_proj=24"),
    "convnext+distilbert": (CONVNEXT, DISTILBERT),
    "resnet, attention+bert, mean": (RESNET + ATTENTION, BERT + MEAN),
    "resnet, max+clip, last": (RESNET + MAX, CLIP + LAST),
    "vit, avg+bert, attention": (VIT + AVG, BERT + ATTENTION),
    "vit, attention+roberta, max": (VIT + ATTENTION, ROBERTA + MAX),
    "vit, max+bert, first": (VIT + MAX, BERT + FIRST),
    "convnext, attention+bert, last": (CONVNEXT + ATTENTION, BERT + LAST),
    "convnext, max+distilbert, mean": (CONVNEXT + MAX, DISTILBERT + MEAN),
    "vit+bert, eos": (VIT, BERT + EOS),
    "hf clip+mpnet": (HF_CLIP, MPNET),
    "hf siglip+xlm-roberta": (HF_SIGLIP, XLM_ROBERTA),
    "hf vit+roberta": (HF_VIT, ROBERTA),
    "hf dinov2+clip": (HF_DINO, CLIP),
    "hf convnext+bert": (HF_CONVNEXT, BERT),
    "hf swin+bert": (HF_SWIN, BERT),
    "hf siglip, avg+siglip": (HF_SIGLIP + AVG, SIGLIP, "sigmoid"),
    "hf siglip2+t5": (HF_SIGLIP2, T5),
    "hf clip, avg+modernbert": (HF_CLIP + AVG, MODERN),
    "hf vit, cls+xlm, mean": (HF_VIT + CLS, XLM + MEAN),
    "hf registers, max+mt5, last": (HF_REGISTERS + MAX, "m" + T5 + LAST),
    "hf convnext, max+chinese clip": (HF_CONVNEXT + MAX, CHINESE),
    "hf swin+mpnet, attention": (HF_SWIN + ATTENTION, MPNET + ATTENTION),
    "timm+bert": (TIMM_VIT + AVG, BERT),
    "timm+open_clip": (TIMM_VIT + ATTENTION, CLIP_TEXT, "sigmoid"),
    "torchvision, max+bert": ("squeezenet1_1:pool=max", BERT),
    "open_clip": (OPEN_CLIP, CLIP_TEXT),
    "open_clip, SigLIP's texts": (CLIP_RN50, SIGLIP_TEXT, "sigmoid"),
}
# why it is a state dict
REASONS = {
    "hf clip+clip": [],  # it is CLIPModel
    "vit+bert": [f"{NO_MODEL} vit_b_16 of torchvision and BertModel of transformers"],
    "hf vit+roberta": [f"{NO_MODEL} ViTModel of transformers and RobertaModel of transformers"],
    "hf siglip, avg+siglip": [
        "SiglipModel pools images by pool=head, not avg",
        "SiglipModel has --projection none, not linear",
    ],
}


def loss_of(name):
    return next(iter(MODELS[name][2:]), "infonce")


@pytest.fixture(scope="module")
def exports(module_folder):
    """name -> (the model, its folder, why it is a state dict, what a fresh process made by the
    folder's page)."""
    root = module_folder("exports")
    made = []
    for number, (name, (image_tower, text_tower, *_)) in enumerate(MODELS.items()):
        trained = trained_model(image_tower, text_tower, loss_of(name))
        folder = root / f"model {number}"
        made.append((trained, folder, write_export(trained, folder)))
    found = embed_by_pages(root, [folder for _, folder, _ in made])
    return {name: (*own, by_page) for name, own, by_page in zip(MODELS, made, found)}


def test_a_fresh_process_gets_the_embeddings_of_the_training_stages(exports, subtests):
    """By the code on the page of the folder, with public libraries alone, from images and texts
    as they are."""
    ours = torch.stack([evaluated(data) for data in files()])
    for name, (trained, folder, differences, found) in exports.items():
        with subtests.test(name):
            reasons = REASONS.get(name, [NO_MODEL])
            assert all(reason in "; ".join(differences) for reason in reasons)
            assert (differences == []) == (folder / "config.json").is_file() == (reasons == [])
            # fp32 at values of about 2
            torch.testing.assert_close(found["pixel_values"], ours, rtol=0, atol=1e-5)
            assert_same(trained, found | {"pixel_values": ours})
            for embeds in (found["image_embeds"], found["text_embeds"]):
                assert (embeds[0] - embeds[1]).abs().max() > 1e-4  # it tells them apart


def test_what_scores_pairs_is_in_a_file_of_its_own(tmp_path, subtests):
    """The model is that of an export without it; `--fusion` goes on with its weights, and
    evaluate.py scores with them."""
    cases = {"hf clip+clip": "auto", "resnet+distilbert": "auto", "open_clip": "open_clip"}
    sizes = FusionSizes(1, 16, 2)
    for name, form in cases.items():
        image_tower, text_tower, *_ = MODELS[name]
        if form == "open_clip":  # which keeps no more positions than texts have tokens
            text_tower += f",context_length={TOKENS}"
        trained = trained_model(image_tower, text_tower, "infonce", fusion=sizes)
        out = tmp_path / name
        with subtests.test(name):
            write_export(trained, out, form=form)
            held = load_file(out / "fusion.safetensors")
            before, again = canonical_state(trained.layers), open_model_folder(out)
            assert_equal(held, {n: t for n, t in before.items() if n.startswith(FUSION_NAMES)})
            assert_equal(canonical_state(again.layers), before)
            page = (out / "README.md").read_text()
            assert "--fusion 1 --fusion-width 16 --fusion-heads 2" in page and "--rerank" in page
            options = options_of_export(out)
            names = options["image_tower"], options["text_tower"], again.tokenizer
            for of_fusion in (sizes, None):
                towers = towers_for(*names, fusion=of_fusion)
                head = towers[1].specs[-1].build(3, open_model(str(out), *towers))
                begun = getattr(head, "fusion", None)
                assert (begun is None) == (of_fusion is None)
                if begun:
                    theirs = trained.layers[-1].fusion.score.weight
                    assert torch.equal(begun.score.weight, theirs)


def assert_equal(found, expected):
    """Tensors by name, to the last bit."""
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.all("starts one more run")
def test_an_export_is_gone_on_with_without_a_change(exports, subtests):
    """By a run, for which it is enough what the folder says about towers, sizes and tokenizer, and
    by evaluate.py."""
    for name, (trained, folder, *_) in exports.items():
        with subtests.test(name):
            written = json.loads((folder / "wye.json").read_text())["options"]
            assert options_of_export(folder).keys() == written.keys()  # each may be said
            options = parse_options(["--import", str(folder), "--loss", loss_of(name)])
            options = replace(options, label_smoothing=0.0)
            assert options.tokenizer_source() == str(folder)
            image_tower = MODELS[name][0]
            if image_tower.startswith("hf:"):  # its configuration lies in the folder
                image_tower = f"hf:{folder}/image:pool={trained.towers[0].config['pool']}"
            assert options.image_tower == image_tower
            tokenizer = load_tokenizer(options.tokenizer_source())
            tokens = batch_tokens(tokenizer, CAPTIONS, TOKENS)[0]
            assert tokens["input_ids"].equal(
                batch_tokens(trained.tokenizer, CAPTIONS, TOKENS)[0]["input_ids"]
            )
            model = RunModel.of(options, tokenizer)
            specs = [spec for own in model.layers.values() for spec in own]
            layers = [model.build_layer(spec).eval() for spec in specs]
            assert_equal(canonical_state(layers), canonical_state(trained.layers))
            if name in ("hf clip+clip", "vit+bert", "resnet50+bert+sigmoid"):
                again = open_model_folder(folder)
                assert_equal(canonical_state(again.layers), canonical_state(trained.layers))
                assert again.step == 7 and not any(layer.training for layer in again.layers)
            given = {"pixel_values": torch.randn(4, 3, SIZE, SIZE), **tokens}
            expected, found = (embeddings(side, given) for side in (trained.layers, layers))
            for key in ("image_embeds", "text_embeds"):
                assert torch.equal(expected[key], found[key])


def test_a_tower_is_named_by_the_option_that_named_it(tmp_path):
    """Where a module took the place of a modality, that is --tower; the export is read without it."""
    trained = trained_model(RESNET, BERT, "infonce")
    options = trained.options | {"image_tower": RESNET50, "tower": (f"image={RESNET}",)}
    write_export(replace(trained, record={"options": options}), tmp_path / "out")
    assert options_of_export(tmp_path / "out")["image_tower"] == RESNET
    page = (tmp_path / "out" / "README.md").read_text()
    assert "\n# resnet18:" in page and RESNET50 not in page
    again = open_model_folder(tmp_path / "out")
    assert_equal(canonical_state(again.layers), canonical_state(trained.layers))


# --loss, of what the export says it without the pairs of the tower that is left out, and with them
LOSSES = {
    "of each": ("image:text=sigmoid,depth:text=infonce", "sigmoid", "image:text=sigmoid"),
    "of a dropped pair": ("depth:text=sigmoid", "infonce", "depth:text=sigmoid"),
    "of all": ("sigmoid", "sigmoid", "sigmoid"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_of_pairs_that_are_left_out_are_left_out(
    name, tmp_path, registries, monkeypatch, capsys
):
    loss, of_libraries, of_all = LOSSES[name]
    trained, out = model_with_depth(VIT, BERT, loss), tmp_path / "out"
    write_export(trained, out)
    assert options_of_export(out)["loss"] == of_libraries
    assert ("\n- siglip\n" in (out / "README.md").read_text()) == (of_libraries == "sigmoid")
    for named in (True, False):
        if not named:
            monkeypatch.setattr("data.modules._named", set())
        again = open_model_folder(out)
        state, expected = canonical_state(again.layers), canonical_state(trained.layers)
        assert {*again.by_branch} == {"image", "text", *["depth"] * named}
        assert_equal(state, {n: t for n, t in expected.items() if named or "depth" not in n})
        options = parse_options(["--import", str(out)])
        assert options.pairs == ("image:text,depth:text,image:depth" if named else "image:text")
        found = loss_names(options.loss, options.pairs)
        assert found == loss_names(of_all if named else of_libraries, options.pairs)
        assert parse_options(["--import", str(out), "--pairs", "image:text"]).loss == of_libraries


@pytest.mark.parametrize("pairs", ("video:text,depth:text", "video:text,depth:text,depth:video"))
def test_a_tower_of_ones_own_goes_with_the_frames_of_films(pairs, tmp_path, registries):
    """The tower of which is that of images, also in what the loss of their pair learns."""
    films = {"video_tower": RESNET, "video_frames": 2, "video_rate": None, "pairs": pairs}
    trained = model_with_depth(RESNET, BERT, "infonce", **films)
    write_export(trained, tmp_path / "out")
    again = open_model_folder(tmp_path / "out")
    assert [tower.branch for tower in again.towers] == ["image", "text", "depth"]
    expected = {
        name.replace("video_text_logit", "logit").replace("video", "image"): tensor
        for name, tensor in canonical_state(trained.layers).items()
    }
    assert_equal(canonical_state(again.layers), expected)


def test_a_run_with_fewer_pairs_goes_on_with_their_losses(exports, tmp_path):
    """Of an export of three towers with two of them."""
    copy = shutil.copytree(exports["resnet50+bert+sigmoid"][1], tmp_path / "copy")
    record = json.loads((copy / "wye.json").read_text())
    record["options"] |= {
        "pairs": "image:text,audio:text",
        "loss": "image:text=sigmoid,audio:text=infonce",
    }
    (copy / "wye.json").write_text(json.dumps(record))
    for pairs, loss in (
        ("image:text", "sigmoid"),
        ("image:text,video:text", "image:text=sigmoid"),
    ):
        assert parse_options(["--import", str(copy), "--pairs", pairs]).loss == loss


@pytest.mark.parametrize("pairs", ["image:text,image:palette", "palette:text,image:text"])
def test_an_export_is_started_from_beside_another_pair(exports, pairs, registries):
    """What that pair's loss learns begins anew, whichever branch comes first."""
    trained, folder, *_ = exports["vit+bert"]
    options = parse_options(
        [
            *("--import", str(folder), "--import-module", "examples.modality"),
            *("--pairs", pairs, "--label-smoothing", "0"),
        ]
    )
    tokenizer = load_tokenizer(options.tokenizer_source())
    model = RunModel.of(options, tokenizer)
    built = {
        tower.branch: canonical_state([model.build_layer(spec) for spec in tower.specs])
        for tower in model.towers
    }
    of_pair = ("image_palette" if "image:palette" in pairs else "palette_text") + "_logit_scale"
    assert [name for own in built.values() for name in own if name.endswith(of_pair)]
    for branch in ("image", "text"):
        for name, value in canonical_state(trained.layers).items():
            if name in built[branch]:
                assert torch.equal(built[branch][name], value), name


def test_a_model_that_lacks_a_tensor_is_not_loaded(exports, tmp_path):
    """By the folder's own code, as a whole model and as towers; transformers would draw it."""
    for name in ("hf clip+clip", "hf clip, avg+modernbert"):
        copy = shutil.copytree(exports[name][1], tmp_path / name)
        state = load_file(copy / "model.safetensors")
        lost = next(key for key in state if "layers.1." in key or "layer.1." in key)
        del state[lost]
        save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"lack .*{lost[-12:]}"):
            modeling_export.load(copy)


def test_what_is_given_beside_an_export_counts_and_must_fit_its_weights(exports, capsys):
    folder = str(exports["vit+bert"][1])
    assert parse_options(["--import", folder, "--image-size", "96"]).image_size == 96
    with pytest.raises(SystemExit):
        parse_options(["--import", folder, "--text-weights", "bert-tiny"])
    assert "it holds the text tower; leave out --text-weights" in capsys.readouterr().err
    for where, image_tower, error, message in (
        (folder, VIT.replace("size=16", "size=8"), ValueError, "conv_proj.weight has shape"),
        (folder, RESNET, ValueError, "has no tensor for image.conv1.weight"),
        (folder + "s", VIT, FileNotFoundError, "there is no such file or folder"),
    ):
        with pytest.raises(error, match=message):
            open_model(where, *towers_for(image_tower, BERT, tokenizer_for(BERT)))


BY_0_1 = {  # image tower, text tower, as what transformers' class the former was written
    "vit+bert": (
        *(VIT, BERT),
        Dinov2Config(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            mlp_ratio=2,
            image_size=SIZE,
            patch_size=16,
            use_mask_token=False,
        ),
    ),
    "convnext+clip": (
        *(CONVNEXT, CLIP),
        ConvNextConfig(
            hidden_sizes=[16, 24, 32, 40],
            depths=[1, 1, 2, 1],
            layer_norm_eps=1e-6,
            image_size=SIZE,
            hidden_size=40,
        ),
    ),
}


@pytest.mark.parametrize("name", BY_0_1)
def test_an_export_of_version_0_1_is_read(tmp_path, name):
    """One whose tower of torchvision was written as one of transformers, in a model of any two."""
    image_tower, text_tower, vision = BY_0_1[name]
    trained, kind = trained_model(image_tower, text_tower, "infonce"), "VisionTextDualEncoderModel"
    write_export(trained, tmp_path)
    sides = vision.to_dict(), AutoConfig.from_pretrained(tmp_path / "text").to_dict()
    config = dict(zip(("vision_config", "text_config"), sides), projection_dim=32)
    library = VisionTextDualEncoderModel(VisionTextDualEncoderConfig(**config)).eval()
    draw = torch.Generator().manual_seed(0)
    for parameter in library.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    library.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "wye.json").read_text())
    record |= {"kind": kind, "loading": {**record["loading"], "model": kind, "towers": {}}}
    (tmp_path / "wye.json").write_text(json.dumps(record))

    assert parse_options(["--import", str(tmp_path)]).image_tower == image_tower
    again = open_model_folder(tmp_path)
    given = batch_tokens(again.tokenizer, CAPTIONS, TOKENS)[0]
    given |= {"pixel_values": torch.randn(4, 3, SIZE, SIZE, generator=draw)}
    found = embeddings(again.layers, given)
    by_loader = modeling_export.load(tmp_path)
    for side, theirs in (
        ("image", by_loader.embed_images(given["pixel_values"])),
        ("text", by_loader.embed_texts(CAPTIONS)),
    ):
        assert_equal_rows(found[f"{side}_embeds"], theirs)
        assert (theirs[0] - theirs[1]).abs().max() > 1e-4
    assert found["logit_scale"] == library.logit_scale
    assert type(by_loader.whole) is VisionTextDualEncoderModel
    other = towers_for(RESNET, text_tower, again.tokenizer)
    with pytest.raises(ValueError, match="dual encoder, .* cannot be .it has no resnet18 of torch"):
        open_model(str(tmp_path), *other)
    with pytest.raises(ValueError, match="it pools by pool=(eos|pooler), not mean"):
        open_model(str(tmp_path), *towers_for(image_tower, text_tower + MEAN, again.tokenizer))


def test_a_model_of_infonce_goes_on_with_sigmoid(exports, caplog):
    """The scale is the trained one; the bias, which it has not, begins where it always does."""
    for name in ("hf clip+clip", "resnet+distilbert"):
        trained, folder, *_ = exports[name]
        towers = towers_for(*MODELS[name][:2], trained.tokenizer, "sigmoid")
        head = towers[0].specs[-1].build(0, open_model(str(folder), *towers))
        assert head.logit_scale == trained.layers[len(towers[0].specs) - 1].logit_scale
        assert head.logit_bias.item() == -10
        assert "has no head.logit_bias: trained from scratch" in caplog.text
        caplog.clear()


def grey_files():
    """Of 16 bits, with a value that stands for transparency too, and of real numbers to 1 and to
    255."""
    coarse = np.random.default_rng(0).integers(0, 65536, (9, 8)).astype(np.uint16)
    fine = coarse.repeat(9, 0).repeat(10, 1)
    yield encoded(Image.fromarray(fine))
    yield encoded(Image.fromarray(fine), transparency=int(fine[0, 0]))
    for most in (1, 255):
        yield encoded(Image.fromarray((fine / 65535 * most).astype(np.float32)), "TIFF")


def test_the_pixels_of_the_weights_go_with_an_export(tmp_path):
    """Of a run with ImageNet's values: its page, transformers' processor and a run that starts from
    it prepare the same pixels."""
    trained = trained_model(VIT, BERT, "infonce")
    values = {
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "image_interpolation": "bilinear",
        "image_resize": 72,
    }
    trained.options.update(values)
    write_export(trained, tmp_path)
    transform = EvalTransform((SIZE, SIZE), trained.preprocessing)
    model = modeling_export.load(tmp_path)
    data = encoded(sample_image((87, 80)))
    for file in (*grey_files(), data):
        pixels = stacked([transform(transform.stored(file))])
        expected = normalise(pixels, preprocessing=trained.preprocessing)[0]
        found = model.pixel_values(io.BytesIO(file))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (expected - evaluated(data)).abs().max() > 0.1  # CLIP's are others
    processors = [
        AutoImageProcessor.from_pretrained(tmp_path, **how) for how in ({"backend": "pil"}, {})
    ]
    for size in ((SIZE, SIZE), (70, 70), (87, 80), (333, 217)):
        image = sample_image(size)
        expected = model.pixel_values(io.BytesIO(encoded(image)))
        by_pillow, theirs = (
            processor(image, return_tensors="pt")["pixel_values"][0] for processor in processors
        )
        torch.testing.assert_close(by_pillow, expected, rtol=0, atol=1e-5)
        # by default theirs are resized by torchvision, which rounds to another of 255 levels
        level = 1 / 255 / min(values["image_std"])
        torch.testing.assert_close(theirs, expected, rtol=0, atol=level + 1e-5)
        assert (theirs - expected).abs().gt(1e-5).float().mean() < 0.05
    options = parse_options(["--import", str(tmp_path)])
    assert {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in vars(options).items()
        if key in values
    } == values
    assert open_model_folder(tmp_path).preprocessing == trained.preprocessing
    record = json.loads((tmp_path / "wye.json").read_text())
    (tmp_path / "wye.json").write_text(json.dumps({**record, "format": 0}))
    with pytest.raises(ValueError, match="wye.json: is of another version of Wye .format 0"):
        open_model_folder(tmp_path)


def test_a_page_shows_the_results_of_its_very_weights(tmp_path):
    """Of a run that evaluated both: those of the average are of that alone."""
    lines = [
        {"step": step, "held_out": name, **{f"image_to_text_R@{k}": value for k in (1, 5, 10)}}
        for name, values in (("a", (0.1, 0.2)), ("ema/a", (0.3, 0.4)))
        for step, value in zip((6, 7), values)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = {"version": __version__, "options": {"eval_ema": True}}
    record["data"] = {"held_out_samples": {"a": 9}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    checkpoint = tmp_path / "checkpoints" / "step-00000007"
    trained = Trained(record, checkpoint, 7, None, (), [])
    for averaged, expected in ((False, "20.0"), (True, "40.0")):
        (row,) = _recalls(read_folder(tmp_path, ""), trained, averaged)
        assert (row["held-out set"], row["R@1 %"]) == ("a (9)", expected)


def test_a_scale_beyond_its_limit_is_exported_as_the_loss_read_it(tmp_path):
    """The optimizer's momentum can carry it there, and the loss then reads the limit."""
    trained = trained_model(VIT, BERT, "infonce")
    (head,) = (layer for layer in trained.layers if hasattr(layer, "logit_scale"))
    head.logit_scale.data.fill_(5.0)
    write_export(trained, tmp_path / "out")
    scale = canonical_state(open_model_folder(tmp_path / "out").layers)["head.logit_scale"]
    assert scale.exp().item() == pytest.approx(100.0)


def test_half_precision_weights_are_exported_as_they_are(tmp_path):
    trained = trained_model(VIT, BERT, "infonce", torch.bfloat16)
    write_export(trained, tmp_path / "out")
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name, tensor in state.items() if tensor.dtype == torch.bfloat16]
    again = open_model_folder(tmp_path / "out")
    assert_equal(canonical_state(again.layers), canonical_state(trained.layers))
    assert json.loads((tmp_path / "out" / "wye.json").read_text())["trained_in"] == "bfloat16"


def test_what_cannot_be_exported_or_opened_is_refused(exports, tmp_path):
    trained, folder, *_ = exports["resnet+distilbert"]
    own = replace(trained.towers[0], name="mine", config={})
    with pytest.raises(ValueError, match="tower mine is in no library"):
        write_export(replace(trained, towers=(own, trained.towers[1])), tmp_path / "out")
    with pytest.raises(ValueError, match="--checkpoint and --ema are of a run's folder"):
        open_model_folder(folder, "step-00000007")
    with pytest.raises(FileNotFoundError, match="holds no config.json; give the folder of a run"):
        open_run(tmp_path)
    (tmp_path / "step-00000002").mkdir()
    with pytest.raises(FileNotFoundError, match="no such checkpoint; there are: step-00000002"):
        find_checkpoint(tmp_path, "step-00000009")


def test_only_an_earlier_export_is_replaced(tmp_path):
    trained = trained_model(RESNET, BERT, "infonce")
    out = tmp_path / "out"
    out.mkdir()
    write_export(trained, out)  # empty: taken
    with pytest.raises(ValueError, match="replace an earlier export with --overwrite"):
        write_export(trained, out)
    (out / "left.txt").touch()
    write_export(trained, out, overwrite=True)
    assert not (out / "left.txt").exists() and options_of_export(out)["embed_dim"] == 32
    (tmp_path / "link").symlink_to(tmp_path / "a folder")
    (tmp_path / "a folder").mkdir()
    write_export(trained, tmp_path / "link")
    assert options_of_export(tmp_path / "a folder")["embed_dim"] == 32
    (tmp_path / "link").unlink()
    shutil.rmtree(tmp_path / "a folder")
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        open_model_folder(out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="no earlier export"):
        write_export(trained, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def model_with_regions(image_tower, text_tower, loss):
    """As `trained_model`, of a run with `PAIRS`."""
    tokenizer = tokenizer_for(text_tower)
    towers = []
    for tower in towers_for(image_tower, text_tower, tokenizer, loss):
        own = tower.specs[-1].template.scalars
        scalars = own | {f"region_phrase_{name}": value / 2 for name, value in own.items()}
        plain = replace(tower, specs=tower.specs[:-1])
        towers.append(with_head(plain, 32, scalars, annotations="region"))
    layers = [spec.build(3).eval() for tower in towers for spec in tower.specs]
    options = {"image_tower": image_tower, "text_tower": text_tower, "loss": loss, "pairs": PAIRS}
    options |= {"embed_dim": 32, "image_size": SIZE, "max_text_tokens": TOKENS}
    return Trained({"options": options}, Path("step-00000007"), 7, tokenizer, tuple(towers), layers)


# runs the code of each folder's page, and asks for a box of each of two images
FRESH = """
import os, sys, torch
for folder in sys.argv[1:]:
    os.chdir(folder)
    names = {}
    exec(open("page.py").read(), names)
    assert names["region_embeds"].shape == (1, 32)
    pixels, boxes = torch.randn(2, 3, 64, 64), torch.tensor([[0, 0, 0.5, 0.25], [0.3, 0.1, 1, 1]])
    found = names["regions"].embed(pixels, boxes, torch.tensor([1, 0]))
    torch.save({"pixels": pixels, "boxes": boxes, "found": found}, "result.pt")
"""
# name of `MODELS` -> --format, and whether code outside of Wye embeds its regions
WITH_REGIONS = {
    "hf clip+clip": ("auto", True),
    "vit+bert": ("auto", True),
    "convnext+clip": ("auto", True),
    "resnet50+bert+sigmoid": ("auto", True),
    "vit, max+bert, first": ("auto", True),
    "hf vit+roberta": ("auto", True),
    "hf dinov2+clip": ("auto", True),
    "hf convnext+bert": ("auto", True),
    "hf siglip, avg+siglip": ("auto", True),
    "hf siglip2+t5": ("auto", True),
    "hf registers, max+mt5, last": ("auto", True),
    "hf swin+mpnet, attention": ("auto", True),
    "timm+bert": ("auto", True),
    "timm+open_clip": ("auto", False),
    "torchvision, max+bert": ("auto", True),
    "open_clip": ("open_clip", True),
    "open_clip, SigLIP's texts": ("auto", True),
}


@pytest.mark.all("exports towers of every library")
def test_an_export_embeds_boxes_by_the_code_of_its_page(tmp_path, subtests):
    """For towers of each library; and Wye's own towers get back all that was learned."""
    made, runnable = {}, []
    for number, (name, (form, embeds)) in enumerate(WITH_REGIONS.items()):
        image_tower, text_tower, *_ = MODELS[name]
        if form == "open_clip":  # which keeps no more positions than texts have tokens
            text_tower += f",context_length={TOKENS}"
        trained, folder = (
            model_with_regions(image_tower, text_tower, loss_of(name)),
            tmp_path / str(number),
        )
        write_export(trained, folder, form=form)
        made[name] = trained, folder
        page = (folder / "README.md").read_text()
        code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
        (folder / "page.py").write_text(code)
        Image.new("RGB", (SIZE, SIZE), (200, 40, 30)).save(folder / "apple.jpg")
        assert (folder / "modeling_regions.py").exists() == embeds, name
        assert ("no code here embeds a box" in page) != embeds, name
        runnable += [str(folder)] if embeds else []
    words = [sys.executable, "-c", FRESH, *runnable]
    result = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    for name, (trained, folder) in made.items():
        with subtests.test(name):
            before = canonical_state(trained.layers)
            assert_equal(canonical_state(open_model_folder(folder).layers), before)
            names = {name for name in before if name.startswith(learned_names("region"))}
            assert load_file(folder / "regions.safetensors").keys() == names
            if str(folder) in runnable:
                found = torch.load(folder / "result.pt")
                boxes = (found["boxes"] * WHOLE).round().int()
                given = {"pixel_values": found["pixels"], "region_boxes": boxes}
                given["region_row"] = torch.tensor([1, 0])
                own = embeddings(trained.layers_of("image"), given)["region_embeds"]
                assert_equal_rows(found["found"], own)
                assert (own[0] - own[1]).abs().max() > 1e-3
