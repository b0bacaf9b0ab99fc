"""Models by name without a network, and files that would run code: both end with one clear message,
and nothing is run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, CLIPConfig, CLIPImageProcessor

from data.modalities.tokenizer import train_tokenizer
from launch.inference.trained import open_model_folder
from models.towers.image import image_tower
from models.towers.text import text_tower
from models.weights.reading import open_weights

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

# each way in by which a model is named, in a fresh process: the port is closed, so that a client
# that tries again says so and is killed by the test's limit
ASK = """
import sys
from data.modalities.tokenizer import load_tokenizer, train_tokenizer
from models.towers.image import image_tower
from models.towers.text import text_tower
from models.weights.reading import find_model, open_weights

image, text = image_tower("timm:resnet18", 64), text_tower("bert-tiny", None, 16)
clip = image_tower("open_clip:ViT-B-32", 224)
for ask in (
    lambda: find_model("someone/model"),
    lambda: text_tower("someone/model", None, 16),
    lambda: load_tokenizer("someone/model"),
    lambda: open_weights("text", "DEFAULT", text),
    lambda: open_weights("image", "DEFAULT", image),
    lambda: open_weights("image", "DEFAULT", clip),
):
    try:
        ask()
        print("found")
    except (OSError, ValueError) as error:
        print(" ".join(str(error).split()))
"""


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.all("starts processes that import anew")
def test_without_a_network_each_download_is_tried_once(tmp_path, offline):
    pytest.importorskip("timm", reason="optional towers")
    pytest.importorskip("open_clip", reason="optional towers")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": address}
    environment |= {"HF_HUB_OFFLINE": str(int(offline)), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, text=True, capture_output=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = result.stdout.splitlines()[-6:]
    for line in said:
        assert ("network" in line or "cannot be had from the hub" in line) and "give" in line, said
        assert "folder" in line or "file" in line, said
    assert "Retrying" not in result.stderr, result.stderr[-3000:]


class Payload:
    """What a pickle runs when it is read: it leaves a file."""

    def __init__(self, ran):
        self.ran = ran

    def __reduce__(self):
        return os.system, (f"touch '{self.ran}'",)


def payload(path, ran, zipped=True):
    state = {"encoder.weight": torch.zeros(2), "more": Payload(ran)}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    return path


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_code_is_refused(tmp_path, zipped):
    """By each way in that takes a file or a folder of weights."""
    ran = tmp_path / "it ran"
    torch.load(payload(tmp_path / "proof.bin", ran, zipped), weights_only=False)
    assert ran.is_file()  # so it would
    ran.unlink()
    text, image = tmp_path / "text", tmp_path / "image.pth"
    BertConfig(vocab_size=50, intermediate_size=16, **SIZES).save_pretrained(text)
    payload(text / "pytorch_model.bin", ran, zipped)
    payload(image, ran, zipped)
    whole = tmp_path / "whole"
    tower = {"intermediate_size": 16, **SIZES}
    CLIPConfig(
        text_config={"vocab_size": 300, "pad_token_id": 0, "eos_token_id": 3, **tower},
        vision_config={"image_size": 32, "patch_size": 16, **tower},
    ).save_pretrained(whole)
    tokenizer = train_tokenizer(["a red apple", "two birds"])
    tokenizer.save_pretrained(whole)
    CLIPImageProcessor().save_pretrained(whole)
    payload(whole / "pytorch_model.bin", ran, zipped)
    message = "cannot be read as weights alone, and code in a file is never run"
    with pytest.raises(ValueError, match=message):
        open_weights("text", str(text), text_tower(str(text), None, 16))
    with pytest.raises(ValueError, match=message):
        open_weights("image", str(image), image_tower("resnet18", 64))
    with pytest.raises(ValueError, match=message):
        open_model_folder(whole)
    (whole / "pytorch_model.bin").rename(whole / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": {"text_model.embeddings.weight": "pytorch_model-00001-of-00001.bin"}}
    (whole / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError):
        open_model_folder(whole)
    assert not ran.exists()


def test_a_file_of_another_kind_is_refused(tmp_path):
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    (tmp_path / "page.bin").write_text("<html>not found</html>")
    tower = image_tower("resnet18", 64)
    with pytest.raises(ValueError, match="holds a list; a state dict is needed"):
        open_weights("image", str(tmp_path / "list.pth"), tower)
    with pytest.raises(ValueError, match="page.bin: cannot be read as weights alone"):
        open_weights("image", str(tmp_path / "page.bin"), tower)
