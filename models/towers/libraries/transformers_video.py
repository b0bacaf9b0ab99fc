"""Networks of clips of transformers, `hf:WHERE`: VideoMAE, TimeSformer and X-CLIP's videos, cut
into layers. They are image towers but for their `pixel_values` [C, T, 3, H, W].

C clips, T frames of each, N tokens, D width.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, XCLIPConfig, XCLIPModel
from transformers.models.timesformer.modeling_timesformer import TimesformerEmbeddings
from transformers.models.videomae.modeling_videomae import get_sinusoid_encoding_table

from models.towers.layers import Layer, Tower
from models.towers.libraries.configurations import Catalogue, Preset, initialise, saved_state
from models.towers.libraries.layers import Block, Named, Pool, Start
from models.towers.libraries.transformers_image import TIMESFORMER, ImageFamily, tower_of
from models.towers.pooling import pooling


class VideoMAEStart(Start):
    """Its positions, a plain tensor in the library's model, are a buffer here: they move to the
    layer's device once."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__("image", embeddings)
        table = embeddings.position_embeddings.to("meta")
        del embeddings.position_embeddings
        embeddings.register_buffer("position_embeddings", table, persistent=False)

    def embedded(self, given: Tensor) -> Tensor:
        return self.embeddings(given, None)


class XCLIPStart(Start):
    """Frames one behind the other, as its blocks take them: [C T, N, D]."""

    def embedded(self, given: Tensor) -> Tensor:
        return self.embeddings(given.flatten(0, 1))


class XCLIPPool(Layer):
    """`image_hidden` [C T, N, D] -> `image_features`: the class token of each frame, projected,
    goes through the library's transformer over the frames."""

    reads = drops = ("image_hidden",)
    makes = ("image_features",)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.projection = model.vision_model.post_layernorm, model.visual_projection
        self.mit, self.num_frames = model.mit, model.config.vision_config.num_frames

    def compute(self, hidden: Tensor) -> Tensor:
        of_frames = self.projection(self.norm(hidden[:, 0]))
        return self.mit(of_frames.unflatten(0, (-1, self.num_frames))).pooler_output


def _videomae(model: Any, pool: str, image_size: int) -> Named:
    blocks = [(f"encoder.layer.{i}", Block("image", b)) for i, b in enumerate(model.encoder.layer)]
    last = Pool("image", pooling(pool, model.config.hidden_size), norm=model.layernorm)
    return [("embeddings", VideoMAEStart(model.embeddings)), *blocks, ("pool", last)]


def _xclip(model: Any, pool: str, image_size: int) -> Named:
    vision = model.vision_model
    blocks = [
        (f"encoder.layers.{i}", Block("image", b)) for i, b in enumerate(vision.encoder.layers)
    ]
    start = XCLIPStart("image", vision.embeddings, vision.pre_layernorm)
    return [("embeddings", start), *blocks, ("pool", XCLIPPool(model))]


@dataclass(frozen=True, kw_only=True)
class ClipFamily(ImageFamily):
    def initialise(self, layer: Layer, model: Any) -> None:
        """Also what the library sets in constructors."""
        initialise(layer, model)
        for module in layer.modules():
            if isinstance(module, VideoMAEStart):
                table = module.embeddings.position_embeddings
                table.copy_(get_sinusoid_encoding_table(*table.shape[1:]))
            if isinstance(module, TimesformerEmbeddings) and hasattr(module, "time_embeddings"):
                nn.init.zeros_(module.time_embeddings)


class XCLIPFamily(ClipFamily):
    """What makes features of clips in the whole model, whose text tower is left out."""

    def made(self, config: PreTrainedConfig) -> Any:
        width = config.mit_hidden_size
        return XCLIPModel(XCLIPConfig(vision_config=config.to_dict(), projection_dim=width))

    def initialise(self, layer: Layer, model: Any) -> None:
        super().initialise(layer, model.vision_model)  # whose range is not the whole model's
        if isinstance(layer, XCLIPPool):
            std = layer.projection.in_features**-0.5 * model.config.initializer_factor
            nn.init.normal_(layer.projection.weight, std=std)

    def unused(self, pool: str) -> tuple[str, ...]:
        return ("text_", "prompts_", "logit_scale")

    def state(self, model: Any) -> dict[str, Tensor]:
        return {
            name.removeprefix("vision_model."): tensor
            for name, tensor in saved_state(model).items()
        }

    def width(self, config: PreTrainedConfig, pool: str) -> int:
        return config.mit_hidden_size


FAMILIES = {  # by the model_type of the configuration
    "videomae": ClipFamily("VideoMAEModel", ("avg", "max", "attention"), layers=_videomae),
    "timesformer": ClipFamily(
        "TimesformerModel", ("cls", "avg", "max", "attention"), layers=TIMESFORMER
    ),
    "xclip_vision_model": XCLIPFamily("XCLIPModel", ("mit",), layers=_xclip),
}
PRESETS = {
    "videomae-base": Preset("MCG-NJU/videomae-base", "videomae", {"use_mean_pooling": False}),
    "timesformer-base-finetuned-k400": Preset(
        "facebook/timesformer-base-finetuned-k400", "timesformer"
    ),
    "xclip-base-patch32": Preset("microsoft/xclip-base-patch32", "xclip_vision_model"),
}
ALIASES = {
    "videomae": "videomae-base",
    "timesformer": "timesformer-base-finetuned-k400",
    "xclip": "xclip-base-patch32",
}
CATALOGUE = Catalogue(
    "video", "vision_config", FAMILIES, PRESETS, ALIASES, example="MCG-NJU/videomae-base"
)


def is_video(base: str) -> bool:
    """Is what `hf:` names (without overrides) one of these? Errors: ValueError for an unknown name,
    FileNotFoundError."""
    return CATALOGUE.find(base)[0].model_type in FAMILIES


def image_tower(name: str, image_size: int, num_frames: int) -> Tower:
    """As transformers_image's, of clips of `num_frames`."""
    tower = tower_of(CATALOGUE, name, image_size, num_frames=num_frames)
    step = tower.config["config"].get("tubelet_size", 1)
    if num_frames % step:
        raise ValueError(
            f"video tower {name!r}: it reads frames by {step}, so their number must be a multiple "
            f"of that and not {num_frames}"
        )
    return tower
