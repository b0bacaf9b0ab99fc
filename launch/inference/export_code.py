"""Python code that makes the towers of an export by public libraries alone, for its README.md."""

from __future__ import annotations

from dataclasses import dataclass

from models.towers.layers import Tower
from models.towers.libraries import open_clip, torchvision


@dataclass(frozen=True)
class TowerCode:
    """`imports` and `constructor`: lines that make `image` or `text`; `strict`: whether all of its
    tensors are in the export; `features`: an expression of `pixel_values` or of `ids` and `mask`
    [B, L], behind the line `run` if there is one."""

    imports: str
    constructor: str
    features: str
    strict: bool = True
    run: str = ""


def adapted(tower: Tower) -> TowerCode | None:
    """Of a tower that an adapter made (`models/towers/libraries`); None: another kind of tower."""
    if "arguments" not in tower.config and tower.config["library"] != "open_clip":
        return None
    if tower.branch == "text":
        return _open_clip_text(tower)
    code = {"timm": _timm, "torchvision": _torchvision, "open_clip": _open_clip_image}
    return code[tower.config["library"]](tower)


def _timm(image: Tower) -> TowerCode:
    config = image.config
    pooled = config["pool"] == "attention"
    return TowerCode(
        "import timm",
        f"image = timm.create_model({config['architecture']!r}, num_classes=0"
        f"{_keywords(config['arguments'])})",
        _pooled(image, f"image{'.forward_features' if pooled else ''}(pixel_values)"),
        not config["unused"],
    )


def _torchvision(image: Tower) -> TowerCode:
    config = image.config
    parts = "".join(
        f"\nimage.set_submodule({path!r}, torch.nn.{module!r})"
        for path, module in torchvision.replaced(image).items()
    )
    return TowerCode(
        "import torchvision",
        f"image = torchvision.models.get_model({config['architecture']!r}"
        f"{_keywords(config['arguments'])}){parts}",
        _pooled(image, "image(pixel_values)"),
        not config["unused"],
    )


def _open_clip_image(image: Tower) -> TowerCode:
    config = image.config
    model = f"{config['output_dim']}, {config['config']}, {open_clip.SMALL_TEXT}"
    taken_off = {
        "visual.proj": "\nimage.proj = None",
        "visual.head.proj.weight": "\nimage.head.proj = torch.nn.Identity()",
    }
    return TowerCode(
        "import open_clip",
        f"image = open_clip.CLIP({model}, {config['quick_gelu']}).visual"
        f"{taken_off.get(config['projection'], '')}",
        _pooled(image, "image(pixel_values)"),
        not config["unused"],
    )


def _open_clip_text(text: Tower) -> TowerCode:
    config = text.config
    model = f"{config['output_dim']}, {open_clip.SMALL_IMAGE}, {config['config']}"
    taken_off = "\ntext.text_projection = None" if config["projection"] else ""
    length = config["config"]["context_length"]
    return TowerCode(
        "import open_clip",
        f"text = open_clip.CustomTextCLIP({model}, {config['quick_gelu']}).text{taken_off}",
        # it takes texts of its whole length
        f"text(torch.nn.functional.pad(ids, (0, {length} - ids.shape[1]), "
        f"value={config['config']['pad_id']}))",
        not config["unused"],
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
