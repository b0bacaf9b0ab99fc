"""What is asked of exported models: images and texts, and their embeddings by public libraries
alone."""

import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rounding import assert_equal_rows

from data.modalities.tokenizer import batch_tokens, train_tokenizer
from data.modalities.transforms import EvalTransform, normalise, stacked
from data.modules import import_modules
from launch.config.options import parse_options
from launch.inference.trained import Trained, towers_of
from models.losses import build_loss
from models.towers.adapters.layers import adapted_tower
from models.towers.building import build_towers

SIZE, TOKENS = 64, 12
CLIP = (
    "clip-text-base:hidden_size=48,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64"
)
CAPTIONS = [
    "a red apple",
    "two green birds over water",
    "nothing but snow and a very long way to go home again",
    "an apple",
]


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}


def texts(tokenizer, **more):
    """The sizes of a text tower of transformers, for texts of `TOKENS`."""
    return {
        **SIZES,
        "vocab_size": len(tokenizer) + 5,  # as published models round it up
        "max_position_embeddings": 2 * TOKENS,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **more,
    }


def started_from(folder, *flags):
    """The options of a run, without what its recipe says."""
    options = parse_options(["--data", "demo", "--import", str(folder), *flags])
    return replace(options, label_smoothing=0.0)


def tokenizer_for(text_tower):
    tokenizer = train_tokenizer(CAPTIONS)
    # it pools where the text ends; this id is not 2, nor the highest
    if text_tower == CLIP or "pool=eos" in text_tower or text_tower.startswith("open_clip:"):
        tokenizer.eos_token = "[SEP]"
    return tokenizer


def towers_for(image_tower, text_tower, tokenizer, loss="infonce", fusion=None):
    ids = tokenizer.pad_token_id, tokenizer.eos_token_id
    return build_towers(
        image_tower,
        text_tower,
        32,
        SIZE,
        len(tokenizer),
        TOKENS,
        *ids,
        build_loss(loss).parameters,
        fusion,
    )


def trained_model(
    image_tower, text_tower, loss, dtype=torch.float32, fusion=None, adapters=()
) -> Trained:
    """As a run leaves it; batch normalisation and layer scales are not what they begin with.
    `adapters`: LoRA by branch."""
    tokenizer, adapters = tokenizer_for(text_tower), dict(adapters)
    towers = tuple(
        adapted_tower(tower, adapters[tower.branch]) if tower.branch in adapters else tower
        for tower in towers_for(image_tower, text_tower, tokenizer, loss, fusion)
    )
    options = {"image_tower": image_tower, "text_tower": text_tower, "loss": loss}
    options |= {"embed_dim": 32, "image_size": SIZE, "max_text_tokens": TOKENS}
    layers = moved_layers(towers)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
    return Trained({"options": options}, Path("step-00000007"), 7, tokenizer, towers, layers)


def moved_layers(towers):
    """Those of the towers, with no value as it begins."""
    layers = [spec.build(3).eval() for tower in towers for spec in tower.specs]
    draw = torch.Generator().manual_seed(0)
    for layer in layers:
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.05)
    return layers


def model_with_depth(image_tower, text_tower, loss, lora=None, **more) -> Trained:
    """As `trained_model`, beside the tower of `examples/depth/`; `lora`: of all three; `more`:
    options of the run."""
    import_modules(["examples.depth.shown"])
    options = {
        "image_tower": image_tower,
        "text_tower": text_tower,
        "loss": loss,
        "embed_dim": 32,
        "image_size": SIZE,
        "max_text_tokens": TOKENS,
        "fusion": 0,
        "pairs": "image:text,depth:text,image:depth",
        "import_module": ("examples.depth.shown",),
        "tower": ("depth=32",),
        **more,
    }
    tokenizer = tokenizer_for(text_tower)
    towers = towers_of(options, tokenizer)
    if lora is not None:
        towers = tuple(adapted_tower(tower, lora) for tower in towers)
    layers = moved_layers(towers)
    return Trained({"options": options}, Path("step-00000007"), 7, tokenizer, towers, layers)


