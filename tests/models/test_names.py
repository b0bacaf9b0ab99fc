"""The name syntax and its refusals: what was given, what the rule is, what to do."""

import json

import pytest
import torch
from transformers import BertConfig, CLIPConfig, GPT2Config, ViTConfig, XLMRobertaConfig

from models.towers.building import build_towers
from models.towers.image import image_tower
from models.towers.names import split_name
from models.towers.text import text_tower


def test_image_names_refused(subtests):
    for name, message in (
        (
            "resnet5",
            r"image tower 'resnet5' is not known; did you mean 'resnet50'\? Known: convnext_base",
        ),
        ("vit_b_16:hiden_dim=96", r"key 'hiden_dim' is not known; did you mean 'hidden_dim'\?"),
        ("vit_b_16:num_layers=two", "num_layers=two must be an integer"),
        ("vit_b_16:num_layers=2,num_layers=3", "num_layers is given twice"),
        ("vit_b_16:num_layers=2,", "'' is not of the form key=value"),
        ("vit_b_16:patch_size=7", "image_size=32 must be a multiple of patch_size=7"),
        ("vit_b_16:num_heads=5", "hidden_dim=768 must be a multiple of num_heads=5"),
        ("resnet18:width_per_group=128", "can differ from 1 and 64 in resnet50, 101 and 152 only"),
        ("resnet50:layers=1-2", "layers=1-2 must be 4 positive integers"),
        ("resnet50:layers=1-2-x-1", "layers=1-2-x-1 must be integers joined by '-'"),
        ("resnet50:zero_init_residual=yes", "must be true or false"),
        ("convnext_tiny:dims=8-16", "dims and depths must be equally many"),
    ):
        with subtests.test(name), pytest.raises(ValueError, match=message):
            image_tower(name, 32)


def test_text_names_refused(subtests):
    for name, message in (
        ("bert-mimi", r"text tower 'bert-mimi' is not known; did you mean 'bert-mini'\?"),
        ("bert-bse", r"'bert-bse' is not known; did you mean 'bert-base-uncased'\?"),
        ("bert-mini:hidden=4", "key 'hidden' is not known; did you mean 'hidden_"),
        ("bert-mini:vocab_size=4", "key 'vocab_size' is not known"),  # the tokenizer's business
        ("bert-mini:hidden_size=30", "num_attention_heads 4 must divide hidden_size 30"),
    ):
        with subtests.test(name), pytest.raises(ValueError, match=message):
            text_tower(name, 100, 8)


def test_sizes_refused():
    for name, sizes, message in (
        (
            "bert-mini",
            (100, 513),
            "512 positions, so .*=513 must be from 1 to 512; lower --max-text",
        ),
        ("roberta-base", (100, 513), "has 512 positions"),  # 514 less the two before the first
        ("clip-text-base:max_position_embeddings=77", (None, 78), "77 positions, so .*tokens=78"),
        ("clip-text-base", (100, 8), "eos_token_id=49407 must be one id below vocab_size=100"),
        ("bert-mini", (100, 8, 100), "pad_token_id=100 must be below vocab_size=100"),
    ):
        with pytest.raises(ValueError, match=message):
            text_tower(name, *sizes)
    longer = text_tower("clip-text-base", None, 78).specs[0].canonical_parameters
    assert longer["text.embeddings.position_embedding.weight"] == (78, 512)
    with pytest.raises(ValueError, match="image_size=16 must be at least 32"):
        image_tower("resnet18", 16)
    with pytest.raises(ValueError, match="embed_dim=0"):
        build_towers("resnet18", "bert-mini", 0, 32, 100, 8)


def test_vit_refuses_images_that_are_not_whole_patches():
    tower = image_tower("vit_b_16:num_layers=1,hidden_dim=24,num_heads=2,mlp_dim=8", 32)
    with pytest.raises(ValueError, match=r"\(48, 40\) but this ViT reads patches of 16x16; both"):
        tower.specs[0].build(0)({"pixel_values": torch.zeros(1, 3, 48, 40)})


