"""OpenCLIP's models, in and out: the same tensors, the same embeddings by OpenCLIP alone, trained
between."""

import json
import shutil
from dataclasses import replace

import open_clip
import pytest
import torch
from exports import CAPTIONS, TOKENS, assert_same, embed_by_pages, trained_model
from launched import fork_flags, run_to_end, write_pairs
from safetensors.torch import load_file, save_file
from transformers import XLMRobertaConfig

from data.modalities.tokenizer import load_tokenizer, train_tokenizer
from data.modalities.tokenizer_open_clip import clip_tokenizer
from launch.config.options import parse_options
from launch.exporting.writing import canonical_state, write_export
from launch.inference.trained import open_model_folder, with_named_towers
from launch.setup.model import RunModel

VIT = {"image_size": 64, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16}
TEXT = {"context_length": TOKENS, "width": 48, "heads": 4, "layers": 2}
# `own`: the tokenizer is one of transformers, in the folder of the model
MODELS = {
    "ViT, quick-gelu": {"quick_gelu": True, "vision_cfg": VIT, "text_cfg": TEXT},
    "ViT, avg, texts of their own": {
        "vision_cfg": {**VIT, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": {**TEXT, "proj_bias": True},
        "custom_text": True,
    },
    "ResNet": {
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16},
        "text_cfg": TEXT,
    },
    "SigLIP": {
        "embed_dim": 96,
        "init_logit_bias": -10,
        "vision_cfg": {
            "image_size": 160,
            "timm_model_name": "test_vit3",
            "timm_model_pretrained": False,
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": {
            **TEXT,
            "width": 96,
            "hf_tokenizer_name": "own",
            "tokenizer_kwargs": {"clean": "canonicalize"},
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6},
        },
        "custom_text": True,
    },
    "timm, no causal mask": {
        "vision_cfg": {
            "image_size": 64,
            "timm_model_name": "test_resnet",
            "timm_model_pretrained": False,
            "timm_pool": "avg",
            "timm_proj": None,
        },
        "text_cfg": {**TEXT, "no_causal_mask": True},
        "custom_text": True,
    },
    # as `xlm-roberta-base-ViT-B-32`: texts go through transformers' XLM-R and, which is OpenCLIP's
    # default, two layers
    "two layers": {
        "vision_cfg": VIT,
        "text_cfg": {
            "hf_model_name": "xlm",
            "hf_model_pretrained": False,
            "hf_tokenizer_name": "own",
            "hf_pooler_type": "mean_pooler",
            "context_length": TOKENS,
        },
        "custom_text": True,
    },
}


def published(config, folder, torch_file=False):
    """A folder as OpenCLIP's `save_for_hf` writes it; no parameter is zero."""
    torch.manual_seed(3)
    config = json.loads(json.dumps({"embed_dim": 32, **config}))
    texts = config["text_cfg"]
    folder.mkdir()
    if "hf_tokenizer_name" in texts:
        tokenizer = train_tokenizer(CAPTIONS)
        tokenizer.save_pretrained(folder)
    if "hf_model_name" in texts:
        texts["hf_model_name"] = str(folder / "xlm")
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 64, "vocab_size": len(tokenizer), "pad_token_id": 0}
        own = XLMRobertaConfig(**sizes, max_position_embeddings=40)
        own.save_pretrained(texts["hf_model_name"])
    elif "hf_tokenizer_name" in texts:
        texts |= {"vocab_size": len(tokenizer) + 5}
    kind = open_clip.CustomTextCLIP if config.get("custom_text") else open_clip.CLIP
    model = kind(**{key: value for key, value in config.items() if key != "custom_text"})
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    pixels = {"mean": [0.5] * 3, "std": [0.4] * 3, "interpolation": "bilinear"}
    pixels["resize_mode"] = "squash" if "init_logit_bias" in config else "shortest"
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": pixels})
    )
    if torch_file:
        torch.save(state, folder / "open_clip_pytorch_model.bin")
    else:
        save_file(state, folder / "open_clip_model.safetensors")
    return config, state


@pytest.fixture(scope="module")
def models(module_folder):
    """name -> (its configuration, its tensors, its folder, the folder of its export)."""
    root, made = module_folder("models"), {}
    for number, (name, config) in enumerate(MODELS.items()):
        folder, out = root / f"model {number}", root / f"out {number}"
        config, state = published(config, folder, torch_file=number == 1)
        assert write_export(opened(folder), out, form="open_clip") == []
        made[name] = config, state, folder, out
    return made


def opened(folder):
    return open_model_folder(folder)


