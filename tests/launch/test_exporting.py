"""Exported folders: the embeddings of the training stages, by public libraries alone; and the way
back."""

import io
import json
import shutil
from dataclasses import replace

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
    sample_image,
    tokenizer_for,
    towers_for,
    trained_model,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoProcessor

from common import __version__
from data.modalities.preprocessing import CLIP as CLIP_PIXELS
from data.modalities.tokenizer import batch_tokens, load_tokenizer
from data.modalities.transforms import EvalTransform, normalise, stacked
from launch.config.imported import options_of_export
from launch.config.options import parse_options
from launch.exporting import modeling_export
from launch.exporting.page import _results
from launch.exporting.writing import canonical_state, write_export
from launch.inference.trained import (
    Trained,
    find_checkpoint,
    open_model_folder,
    open_run,
)
from launch.reporting.reading import read_folder
from launch.setup.model import RunModel
from models.losses import build_loss
from models.towers.building import build_towers
from models.towers.fusion import FusionSizes
from models.towers.head import FUSION_NAMES
from models.weights.reading import open_model

RESNET = "resnet18:layers=1-1-1-1"
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
# image tower, text tower, a word of why it is a state dict (none: it is the dual encoder)
MODELS = {
    "vit+bert": (VIT, BERT, None),
    "convnext+clip": (CONVNEXT, CLIP, None),
    "vit+roberta": (VIT, ROBERTA, None),
    "resnet+distilbert": (RESNET, DISTILBERT, "ResNet has shape"),
    "resnet50+bert+sigmoid": ("resnet50:layers=1-1-1-1,width_per_group=8", BERT, "no logit_bias"),
    "vit+bert, two layers": (VIT, f"{BERT},mlp_proj=24", "no mlp_proj behind BertModel"),
    "convnext+distilbert": (CONVNEXT, DISTILBERT, "no pooled output"),
    "resnet, attention+bert, mean": (f"{RESNET},pool=attention", f"{BERT},pool=mean", "not mean"),
    "resnet, max+clip, last": (f"{RESNET},pool=max", f"{CLIP},pool=last", "not last"),
    "vit, avg+bert, attention": (f"{VIT},pool=avg", f"{BERT},pool=attention", "not avg"),
    "vit, attention+roberta, max": (
        f"{VIT},pool=attention",
        f"{ROBERTA},pool=max",
        "not attention",
    ),
    "vit, max+bert, first": (f"{VIT},pool=max", f"{BERT},pool=first", "not max"),
    "convnext, attention+bert, last": (
        f"{CONVNEXT},pool=attention",
        f"{BERT},pool=last",
        "not attention",
    ),
    "convnext, max+distilbert, mean": (
        f"{CONVNEXT},pool=max",
        f"{DISTILBERT},pool=mean",
        "not max",
    ),
    "vit+bert, eos": (VIT, f"{BERT},pool=eos", "not eos"),
    "hf clip+mpnet": (HF_CLIP, MPNET, None),
    "hf siglip+xlm-roberta": (HF_SIGLIP, XLM_ROBERTA, None),
    "hf vit+roberta": (HF_VIT, ROBERTA, None),
    "hf dinov2+clip": (HF_DINO, CLIP, None),
    "hf convnext+bert": (HF_CONVNEXT, BERT, None),
    "hf swin+bert": (HF_SWIN, BERT, None),
    "hf siglip, avg+siglip": (f"{HF_SIGLIP},pool=avg", SIGLIP, "the padding"),
    "hf siglip2+t5": (HF_SIGLIP2, T5, "takes images in patches"),
    "hf clip, avg+modernbert": (f"{HF_CLIP},pool=avg", MODERN, "not avg"),
    "hf vit, cls+xlm, mean": (f"{HF_VIT},pool=cls", f"{XLM},pool=mean", "not cls"),
    "hf dinov2 with registers, max+mt5, last": (
        f"{HF_REGISTERS},pool=max",
        f"m{T5},pool=last",
        "not max",
    ),
    "hf convnext, max+chinese clip": (
        f"{HF_CONVNEXT},pool=max",
        CHINESE,
        "ChineseCLIPTextModel in its ChineseCLIPModel only",
    ),
    "hf swin, attention+mpnet, attention": (
        f"{HF_SWIN},pool=attention",
        f"{MPNET},pool=attention",
        "not attention",
    ),
    "odd vit+clip": (
        VIT.replace("mlp_dim=96", "mlp_dim=100"),
        CLIP,
        "whole multiples of 48, not 100",
    ),
    "timm+bert": (f"{TIMM_VIT},pool=avg", BERT, "vit_tiny_patch16_224 of timm"),
    "timm, attention+open_clip": (
        f"{TIMM_VIT},pool=attention",
        f"{OPEN_CLIP},heads=2",
        "TextTransformer of open_clip",
    ),
    "torchvision, max+bert": ("squeezenet1_1:pool=max", BERT, "squeezenet1_1 of torchvision"),
    "open_clip": (OPEN_CLIP, f"{OPEN_CLIP},heads=2", "VisionTransformer of open_clip"),
    "open_clip, SigLIP's texts+RN50": (
        "open_clip:RN50:layers=1-1-1-1,width=16",
        "open_clip:ViT-B-16-SigLIP:layers=2,width=64,heads=2,context_length=16",
        "ModifiedResNet of open_clip",
    ),
}
SIGMOID = {
    "resnet50+bert+sigmoid",
    "hf siglip, avg+siglip",
    "timm, attention+open_clip",
    "open_clip, SigLIP's texts+RN50",
}


