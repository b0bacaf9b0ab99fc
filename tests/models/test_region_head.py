"""Features of regions are torchvision's RoIAlign on the library's own maps; of a CNN to the last
bit."""

import pytest
import torch
import torchvision
from rounding import assert_equal_rows
from torchvision.ops import roi_align

from common.boxes import WHOLE
from models.towers.building import meta_inputs, with_head
from models.towers.image import image_tower
from models.towers.regions import PooledRegions, region_features

SIZE, VIT = 64, "patch_size=8,num_layers=2,hidden_dim=32,num_heads=2,mlp_dim=64"
# in 64ths, which all scales of a map hold exactly: x1, y1, x2, y2, the last two over the whole image
BOXES = torch.tensor(
    [[4, 8, 40, 60], [0, 0, 8, 8], [50, 3, 64, 33], [0, 0, 64, 64], [0, 0, 64, 64]]
)
ROW = torch.tensor([1, 0, 2, 0, 2])


@pytest.mark.parametrize(
    ("name", "maps"),
    [("resnet18", ("layer3", "layer4")), (f"vit_b_32:{VIT}", ("encoder.layers",))],
)
def test_features_are_those_of_torchvision(name, maps):
    tower = with_head(image_tower(name, SIZE), 8, annotations="region")
    layers = [spec.build(0).eval() for spec in tower.specs]
    if name == "resnet18":
        library = torchvision.models.resnet18(weights=None)
    else:
        sizes = {key: int(value) for key, value in (each.split("=") for each in VIT.split(","))}
        library = torchvision.models.VisionTransformer(image_size=SIZE, **sizes)
    state = {n: t for each in layers[:-1] for n, t in _named(each)}
    missing = library.load_state_dict(state, strict=False).missing_keys
    assert all(key.startswith(("fc.", "heads.")) for key in missing), missing
    found = {}
    for path in maps:
        module = library.get_submodule(path)
        module.register_forward_hook(lambda _, given, out, path=path: found.update({path: out}))
    pixels = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    boxes = (BOXES * (WHOLE // 64)).to(torch.int32)
    tensors = {"pixel_values": pixels, "region_boxes": boxes, "region_row": ROW}
    with torch.no_grad():
        library.eval()(pixels)
        for layer in layers[:-1]:
            tensors = layer(tensors)
    expected, features = [], []
    for number, path in enumerate(maps):
        of_library = found[path]
        if of_library.dim() == 3:  # tokens behind the class token
            side = int((of_library.shape[1] - 1) ** 0.5)
            of_library = of_library[:, 1:].transpose(1, 2).unflatten(2, (side, side))
        rois = torch.cat([ROW[:, None].float(), BOXES * (SIZE / 64)], 1)
        scale = of_library.shape[-1] / SIZE
        aligned = roi_align(of_library, rois, 1, spatial_scale=scale, aligned=True)
        expected.append(aligned.flatten(1))
        features.append(region_features(tensors[f"image_map_{number}"], boxes, ROW).flatten(1))
    # torchvision's attention adds up in another order
    tolerance = 0.0 if name == "resnet18" else 1e-5
    torch.testing.assert_close(features, expected, rtol=tolerance, atol=tolerance)
    embeds = layers[-1](tensors)["region_embeds"]
    assert embeds.shape == (5, 8) and torch.allclose(embeds.norm(dim=1), torch.ones(5))
    assert not torch.allclose(embeds[3], embeds[4])  # the same box of two images


@pytest.mark.parametrize(
    ("name", "of_patches"),
    [("resnet18", True), ("convnext_tiny", True), (f"vit_b_32:{VIT}", False)],
)
def test_a_region_without_a_head_passes_the_layers_behind_the_last_map(name, of_patches):
    """So one of the whole image has the image's embedding, or, where a token before the patches
    stands for the image, that of their mean. The same box is another in another image."""
    tower = with_head(image_tower(name, SIZE), 8)
    layers = [spec.build(0).eval() for spec in tower.specs]
    pooled = PooledRegions(tower, meta_inputs(tower, 2)["pixel_values"])
    pixels = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    images = {"pixel_values": pixels}
    boxes = (BOXES * (WHOLE // 64)).to(torch.int32)
    with torch.no_grad():
        for layer in layers[: pooled.num_before]:
            images = layer(images)
        hidden = images["image_hidden"]
        regions = images | {"image_hidden": pooled.hidden(hidden, boxes, ROW)}
        expected = images
        if not of_patches:
            mean = hidden[:, 1:].mean(1, keepdim=True)
            expected = images | {"image_hidden": torch.cat([mean, hidden[:, 1:]], 1)}
        for layer in layers[pooled.num_before :]:
            expected, regions = layer(expected), layer(regions)
    found = regions["image_embeds"]
    assert_equal_rows(found[3:], expected["image_embeds"][[0, 2]])
    assert (found[:3] - expected["image_embeds"][ROW[:3]]).norm(dim=1).min() > 1e-3


def _named(layer):
    canonical = layer.canonical_names
    return ((canonical[n].removeprefix("image."), t) for n, t in layer.state_dict().items())