def test_other_spellings_of_a_preset(subtests):
    """Hub ids and common names need no network."""
    for typed, preset in (
        ("google-bert/bert-base-uncased", "bert-base-uncased"),
        ("BERT-base", "bert-base-uncased"),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-minilm-l6-v2"),
        ("all-MiniLM-L6-v2", "all-minilm-l6-v2"),
        ("microsoft/mpnet-base", "mpnet-base"),
        ("mBERT", "bert-base-multilingual-cased"),
        ("ModernBERT-large", "modernbert-large"),
        ("openai/clip-vit-base-patch32", "clip-text-base"),
        ("clip-vit-base-patch32", "clip-text-base"),
        ("siglip-base-patch16-224", "siglip-text-base"),
        ("bert_base_chinese", "bert-base-chinese"),
        ("xlm-r", "xlm-roberta-base"),
    ):
        with subtests.test(str(typed)):
            one, other = text_tower(typed, 100, 8, 0, 5), text_tower(preset, 100, 8, 0, 5)
            assert one.config == other.config and one.name == typed


def test_a_prefix_that_texts_need_not_have(tmp_path):
    assert text_tower("hf:bert-mini", 100, 8).name == "bert-mini"
    BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    assert text_tower(f"hf:{tmp_path}:pool=mean", None, 16).name == f"{tmp_path}:pool=mean"


def test_a_folder_is_of_the_library_whose_configuration_it_holds(tmp_path):
    ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    tower = image_tower(f"{tmp_path}:pool=cls", 32)
    assert tower.name == f"hf:{tmp_path}:pool=cls" and tower.width == 24


def test_a_preset_with_other_sizes():
    """Values that the configuration works out of others follow them."""
    siglip = text_tower("siglip-text-base:hidden_size=24,num_attention_heads=2", 50, 8)
    assert siglip.width == 24
    assert siglip.specs[-1].canonical_parameters["text.head.weight"] == (24, 24)
    modern = text_tower("modernbert-base:num_hidden_layers=25", 50, 8, 0)
    kinds = [spec.template.block.attention_type for spec in modern.specs[1:-1]]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [*range(0, 25, 3)]


def test_split_name():
    assert split_name("a:b=1,c=x") == ("a", {"b": "1", "c": "x"})
    assert split_name("C:/models/bert") == ("C:/models/bert", {})
    assert split_name("/m/x:y:k=1") == ("/m/x:y", {"k": "1"})


def test_folders(tmp_path):
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    small |= {"intermediate_size": 64, "vocab_size": 90}
    BertConfig(**small, dtype="float16").save_pretrained(tmp_path / "bert")
    tower = text_tower(f"{tmp_path}/bert:num_hidden_layers=1", None, 16)
    names = ["text.embeddings", "text.encoder.layer.0", "text.pooler"]
    assert [spec.name for spec in tower.specs] == names
    words = tower.specs[0].build(0).embeddings.word_embeddings.weight
    # fp32 whatever the file says
    assert words.shape == (90, 32) and words.dtype == torch.float32
    XLMRobertaConfig(**small, pad_token_id=1).save_pretrained(tmp_path / "xlm")
    assert text_tower(str(tmp_path / "xlm"), None, 16).config["architecture"] == "XLMRobertaModel"
    CLIPConfig(text_config={**small, "eos_token_id": 5}).save_pretrained(tmp_path / "clip")
    assert text_tower(str(tmp_path / "clip"), None, 16).specs[1].name == "text.encoder.layers.0"


def test_folders_refused(tmp_path):
    GPT2Config().save_pretrained(tmp_path / "gpt")
    BertConfig(is_decoder=True).save_pretrained(tmp_path / "decoder")
    relative = {"model_type": "bert", "position_embedding_type": "relative_key"}
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text(json.dumps(relative))
    for name, error, message in (
        ("", FileNotFoundError, "is a folder without config.json"),
        ("nothing", FileNotFoundError, "looks like a path but is no folder"),
        ("gpt", ValueError, "'gpt2'; supported types: bert, .*modernbert, mpnet, .*, xlm-roberta"),
        ("decoder", ValueError, "is configured as a decoder"),
        ("bert", ValueError, "position_embedding_type 'relative_key'; only 'absolute'"),
    ):
        with pytest.raises(error, match=message):
            text_tower(str(tmp_path / name), None, 16)


def test_an_unreachable_hub_is_named(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("models.towers.libraries.configurations.snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match="'someone/model': its config.* Hugging Face hub"):
        text_tower("someone/model", None, 16)


def test_the_record_is_json(cases):
    for case in cases.values():
        json.dumps(case.tower().config)
    image, text = build_towers("convnext_tiny", "clip-text-base", 512, 64, None, 77)
    assert image.config["embed_dim"] == 512 and image.config["tower"] == "convnext_tiny"
    assert image.config["depths"] == (3, 3, 9, 3)
    assert text.config["config"]["hidden_size"] == 512
    assert text.config["hub_id"] == "openai/clip-vit-base-patch32"
