"""A model that was built, not trained, with what evaluates it."""

from pathlib import Path

from data.modalities.preprocessing import Preprocessing
from data.modalities.tokenizer import train_tokenizer
from launch.inference.embedding import Embedder
from launch.inference.trained import Trained
from models.losses import build_loss
from models.towers.building import build_towers

SIZE, TOKENS = 32, 16


def make_embedder(source, fusion=None):
    tokenizer = train_tokenizer([source.captions(i)[0] for i in range(0, 400)])
    names = (
        "resnet18:layers=1-1-1-1,width_per_group=64",
        "bert-tiny:hidden_size=32,num_attention_heads=2,intermediate_size=32",
    )
    ids = tokenizer.pad_token_id, tokenizer.eos_token_id
    towers = build_towers(
        *names, 16, SIZE, len(tokenizer), TOKENS, *ids, build_loss("infonce").parameters, fusion
    )
    layers = [spec.build(1).eval() for tower in towers for spec in tower.specs]
    options = {"image_size": SIZE, "max_text_tokens": TOKENS, "seed": 0}
    record = {"options": options | Preprocessing().options(SIZE)}
    return Embedder(
        Trained(record, Path("step-00000001"), 1, tokenizer, towers, layers), "cpu", 7, 0
    )