def test_a_model_comes_out_as_it_went_in(models, subtests):
    for name, (config, state, _, out) in models.items():
        with subtests.test(name):
            after = load_file(out / "open_clip_model.safetensors")
            assert state.keys() == after.keys()
            assert not [key for key in state if not torch.equal(state[key], after[key])]
            written = json.loads((out / "open_clip_config.json").read_text())
            resized = "squash" if name == "SigLIP" else "shortest"
            assert written["preprocess_cfg"]["resize_mode"] == resized
            found, texts = written["model_cfg"], config["text_cfg"]
            kept = [key for key in config if key not in ("text_cfg", "vision_cfg")]
            assert {key: found.get(key) for key in kept} == {key: config[key] for key in kept}
            if name == "two layers":
                moved = {"hf_model_name": "./text", "hf_proj_type": "mlp"}
                texts = {**texts, **moved}
                del texts["hf_model_pretrained"]  # its weights are in the folder
            assert {key: found["text_cfg"][key] for key in texts} == texts


def changed(trained):
    """As training leaves it: no head is the identity any more, and statistics have moved."""
    draw = torch.Generator().manual_seed(0)
    for layer in trained.layers:
        for key, tensor in layer.state_dict().items():
            if tensor.is_floating_point() and "running_var" not in key:
                tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.02)
    return trained


@pytest.mark.all("more models of OpenCLIP")
def test_open_clip_alone_has_our_embeddings(models, tmp_path):
    """Of models that have learned; heads behind OpenCLIP's own projections are multiplied into
    them."""
    ours = [changed(opened(folder)) for _, _, folder, _ in models.values()]
    ours += [opened(models["two layers"][2])]  # as published
    assert ours[-1].towers[1].specs[-2].canonical_parameters == {
        "text.proj.0.weight": (40, 48),
        "text.proj.2.weight": (32, 40),
    }
    same_by_pages(ours, tmp_path)


def same_by_pages(ours, folder):
    """Exported, by the code of their pages alone, and opened again."""
    outs = [folder / str(i) for i in range(len(ours))]
    for trained, out in zip(ours, outs):
        write_export(trained, out, form="open_clip")
    for trained, out, found in zip(ours, outs, embed_by_pages(folder, outs)):
        assert_same(trained, found)
        assert_same(opened(out), found)


def test_a_state_dict_needs_the_folder_that_it_came_from_no_more(models, tmp_path):
    trained = opened(shutil.copytree(models["ViT, quick-gelu"][2], tmp_path / "theirs"))
    reasons = write_export(trained, tmp_path / "out")
    assert reasons[-1] == "OpenCLIP may have this model: give --format open_clip"
    shutil.rmtree(tmp_path / "theirs")
    before, after = (canonical_state(each.layers) for each in (trained, opened(tmp_path / "out")))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["ViT, quick-gelu", "SigLIP"])
def test_a_run_takes_from_the_model_what_is_not_given(models, name):
    config, state, folder, _ = models[name]
    for where in (folder, f"local-dir:{folder}"):
        options = parse_options(["--data", "demo", "--import", str(where)])
        options = with_named_towers(replace(options, label_smoothing=0.0), None)
        sigmoid = name == "SigLIP"
        assert (options.loss, options.projection) == (
            ("sigmoid", "none") if sigmoid else ("infonce", "linear")
        )
        assert options.embed_dim == config["embed_dim"] and options.max_text_tokens == TOKENS
        assert options.image_size == config["vision_cfg"]["image_size"]
        assert options.image_std == (0.4,) * 3 and options.image_interpolation == "bilinear"
        assert options.image_resize_mode == ("squash" if sigmoid else "shortest")
        tokenizer = load_tokenizer(options.tokenizer)
        model = RunModel.of(options, tokenizer)
        heads = [model.build_layer(specs[-1]) for specs in model.layers.values()]
        assert heads[0].logit_scale == state["logit_scale"]


def test_a_file_of_weights_with_the_name_of_its_model(models, tmp_path):
    """What the model's configuration says need not be given again."""
    config, state, folder, _ = models["ViT, quick-gelu"]
    file = tmp_path / "epoch_3.pt"
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": t for n, t in state.items()}}, file)
    towers = [f"--{side}-tower=open_clip:{folder}" for side in ("image", "text")]
    options = parse_options(["--data", "demo", "--import", str(file), *towers])
    assert (options.embed_dim, options.image_size, options.max_text_tokens) == (32, 64, TOKENS)
    assert options.image_std == (0.4,) * 3
    model = RunModel.of(
        replace(options, label_smoothing=0.0),
        load_tokenizer(options.tokenizer),
    )
    head = model.build_layer(model.layers["image"][-1])
    assert torch.equal(head.image_projection.weight, state["visual.proj"].t())


