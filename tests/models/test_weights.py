"""Pretrained weights: round trips, names of other writers, laziness, refusals."""

import json
import logging
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedModel

import models.weights.reading
from models.towers.building import with_head
from models.towers.image import image_tower
from models.towers.text import text_tower
from models.weights.reading import find_model, open_weights

VOCAB = 120  # of the families


def library_state(layers) -> dict[str, torch.Tensor]:
    return {
        layer.canonical_names[local].split(".", 1)[1]: tensor
        for layer in layers
        for local, tensor in layer.state_dict().items()
    }


def built(tower, seed, weights=None):
    return [spec.build(seed, weights) for spec in tower.specs]


def assert_equal_but_heads(layers, others):
    ours, theirs = (library_state(each[:-1]) for each in (layers, others))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def write(folder: Path, state: dict, form: str = "safetensors") -> str:
    """Save weights in one of the forms that are read; returns what to ask for."""
    folder.mkdir(exist_ok=True)
    if form == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif form == "legacy file":
        state = {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}
        torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
        return str(folder / "old.pth")
    elif form == "sharded":
        names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        for i, shard in enumerate(names):
            save_file({name: state[name] for name in list(state)[i::2]}, folder / shard)
        shard_of = {name: names[i % 2] for i, name in enumerate(state)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return str(folder)


def test_round_trip(cases, tmp_path, subtests):
    for name, case in cases.items():
        with subtests.test(name):
            tower = with_head(case.tower(), 8)
            saved = built(tower, seed=1)
            where = write(tmp_path / name, library_state(saved[:-1]))
            assert_equal_but_heads(built(tower, 2, open_weights(case.branch, where, tower)), saved)


def test_a_folder_that_transformers_saved(cases, forward, tmp_path, subtests):
    """The names in it are those of our tensors, and the tower made of it is its model."""
    for name, case in cases.items():
        with subtests.test(name):
            torch.manual_seed(6)
            model = case.library(dict.fromkeys(case.dropout, 0.0)).eval()
            if not isinstance(model, PreTrainedModel):  # of another library
                continue
            model.save_pretrained(tmp_path / name)
            tower = case.tower()
            reader = open_weights(case.branch, str(tmp_path / name), tower)
            layers = [layer.eval() for layer in built(tower, 1, reader)]
            in_file = safe_open(tmp_path / name / "model.safetensors", "pt").keys()
            assert sorted(reader.read_names) == sorted(
                name for name in in_file if not name.startswith(case.classifier_prefix)
            )
            with torch.no_grad():
                made = forward(layers, case.inputs())[f"{case.branch}_features"]
                assert torch.equal(made, case.run_reference(model, case.inputs()))


def test_forms(cases, tmp_path):
    tower = with_head(cases["bert"].tower(), 8)
    saved = built(tower, seed=1)
    for form in ("bin", "legacy file", "sharded"):
        where = write(tmp_path / form, library_state(saved[:-1]), form)
        loaded = built(tower, 2, open_weights("text", where, tower))
        assert_equal_but_heads(loaded, saved)
        # heads are never in these files
        assert not torch.equal(loaded[-1].text_projection.weight, saved[-1].text_projection.weight)


def test_prefixes_and_old_names(cases, tmp_path, subtests):
    """Also those of torchvision's first ViT files."""
    for name, prefix in (
        ("bert", "bert."),
        ("roberta", "roberta."),
        ("distilbert", "distilbert."),
        ("clip", "text_model."),
        ("resnet-basic", "module."),
        ("bert", "module.bert."),
        ("vit", ""),
    ):
        with subtests.test(f"{name}, {prefix}"):
            tower = with_head(cases[name].tower(), 8)
            saved = built(tower, seed=1)
            state = {"cls.predictions.bias": torch.zeros(3)}
            for key, tensor in library_state(saved[:-1]).items():
                key = key.replace("LayerNorm.weight", "LayerNorm.gamma")
                key = key.replace("LayerNorm.bias", "LayerNorm.beta")
                key = key.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2.")
                state[prefix + key] = tensor
            assert name != "vit" or any("linear_2" in key for key in state)
            where = write(tmp_path / f"{name} {prefix}", state)
            loaded = built(tower, 2, open_weights(tower.branch, where, tower))
            assert_equal_but_heads(loaded, saved)


def test_torchvision_names(cases, tmp_path, monkeypatch):
    """The library's own download, with the network replaced by a file: BatchNorm counters are not
    in old ones."""
    tower = with_head(cases["resnet-basic"].tower(), 8)
    saved = built(tower, seed=1)
    state = {
        key: tensor for key, tensor in library_state(saved[:-1]).items() if "num_batches" not in key
    }
    asked = []

    def load(url, **options):
        asked.append((url, options["weights_only"]))
        return {**state, "fc.weight": torch.zeros(1000, 512)}

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", load)
    assert_equal_but_heads(built(tower, 2, open_weights("image", "DEFAULT", tower)), saved)
    assert asked == [("https://download.pytorch.org/models/resnet18-f37072fd.pth", True)]
    with pytest.raises(ValueError, match=r"'IMAGENET1K_V2' is not known; did you mean 'IMAG"):
        open_weights("image", "IMAGENET1K_V2", tower)


def test_hub_names(cases, tmp_path, monkeypatch):
    tower = with_head(cases["bert"].tower(), 8)
    saved = built(tower, seed=1)
    asked = []

    def download(hub_id, allow_patterns):
        asked.append(hub_id)
        if "model.safetensors" in allow_patterns:  # this one has torch files only
            (tmp_path / "empty").mkdir(exist_ok=True)
            return str(tmp_path / "empty")
        return write(tmp_path / "bin", library_state(saved[:-1]), "bin")

    monkeypatch.setattr(models.weights.reading, "snapshot_download", download)
    for where, hub_id in (
        ("someone/model", "someone/model"),
        ("DEFAULT", "google-bert/bert-base-uncased"),
        ("bert-mini", "google/bert_uncased_L-4_H-256_A-4"),
    ):
        assert_equal_but_heads(built(tower, 2, open_weights("text", where, tower)), saved)
        assert asked[-2:] == [hub_id, hub_id]

    def unreachable(hub_id, allow_patterns):
        raise OSError("no network")

    monkeypatch.setattr(models.weights.reading, "snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match="'someone/model' could not be had .*check the id"):
        open_weights("text", "someone/model", tower)


def test_an_export_on_the_hub_is_downloaded_whole(tmp_path, monkeypatch):
    """With what lies beside the model: the audio tower, fusion, regions and towers of one's own."""
    names = ["model.safetensors", "wye.json", "image/config.json", "vocab.txt"]
    names += ["audio.safetensors", "fusion.safetensors", "regions.safetensors"]
    names += ["own_towers.safetensors"]

    def download(hub_id, allow_patterns):
        for name in filter_repo_objects([*names, "page.html"], allow_patterns=allow_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(models.weights.reading, "snapshot_download", download)
    folder = find_model("someone/model")
    assert {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} == {*names}


def test_only_what_a_layer_needs_is_read(cases, tmp_path, monkeypatch):
    tower = with_head(cases["bert"].tower(), 8)
    where = write(tmp_path, library_state(built(tower, 1)[:-1]))
    read = []
    original = models.weights.reading.safe_open

    class Watched:
        def __init__(self, *args, **options):
            self.file = original(*args, **options)

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(models.weights.reading, "safe_open", Watched)
    reader = open_weights("text", where, tower)
    assert read == []  # opening checks headers only
    layer = tower.specs[2].build(0, reader)
    assert (
        sorted(read)
        == sorted(reader.read_names)
        == sorted(name.split(".", 1)[1] for name in layer.canonical_names.values())
    )
    assert all(name.startswith("encoder.layer.1.") for name in read)


class _Draws(TorchDispatchMode):
    """Collects how many random numbers are drawn into memory."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not made.is_meta:
            self.numbers.append(made.numel())
        return made


def assert_as_drawn_and_filled(spec, reader, drawn=()):
    """A layer built from a file is, to the last bit, the one that was drawn and then filled from
    it, tensors outside the state too; `drawn`: its tensors that are not in the file."""
    expected = spec.build(3)
    reader.fill(expected)
    with _Draws() as draws:
        layer = spec.build(3, reader)
    tensors = [
        dict([*each.named_parameters(remove_duplicate=False), *each.named_buffers()])
        for each in (layer, expected)
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[1].items():
        assert torch.equal(tensors[0][name], tensor), (spec.name, name)
        assert tensors[0][name].requires_grad == tensor.requires_grad
    assert {*layer.state_dict()} - {*reader.given(layer)} == {*drawn}
    tables = {buffer.numel() for buffer in layer.buffers()}  # Whisper's positions are a buffer
    assert bool({*draws.numbers} - tables) == bool(drawn), spec.name


def test_what_a_file_gives_is_not_drawn(cases, tmp_path, subtests):
    """Of every family; of heads, which it does not give, the first values stay."""
    for name, case in cases.items():
        with subtests.test(name):
            tower = with_head(case.tower(), 8)
            where = write(tmp_path / name, library_state(built(tower, 1)[:-1]))
            reader = open_weights(tower.branch, where, tower)
            for spec in tower.specs[:-1]:
                assert_as_drawn_and_filled(spec, reader)
            head = tower.specs[-1]
            expected, layer = head.build(0).state_dict(), head.build(0, reader).state_dict()
            assert all(torch.equal(layer[name], tensor) for name, tensor in expected.items())


def test_what_a_file_lacks_is_drawn_as_without_it(tmp_path):
    """A pooling of ours behind a tower cut by hand and behind a recorded one, and counters, which
    begin at 0 in a layer that is not drawn."""
    for name in ("resnet18:layers=1-1-1-1,pool=attention", "timm:resnet10t:pool=attention"):
        tower = image_tower(name, 32)
        layers = built(tower, 1)
        added = [local for local in layers[-1].state_dict() if local.startswith("pool.")]
        state = library_state(layers[:-1])
        kept = {name: t for name, t in state.items() if not name.endswith("num_batches_tracked")}
        assert len(kept) < len(state)
        reader = open_weights("image", write(tmp_path / name.partition(":")[0], kept), tower)
        assert_as_drawn_and_filled(tower.specs[-1], reader, added)
        for spec in tower.specs[:-1]:
            with _Draws() as draws:
                layer = spec.build(3, reader)
            assert not draws.numbers
            counters = [t for n, t in layer.named_buffers() if n.endswith("num_batches_tracked")]
            assert counters and not any(counters)


def test_masked_language_models_have_no_pooler(cases, tmp_path, caplog):
    tower = cases["bert"].tower()
    config = {k: v for k, v in tower.config["config"].items() if k != "architectures"}
    BertForMaskedLM(BertConfig(**config)).save_pretrained(tmp_path)
    reader = open_weights("text", str(tmp_path), tower)
    with caplog.at_level(logging.WARNING):
        layers = built(tower, 4, reader)
    (message,) = caplog.messages
    assert "has no text.pooler.dense.weight, text.pooler.dense.bias: trained" in message
    fresh = tower.specs[-1].build(4).pool.pooler.dense.weight
    assert torch.equal(layers[-1].pool.pooler.dense.weight, fresh)
    name = "encoder.layer.1.output.dense.weight"
    expected = BertModel.from_pretrained(tmp_path).state_dict()[name]
    assert torch.equal(library_state(layers)[name], expected)


def test_half_precision_files_are_read_into_fp32(cases, tmp_path):
    tower = cases["bert"].tower()
    state = {name: tensor.half() for name, tensor in library_state(built(tower, 1)).items()}
    layer = tower.specs[1].build(0, open_weights("text", write(tmp_path, state), tower))
    weight = layer.block.intermediate.dense.weight
    expected = state["encoder.layer.0.intermediate.dense.weight"].float()
    assert weight.dtype == torch.float32 and torch.equal(weight, expected)


def test_refusals(cases, tmp_path):
    tower = cases["bert"].tower()
    state = library_state(built(tower, 1))
    whole = write(tmp_path / "whole", state)
    name = "encoder.layer.1.output.dense.bias"
    missing = write(tmp_path / "missing", {k: t for k, t in state.items() if k != name})

    def changed(*words, vocabulary=VOCAB):
        return text_tower(cases["bert"].name.replace(*words), vocabulary, 12)

    shorter = changed("embeddings=20", "embeddings=15")
    narrower = changed("intermediate_size=144", "intermediate_size=80")
    for where, other, message in (
        (
            missing,
            tower,
            rf"no tensor for text\.{name}; the nearest there is 'encoder\.layer\.[01]",
        ),
        (whole, changed("", "", vocabulary=99), r"\(120, 64\) there but \(99, 64\) in .*vocab"),
        (whole, shorter, r"\(20, 64\) there but \(15, 64\) .*position embeddings are not interp"),
        (whole, narrower, r"\(144, 64\) there but \(80, 64\) .*weights of the same architecture"),
    ):
        with pytest.raises(ValueError, match=message):
            open_weights("text", where, other)
    with pytest.raises(ValueError, match="the image branch were asked for a tower of the text"):
        open_weights("image", whole, tower)


def test_positions_of_another_image_size_are_interpolated(cases, tmp_path, caplog):
    """As the stem does with larger images: weights at 32 pixels, a tower for 64."""
    vit = cases["vit"]
    saved = built(vit.tower(), 1)
    where = write(tmp_path, library_state(saved))
    tower = image_tower(vit.name, 64)
    with caplog.at_level(logging.WARNING):
        reader = open_weights("image", where, tower)
        loaded = library_state([built(tower, 2, reader) for replica in range(2)][0])
    assert caplog.messages == [
        f"weights '{where}': image.encoder.pos_embedding has shape (1, 17, 96) there and "
        "(1, 65, 96) in the tower: interpolated between the learned ones"
    ]
    assert torch.equal(loaded["encoder.pos_embedding"], saved[0].positions(8, 8))
    assert torch.equal(loaded["conv_proj.weight"], saved[0].embeddings.weight)


def test_places_refused(cases, tmp_path):
    def refused(where, error, message):
        with pytest.raises(error, match=message):
            open_weights("text", str(where), cases["bert"].tower())

    refused(tmp_path, FileNotFoundError, "has none of model.safetensors, pytorch_model.bin")
    refused(tmp_path / "nothing", FileNotFoundError, "there is no such file or folder")
    refused("bert-mimi", ValueError, r"'bert-mimi' is not known; did you mean 'bert-mini'\?")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, FileNotFoundError, "names model-00001-of-00002.safetensors, which is not")


def test_files_with_code_are_refused(cases, tmp_path):
    class Code:
        def __reduce__(self):
            return print, ("ran",)

    torch.save({"embeddings": Code()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match="(?i)weights.only"):
        open_weights("text", str(tmp_path), cases["bert"].tower())
