"""Python code that makes the towers of an export by public libraries alone, for its README.md."""

from __future__ import annotations

from dataclasses import dataclass

from models.towers.layers import Tower
from models.towers.libraries import open_clip, torchvision


@dataclass(frozen=True)
class TowerCode:
    """`imports` and `constructor`: lines that make `image` or `text`, with its weights; `features`:
    an expression of `pixel_values` or of `ids` [B, L]."""

    imports: str
    constructor: str
    features: str


def adapted(tower: Tower) -> TowerCode | None:
    """Of a tower that an adapter made (`models/towers/libraries`); None: another kind of tower."""
    if "arguments" not in tower.config and tower.config["library"] != "open_clip":
        return None
    makers = {"timm": _timm, "torchvision": _torchvision, "open_clip": _open_clip_image}
    make = _open_clip_text if tower.branch == "text" else makers[tower.config["library"]]
    imports, constructor, features = make(tower)
    strict = ", strict=False" if tower.config["unused"] else ""  # without what a tower does not use
    weights = f'{tower.branch}.load_state_dict(of("{tower.branch}."){strict})'
    return TowerCode(imports, f"{constructor}\n{weights}", features)


def _timm(image: Tower) -> tuple[str, str, str]:
    config = image.config
    pooled = config["pool"] == "attention"
    return (
        "import timm",
        f"image = timm.create_model({config['architecture']!r}, num_classes=0"
        f"{_keywords(config['arguments'])})",
        _pooled(image, f"image{'.forward_features' if pooled else ''}(pixel_values)"),
    )


def _torchvision(image: Tower) -> tuple[str, str, str]:
    config = image.config
    parts = "".join(
        f"\nimage.set_submodule({path!r}, torch.nn.{module!r})"
        for path, module in torchvision.replaced(image).items()
    )
    return (
        "import torchvision",
        f"image = torchvision.models.get_model({config['architecture']!r}"
        f"{_keywords(config['arguments'])}){parts}",
        _pooled(image, "image(pixel_values)"),
    )


def _open_clip_image(image: Tower) -> tuple[str, str, str]:
    config = image.config
    model = f"{config['output_dim']}, {config['config']}, {open_clip.SMALL_TEXT}"
    taken_off = {
        "visual.proj": "\nimage.proj = None",
        "visual.head.proj.weight": "\nimage.head.proj = torch.nn.Identity()",
    }
    return (
        "import open_clip",
        f"image = open_clip.CLIP({model}, {config['quick_gelu']}).visual"
        f"{taken_off.get(config['library_projection'], '')}",
        _pooled(image, "image(pixel_values)"),
    )


def _open_clip_text(text: Tower) -> tuple[str, str, str]:
    config = text.config
    model = f"{config['output_dim']}, {open_clip.SMALL_IMAGE}, {config['config']}"
    taken_off = "\ntext.text_projection = None" if config["library_projection"] else ""
    length = config["config"]["context_length"]
    return (
        "import open_clip",
        f"text = open_clip.CustomTextCLIP({model}, {config['quick_gelu']}).text{taken_off}",
        # it takes texts of its whole length, and may read what they are padded with
        f"text(torch.nn.functional.pad(ids.masked_fill(mask == 0, {config['config']['pad_id']}), "
        f"(0, {length} - ids.shape[1]), value={config['config']['pad_id']}))",
    )


def _keywords(arguments: dict[str, object]) -> str:
    return "".join(f", {key}={value!r}" for key, value in arguments.items())


def _pooled(image: Tower, features: str) -> str:
    added = image.config["added_pool"]
    if added is None:
        return features
    tokens = f"{features}.movedim({added['channels']}, -1).flatten(1, -2)"
    ends = {"avg": f"{tokens}.mean(1)", "max": f"{tokens}.amax(1)"}
    return ends.get(added["pool"], f"image_pool({tokens})")