@pytest.mark.all("more models of OpenCLIP")
def test_towers_of_timm_and_transformers_that_open_clip_has(tmp_path):
    cases = [
        ("timm:test_resnet", "bert-tiny:pool=mean", "infonce"),
        ("timm:test_convnext", "roberta-base:hidden_size=48,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,pool=first", "sigmoid"),
        ("open_clip:RN50:layers=1-1-1-1,width=16", "bert-tiny:pool=pooler", "infonce"),
        ("timm:test_resnet", "mt5-small:d_model=48,d_kv=16,d_ff=64,num_layers=2,num_heads=3", "infonce"),
        ("timm:test_resnet", "open_clip:ViT-B-32:layers=2,width=64,heads=2", "infonce"),
    ]  # fmt: skip
    same_by_pages([trained_model(*case) for case in cases], tmp_path)


def test_what_open_clip_has_not_is_refused(tmp_path):
    sizes, mean = "dim=48,n_layers=2,n_heads=4,hidden_dim=64", "bert-tiny:pool=mean"
    vit = "timm:vit_tiny_patch16_224"
    for image, text, message in (
        ("resnet18:layers=1-1-1-1", mean, "no image tower that is resnet18 of torchvision"),
        ("timm:test_resnet:pool=attention", mean, "no pool=attention behind"),
        ("timm:test_resnet", "bert-tiny:pool=max", "not by max"),
        ("timm:test_resnet", f"distilbert-base-uncased:{sizes}", "no DistilBertModel"),
        (f"{vit}:depth=2,embed_dim=48,num_heads=3", mean, "without depth, embed_dim, num_heads"),
        (vit, mean, "has other tensors: visual.trunk.pos_embed"),
    ):
        with pytest.raises(ValueError, match=message):
            write_export(trained_model(image, text, "infonce"), tmp_path / "out", form="open_clip")


def test_what_cannot_be_started_from_is_refused(models, tmp_path, capsys, monkeypatch):
    """A model with a decoder, and without a network one of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, _, folder, _ = models["ViT, quick-gelu"]
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["multimodal_cfg"] = {}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    for where, message in (
        (tmp_path, "CoCa model has a decoder"),
        ("hf-hub:nobody/nothing", "give local-dir:FOLDER"),
    ):
        with pytest.raises(SystemExit):
            parse_options(["--data", "demo", "--import", str(where)])
        assert message in capsys.readouterr().err


def test_the_tokenizers_are_open_clips(models):
    _, _, folder, _ = models["SigLIP"]
    own, siglip = open_clip.SimpleTokenizer(), open_clip.get_tokenizer(f"local-dir:{folder}")
    for text in CAPTIONS + ["It's a  CAT_dog! (no. 12)", "naïve café — ½"]:
        theirs = own([text])[0].tolist()
        assert clip_tokenizer()(text)["input_ids"] == theirs[: theirs.index(49407) + 1], text
        tokenizer = load_tokenizer(f"open_clip:{folder}")
        ids = tokenizer(text, truncation=True, max_length=TOKENS)["input_ids"]
        theirs = siglip([text])[0].tolist()
        assert theirs[: len(ids)] == ids and not any(theirs[len(ids) :]), text


@pytest.mark.slow
def test_a_model_is_trained_in_a_fork_and_loaded_by_open_clip(models, tmp_path):
    """Two steps from the SigLIP-like model; the card says what was done."""
    _, state, folder, _ = models["SigLIP"]
    data, run, out = write_pairs(tmp_path, 96), tmp_path / "run", tmp_path / "out"
    how = ["--data", data, "--val-fraction", 0.25, "--workers", 0, "--steps", 2, "--save-every", 2]
    how += [*fork_flags(tmp_path), "--import", folder, "--run-dir", run]
    status, output = run_to_end("train.py", *how, ranks=2)
    assert status == 0, output[-5000:]
    status, output = run_to_end("export.py", run, out, "--format", "open_clip")
    assert status == 0, output[-5000:]
    (found,) = embed_by_pages(tmp_path, [out])
    assert all(found[key] != state[key] for key in ("logit_scale", "logit_bias"))
    assert_same(opened(run), found)
    card = (out / "README.md").read_text()
    header, page = card.removeprefix("---\n").split("\n---\n", 1)
    assert "library_name: open_clip" in header and "pipeline_tag: zero-shot" in header
    assert "license" not in header and "| steps | 2 of 2 |" in page
    assert "| samples per step | " in page and "| epochs | " in page
    assert "train.py --data" in page and "| validation (24) | image → text |" in page
