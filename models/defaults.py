"""What the names of towers leave open, decided for a new run and written out, so that a run's
record says all of it.

A name by itself means the library's own model (`models/README.md`). These are the choices with
which towers learn better from the first step; what each is worth: bench/EVIDENCE.md.
"""

from pathlib import Path

from common.files import read_json
from models.towers.audio import spectrogram_tower
from models.towers.image import full_name as full_image_name
from models.towers.libraries import transformers_image
from models.towers.libraries.torchvision_by_hand import ARCHITECTURES, ResNetSizes
from models.towers.libraries.transformers_text import CATALOGUE, TextFamily
from models.towers.names import HF, join_name, split_name
from models.towers.text import LIBRARIES, OWN
from models.towers.text import full_name as full_text_name
from models.towers.video import frames_tower
from models.weights.reading import canonical_names, find_weights, open_tensors

# sentence-transformers writes it beside the weights, and names the folder of the pooling in it
SENTENCE_ENCODER = "modules.json"
POOLING_MODES = {  # of its pooling file -> ours
    "cls_token": "first",
    "cls": "first",
    "mean_tokens": "mean",
    "mean": "mean",
    "max_tokens": "max",
    "max": "max",
    "lasttoken": "last",
}


def image_name(name: str, weights: str | None) -> str:
    """`name` with its library; with `zero_init_residual=true` for a ResNet from scratch: each block
    starts as the identity (Goyal et al. 2017, section 5.1; timm's default); with `pool=cls` for a
    ViT of transformers whose weights hold no pooler."""
    name = full_image_name(name)
    base, given = split_name(name)
    if base.startswith(HF):
        _, pools, hub_id = transformers_image.CATALOGUE.of_library(base)
        if "pool" in given or pools[0] != "pooler":
            return name
        held = weights is not None and _holds(
            "image.pooler.dense.weight", find_weights("image", weights, name, hub_id)
        )
        return join_name(base, {**given, "pool": "pooler" if held else "cls"})
    if (
        weights is None
        and isinstance(ARCHITECTURES.get(base), ResNetSizes)
        and "zero_init_residual" not in given
    ):
        return join_name(base, {**given, "zero_init_residual": "true"})
    return name


def video_name(name: str, weights: str | None) -> str:
    """`name` of a video tower, as `_inner_name` completes it."""
    return _inner_name(name, frames_tower(name), weights)


def audio_name(name: str, weights: str | None) -> str:
    """`name` of an audio tower, as `_inner_name` completes it."""
    return _inner_name(name, spectrogram_tower(name), weights)


def _inner_name(name: str, image: str | None, weights: str | None) -> str:
    """With what `image_name` says of the image tower `image` inside, None: there is none, where that
    starts from weights. From scratch it is the library's own model."""
    # An image tower's defaults from scratch are not taken over. The one comparison with films has
    # residual blocks that start as the identity far behind (loss 1.9 beside 0.16 after 120 steps,
    # four blocks), and a ViT's untrained pooler tells samples apart as well as its first token does:
    # bench/EVIDENCE.md, "How the blocks of a shallow ResNet start" and "What a ViT pools by from scratch".
    if image is None or weights is None:
        return name
    base, found = split_name(image_name(image, weights))
    return join_name(base, {**split_name(name)[1], **found})


def text_name(name: str, weights: str | None) -> str:
    """`name` with its library and with `pool=`: as the weights were trained; from scratch the mean
    over the tokens. The towers of published image-text models (CLIP, SigLIP) keep their own.

    A sentence encoder says it in a file of its own; other weights were trained with the library's
    pooler if they hold one. `weights` as in `open_weights`. Errors: as there, and ValueError for a
    pooling that is not built.
    """
    name = full_text_name(name)
    base, given = split_name(name)
    if base in OWN or base.startswith(tuple(LIBRARIES)):
        return name
    family, _, hub_id = CATALOGUE.of_library(base)
    if "pool" in given or family.contrastive:
        return name
    pool = (
        "mean"
        if weights is None
        else _trained_pool(find_weights("text", weights, name, hub_id), family)
    )
    return join_name(base, {**given, "pool": pool})


def _trained_pool(path: Path, family: TextFamily) -> str:
    folder = path if path.is_dir() else path.parent
    if (folder / SENTENCE_ENCODER).is_file():
        return _pool_of_sentence_encoder(folder)
    own = family.pooled_by == "pooler" and _holds("text.pooler.dense.weight", path)
    return "pooler" if own else "mean"


def _holds(canonical: str, path: Path) -> bool:
    return canonical in canonical_names(canonical.split(".")[0], open_tensors(path))


def _pool_of_sentence_encoder(folder: Path) -> str:
    modules = read_json(folder / SENTENCE_ENCODER)
    file = next(
        (
            folder / module["path"] / "config.json"
            for module in modules
            if module["type"].endswith("Pooling")
        ),
        None,
    )
    if file is None or not file.is_file():
        raise ValueError(
            f"{folder / SENTENCE_ENCODER}: leads to no pooling; say how texts are pooled with "
            "--text-tower NAME:pool=..."
        )
    config = read_json(file)
    modes = [
        key.removeprefix("pooling_mode_")
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    # as newer versions write it
    modes = [config["pooling_mode"]] if "pooling_mode" in config else modes
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        raise ValueError(
            f"{file}: pools by {' and '.join(modes) or 'nothing'}; built are "
            f"{', '.join(POOLING_MODES)}, one at a time. Choose one with --text-tower NAME:pool=..."
        )
    return POOLING_MODES[modes[0]]