def model_of(name, **more):
    image_tower, text_tower, _ = MODELS[name]
    return trained_model(image_tower, text_tower, loss_of(name), **more)


def loss_of(name):
    return "sigmoid" if name in SIGMOID else "infonce"


@pytest.fixture(scope="module")
def exports(module_folder):
    """name -> (the model, its folder, why it is no dual encoder, what a fresh process made by the
    folder's page)."""
    root = module_folder("exports")
    made = []
    for number, name in enumerate(MODELS):
        trained, folder = model_of(name), root / f"model {number}"
        made.append((trained, folder, write_export(trained, folder)))
    found = embed_by_pages(root, [folder for _, folder, _ in made])
    return {name: (*own, by_page) for name, own, by_page in zip(MODELS, made, found)}


@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_process_gets_the_embeddings_of_the_training_stages(exports, name):
    """By the code on the page of the folder, with public libraries alone, from images and texts
    as they are."""
    (trained, folder, differences, found), reason = exports[name], MODELS[name][-1]
    assert (differences == []) == (reason is None) and (reason or "") in "; ".join(differences)
    assert (folder / "config.json").is_file() == (reason is None)
    ours = torch.stack([evaluated(data) for data in files()])
    # fp32 at values of about 2
    torch.testing.assert_close(found["pixel_values"], ours, rtol=0, atol=1e-5)
    assert_same(trained, found | {"pixel_values": ours})
    for embeds in (found["image_embeds"], found["text_embeds"]):
        assert (embeds[0] - embeds[1]).abs().max() > 1e-4  # it tells them apart