def embeddings(layers, tensors):
    with torch.no_grad():
        for layer in layers:
            tensors = layer(tensors)
    return tensors


def sample_image(size):
    """Coarse squares of colour, (width, height) pixels."""
    coarse = np.random.default_rng(sum(size)).integers(0, 255, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def files():
    """Images of the tower's size, near it, smaller, larger, as JPEG, lying on a side, with
    transparency."""
    turned = Image.Exif()
    turned[274] = 6
    transparent = sample_image((90, 70))
    transparent.putalpha(Image.linear_gradient("L").resize((90, 70)))
    opaque = [
        encoded(sample_image(size))
        for size in ((SIZE, SIZE), (SIZE + 15, SIZE + 1), (40, 57), (333, 217))
    ]
    return [
        *opaque,
        encoded(sample_image((700, 500)), "JPEG"),
        encoded(sample_image((70, 99)), "JPEG", exif=turned),
        encoded(transparent),
    ]


def evaluated(data):
    """[3, SIZE, SIZE] as evaluate.py sees it."""
    transform = EvalTransform((SIZE, SIZE))
    return normalise(stacked([transform(transform.stored(data))]))[0]


def embed_by_pages(root, folders, sound=b"", film=b""):
    """Run the code of the README.md of each folder, of a folder below `root`, in a fresh process
    (`run_pages.py`); returns the tensors that it made in each: what the towers read, by its name,
    and their embeddings. While it runs the folders lie elsewhere, and none of their files names the
    place where they were written."""
    for folder in folders:
        text = (folder / "README.md").read_text(encoding="utf-8")
        for file in (each for each in folder.rglob("*") if each.is_file()):
            assert str(root).encode() not in file.read_bytes().replace(text.encode(), b""), file
        code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert str(root) not in "".join(code)
        (folder / "page.py").write_text("\n".join(code), encoding="utf-8")
        # of one colour, which all libraries resize to the same values
        apple = Image.new("RGB", (SIZE, SIZE), (200, 40, 30))
        (folder / "apple.jpg").write_bytes(encoded(apple))
        (folder / "apple.wav").write_bytes(sound)
        (folder / "apple.mp4").write_bytes(film)
    for i, data in enumerate(files()):
        (root / f"{i}.image").write_bytes(data)
    (root / "sound.wav").write_bytes(sound)
    moved = {folder: root / "moved" / str(i) / "model" for i, folder in enumerate(folders)}
    for folder, place in moved.items():
        place.parent.mkdir(parents=True)
        folder.rename(place)
    try:
        script = Path(__file__).with_name("run_pages.py")
        arguments = [sys.executable, script, "|".join(CAPTIONS), root, *moved.values()]
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        result = subprocess.run(
            list(map(str, arguments)),
            cwd=root,
            env={**clean, "HF_HUB_OFFLINE": "1"},
            text=True,
            capture_output=True,
            timeout=1200,
        )
        assert result.returncode == 0, result.stderr[-3000:]
    finally:
        for folder, place in moved.items():
            place.rename(folder)
        shutil.rmtree(root / "moved")
    return [torch.load(folder / "result.pt", weights_only=True) for folder in folders]


def assert_same(trained, found):
    """Check that a model makes what a page made of an export: embeddings but for rounding, and the
    scalars of the loss exactly."""
    most = trained.options["max_text_tokens"]
    tokens = batch_tokens(trained.tokenizer, CAPTIONS, most)[0]
    stages = {}
    for branch, values in (("image", "pixel_values"), ("audio", "input_features"), ("text", None)):
        if f"{branch}_embeds" in found:
            given = {values: found[values]} if values else tokens
            stages |= embeddings(trained.layers_of(branch), given)
    for name in ("image_embeds", "audio_embeds", "text_embeds"):
        if name in found:
            assert_equal_rows(found[name], stages[name])
    if "logit_scale" in found:
        assert found["logit_scale"] == stages["logit_scale"]
        assert found.get("logit_bias") == stages.get("logit_bias")
