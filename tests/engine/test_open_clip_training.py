"""Beside the program that people use today: from equal weights on equal batches OpenCLIP's own loop
has the losses that ours has.

Its model factory, DistributedDataParallel, losses, optimizer with its groups, warm-up and clamp of
the scale against our stages, exchange, ZeRO-1 and schedule. Batch normalisation takes its means
over 32 samples, a rank's batch there and a micro-batch here. At a higher rate rounding grows faster
than tenfold a step in these towers, also between two ways to run one of the programs.
"""

import json
from functools import cache

import pytest
import torch
from launched import finish, start
from ranks import run_ranks
from small_towers import EMBED_DIM, MAX_TOKENS
from split_training import (
    WEIGHT_DECAY,
    Case,
    global_batch,
    towers_of,
    train_split,
)
from transformers import BertConfig, BertTokenizerFast

STEPS, WARMUP, RATE = 5, 3, 1e-4
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": WARMUP, "warmup_type": "linear"}}
BATCH_PER_RANK = 32


def case_of(layout, stages, replicas, loss, global_batch_size):
    return Case(
        layout, stages, replicas, BATCH_PER_RANK, loss=loss, towers="resnet18+bert, mean", steps=STEPS, scheduler=SCHEDULE,
        global_batch_size=global_batch_size, lr=RATE,
    )  # fmt: skip


ONE, FORK, MERGED = (
    ("merged", {"merged": 1}, 1),
    ("fork", {"image": 1, "text": 1}, {"image": 1, "text": 1}),
    ("merged", {"merged": 1}, 2),
)


@pytest.fixture(scope="module")
def peer(module_folder):
    """(loss, ranks) -> the mean of its ranks' losses in each step."""

    @cache
    def train(loss, ranks):
        folder = module_folder("open_clip")
        case = case_of(*ONE, loss, ranks * BATCH_PER_RANK)
        towers, image_size = towers_of(case)
        _write_model(folder, towers, image_size)
        state = {
            layer.canonical_names[n]: t
            for t in towers.values()
            for layer in _built(t, case.seed)
            for n, t in layer.state_dict().items()
        }
        torch.save(
            {_their_name(name): _their_shape(name, tensor) for name, tensor in state.items()},
            folder / "weights.pt",
        )
        batches = [global_batch(case, step, image_size) for step in range(STEPS)]
        flags = (
            "--model small --name run --device cpu --train-data given --epochs 1 "
            f"--batch-size {BATCH_PER_RANK} --lr {RATE} --wd {WEIGHT_DECAY} --warmup {WARMUP} "
            "--lr-scheduler const --beta1 0.9 --beta2 0.999 --eps 1e-8 --precision fp32 "
            "--local-loss --gather-with-grad"
        )
        arguments = [
            *flags.split(),
            *("--pretrained", folder / "weights.pt", "--logs", folder / "logs"),
            *(["--siglip"] if loss == "sigmoid" else []),
        ]
        given = {
            "arguments": [str(argument) for argument in arguments],
            "config": str(folder / "small.json"),
            "batches": [(batch["pixel_values"], batch["input_ids"]) for batch in batches],
        }
        torch.save(given, folder / "given.pt")
        losses = _run(folder, ranks)
        assert all(len(own) == STEPS for own in losses)
        return [sum(own) / ranks for own in zip(*losses)]

    return train


def _built(tower, seed):
    return [spec.build(seed) for spec in tower.specs]


def _write_model(folder, towers, image_size):
    """OpenCLIP's configuration of both towers, with a folder of transformers for the text."""
    BertConfig(**towers["text"].config["config"]).save_pretrained(folder / "text")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join(words))
    # asked for by the program, used by nobody
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(str(folder / "text"))
    text = {
        "hf_model_name": str(folder / "text"),
        "hf_tokenizer_name": str(folder / "text"),
        "hf_model_pretrained": False,
        "hf_pooler_type": "mean_pooler",
        "hf_proj_type": "linear",
        "context_length": MAX_TOKENS,
    }
    image = {
        "timm_model_name": "resnet18",
        "timm_model_pretrained": False,
        "timm_pool": "avg",
        "timm_proj": "linear",
        "image_size": image_size,
    }
    (folder / "small.json").write_text(
        json.dumps({"embed_dim": EMBED_DIM, "vision_cfg": image, "text_cfg": text})
    )


def _their_name(name):
    for ours, theirs in (
        ("head.image_projection", "visual.head.proj"),
        ("head.text_projection", "text.proj"),
        ("image.", "visual.trunk."),
        ("text.", "text.transformer."),
        ("head.", ""),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise KeyError(name)


def _their_shape(name, tensor):
    return tensor.reshape(()) if name in ("head.logit_scale", "head.logit_bias") else tensor


def _run(folder, ranks):
    status, output = finish(
        start("tests/peer_training.py", folder / "given.pt", folder / "losses", ranks=ranks)
    )
    assert status == 0, output[-4000:]
    return [torch.load(folder / f"losses-{rank}") for rank in range(ranks)]


@pytest.mark.parametrize(
    ("way", "ranks", "loss"),
    [
        (ONE, 1, "sigmoid"),
        (FORK, 2, "infonce"),
        pytest.param(*(MERGED, 2, "infonce"), marks=pytest.mark.all("a second layout")),
    ],
    ids=["one rank", "fork on two", "merged on two"],
)
def test_equal_weights_and_batches_give_equal_losses(peer, way, ranks, loss):
    case = case_of(*way, loss, ranks * BATCH_PER_RANK)
    results = run_ranks(ranks, train_split, case)
    ours, theirs = [metrics.loss for metrics in results[0]["metrics"]], peer(loss, ranks)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert max(ours) / min(ours) > 1.02, "the steps did something"