@pytest.mark.parametrize(
    ("name", "form"),
    [("vit+bert", "auto"), ("resnet+distilbert", "auto"), ("open_clip", "open_clip")],
)
def test_what_scores_pairs_is_in_a_file_of_its_own(tmp_path, name, form):
    """The model is that of an export without it; `--fusion` goes on with its weights, and
    evaluate.py scores with them."""
    image_tower, text_tower, _ = MODELS[name]
    if form == "open_clip":  # which keeps no more positions than texts have tokens
        text_tower += f",context_length={TOKENS}"
    sizes = FusionSizes(1, 16, 2)
    trained = trained_model(image_tower, text_tower, "infonce", fusion=sizes)
    write_export(trained, tmp_path / "out", form=form)
    held = load_file(tmp_path / "out" / "fusion.safetensors")
    before = canonical_state(trained.layers)
    fusion = {name for name in before if name.startswith(FUSION_NAMES)}
    assert held.keys() == fusion and all(torch.equal(held[n], before[n]) for n in fusion)
    again = open_model_folder(tmp_path / "out")
    after = canonical_state(again.layers)
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    page = (tmp_path / "out" / "README.md").read_text()
    assert "--fusion 1 --fusion-width 16 --fusion-heads 2" in page and "--rerank" in page
    options = options_of_export(tmp_path / "out")
    fused = towers_for(options["image_tower"], options["text_tower"], again.tokenizer, fusion=sizes)
    begun = fused[1].specs[-1].build(3, open_model(str(tmp_path / "out"), *fused))
    assert torch.equal(begun.fusion.score.weight, trained.layers[-1].fusion.score.weight)
    plain = towers_for(options["image_tower"], options["text_tower"], again.tokenizer)
    head = plain[1].specs[-1].build(3, open_model(str(tmp_path / "out"), *plain))
    assert not hasattr(head, "fusion")


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_started_from_without_a_change(exports, name):
    """What the folder says about towers, sizes and tokenizer is enough, and every tensor comes back
    to the last bit."""
    trained, folder, *_ = exports[name]
    written = json.loads((folder / "wye.json").read_text())["options"]
    assert options_of_export(folder).keys() == written.keys()  # each may be said by an export
    options = parse_options(["--import", str(folder), "--loss", loss_of(name)])
    assert options.tokenizer_source() == str(folder)
    image_tower = MODELS[name][0]
    if image_tower.startswith("hf:"):  # its configuration lies in the folder
        image_tower = f"hf:{folder}/image:pool={trained.towers[0].config['pool']}"
    assert options.image_tower == image_tower
    tokenizer = load_tokenizer(options.tokenizer_source())
    assert batch_tokens(tokenizer, CAPTIONS, TOKENS)[0]["input_ids"].equal(
        batch_tokens(trained.tokenizer, CAPTIONS, TOKENS)[0]["input_ids"]
    )
    sizes = (
        options.embed_dim,
        options.image_size,
        len(tokenizer),
        options.max_text_tokens,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    towers = build_towers(
        options.image_tower, options.text_tower, *sizes, build_loss(options.loss).parameters
    )
    weights = open_model(options.imported, *towers)
    layers = [spec.build(9, weights).eval() for tower in towers for spec in tower.specs]
    before, after = canonical_state(trained.layers), canonical_state(layers)
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    given = {"pixel_values": torch.randn(2, 3, SIZE, SIZE)}
    given |= batch_tokens(tokenizer, CAPTIONS[:2], TOKENS)[0]
    expected, found = (embeddings(side, given) for side in (trained.layers, layers))
    for key in ("image_embeds", "text_embeds"):
        assert torch.equal(expected[key], found[key])


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


@pytest.mark.parametrize("name", ["hf vit+roberta", "hf clip, avg+modernbert"])
def test_a_model_that_lacks_a_tensor_is_not_loaded(exports, tmp_path, name):
    """By the folder's own code, as a whole model and as towers; transformers would draw it."""
    copy = shutil.copytree(exports[name][1], tmp_path / "copy")
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
    tokenizer = tokenizer_for(BERT)
    with pytest.raises(
        ValueError, match=r"conv_proj.weight has shape \(48, 3, 16, 16\) there but \(48, 3, 8, 8\)"
    ):
        open_model(
            folder, *towers_for(VIT.replace("patch_size=16", "patch_size=8"), BERT, tokenizer)
        )
    with pytest.raises(
        ValueError, match="dual encoder, which the towers asked for cannot be .*ResNet"
    ):
        open_model(folder, *towers_for(RESNET, BERT, tokenizer))
    with pytest.raises(FileNotFoundError, match="there is no such file or folder"):
        open_model(folder + "s", *towers_for(VIT, BERT, tokenizer))


@pytest.mark.parametrize("name", ["vit+bert", "resnet+distilbert"])
def test_a_model_of_infonce_goes_on_with_sigmoid(exports, name, caplog):
    """The scale is the trained one; the bias, which it has not, begins where it always does."""
    trained, folder, *_ = exports[name]
    towers = towers_for(*MODELS[name][:2], trained.tokenizer, "sigmoid")
    head = towers[0].specs[-1].build(0, open_model(str(folder), *towers))
    assert (
        torch.equal(head.logit_scale, trained.layers[len(towers[0].specs) - 1].logit_scale)
        and head.logit_bias.item() == -10
    )
    assert "has no head.logit_bias: trained from scratch" in caplog.text


def test_transformers_processor_gives_the_pixels_of_evaluation_where_the_page_says_so(exports):
    folder = exports["vit+bert"][1]
    processor = AutoImageProcessor.from_pretrained(folder)
    one_level = 1 / 255 / min(CLIP_PIXELS.std)  # torch rounds in another way than Pillow
    for size in ((SIZE, SIZE), (SIZE + 1, 75), (70, 70), (333, 217)):
        theirs = processor(sample_image(size), return_tensors="pt")["pixel_values"][0]
        ours = evaluated(encoded(sample_image(size)))
        assert (theirs - ours).abs().max().item() < 1.01 * one_level
    assert type(AutoProcessor.from_pretrained(folder)).__name__ == "VisionTextDualEncoderProcessor"


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
    data = encoded(sample_image((87, 80)))
    pixels = stacked([transform(transform.stored(data))])
    expected = normalise(pixels, preprocessing=trained.preprocessing)[0]
    model = modeling_export.load(tmp_path)
    found = model.pixel_values(io.BytesIO(data))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for data in grey_files():
        pixels = stacked([transform(transform.stored(data))])
        expected_of_grey = normalise(pixels, preprocessing=trained.preprocessing)[0]
        found = model.pixel_values(io.BytesIO(data))
        torch.testing.assert_close(found, expected_of_grey, rtol=0, atol=1e-5)
    by_pillow, theirs = (
        AutoImageProcessor.from_pretrained(tmp_path, **how)(
            sample_image((87, 80)), return_tensors="pt"
        )["pixel_values"][0]
        for how in ({"backend": "pil"}, {})
    )
    torch.testing.assert_close(by_pillow, expected, rtol=0, atol=1e-5)
    # by default theirs are resized by torchvision, which rounds to another of 255 levels
    level = 1 / 255 / min(values["image_std"])
    torch.testing.assert_close(theirs, expected, rtol=0, atol=level + 1e-5)
    assert (theirs - expected).abs().gt(1e-5).float().mean() < 0.03
    assert (expected - evaluated(data)).abs().max() > 0.1  # CLIP's are others
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
        {"step": step, "held_out": name, "image_to_text_R@1": value}
        for step, name, value in [
            (6, "a", 0.1),
            (7, "a", 0.2),
            (6, "ema/a", 0.3),
            (7, "ema/a", 0.4),
        ]
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = {"version": __version__, "options": {"eval_ema": True}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    checkpoint = tmp_path / "checkpoints" / "step-00000007"
    trained = Trained(record, checkpoint, 7, None, (), [])
    for averaged, expected in ((False, 0.2), (True, 0.4)):
        found = _results(read_folder(tmp_path, ""), trained, averaged)
        assert {name: line["image_to_text_R@1"] for name, line in found.items()} == {"a": expected}


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
    towers = towers_for(VIT, BERT, trained.tokenizer)
    weights = open_model(str(tmp_path / "out"), *towers)
    for spec, layer in zip((spec for tower in towers for spec in tower.specs), trained.layers):
        for name, tensor in spec.build(0, weights).state_dict().items():
            assert tensor.dtype == torch.float32 and torch.equal(
                tensor, layer.state_dict()[name].float()
            ), name
    assert json.loads((tmp_path / "out" / "wye.json").read_text())["trained_in"] == "bfloat16"


@pytest.mark.parametrize("name", ["vit+bert", "resnet50+bert+sigmoid"])
def test_an_exported_folder_is_evaluated_like_a_run(name, tmp_path):
    trained = model_of(name)
    write_export(trained, tmp_path / "out")
    again = open_model_folder(tmp_path / "out")
    sizes = again.step, again.options["image_size"], again.options["max_text_tokens"]
    assert sizes == (7, SIZE, TOKENS)
    ids = [
        batch_tokens(each.tokenizer, CAPTIONS, TOKENS)[0]["input_ids"] for each in (again, trained)
    ]
    assert torch.equal(*ids) and not any(layer.training for layer in again.layers)
    before, after = canonical_state(trained.layers), canonical_state(again.layers)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ValueError, match="--checkpoint and --ema are of a run's folder"):
        open_model_folder(tmp_path / "out", "step-00000007")


def test_an_image_tower_of_ones_own_is_refused_by_its_name(tmp_path):
    trained = trained_model(RESNET, BERT, "infonce")
    own = replace(trained.towers[0], name="mine", config={})
    with pytest.raises(ValueError, match="tower mine is in no library"):
        write_export(replace(trained, towers=(own, trained.towers[1])), tmp_path / "out")


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
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
