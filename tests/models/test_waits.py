"""No tower makes the host wait for the device, forward or backward."""

import copy

import pytest
import torch
from device_waits import DeviceWaits
from small_towers import MAX_TOKENS, TOWERS, VOCAB
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from common.boxes import WHOLE
from models.towers.building import with_head
from models.towers.fusion import FusionSizes
from models.towers.image import image_tower
from models.towers.layers import library_models_kept
from models.towers.text import text_tower
from models.towers.video import video_tower

# FakeTensorMode refuses it, but the tensor is on the host: rows and columns of SigLIP 2's patches
READS_ON_HOST = ("siglip2",)


def counted(layers, inputs):
    """Waits of a forward and a backward, with real tensors."""
    with DeviceWaits() as waits:
        tensors = inputs
        for layer in layers:
            tensors = layer(tensors)
        made = [t for t in tensors.values() if t.requires_grad]
        torch.autograd.backward([t.float().square().sum() for t in made])
    return waits.found


def run_on_fake_gpu(specs, inputs):
    """The forward, on a GPU that FakeTensorMode makes up, where whatever waits raises. (A backward
    needs a driver.)"""
    layers = [copy.deepcopy(spec.template) for spec in specs]
    with FakeTensorMode():

        def fake(tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

        tensors = {name: fake(tensor) for name, tensor in inputs.items()}
        for layer in layers:
            tensors = layer._apply(fake).train()(tensors)
    assert {tensor.device.type for tensor in tensors.values()} == {"cuda"}


def check(tower, inputs):
    with library_models_kept():
        layers = [spec.build(seed=3).train() for spec in tower.specs]
    assert not counted(layers, inputs)
    try:
        run_on_fake_gpu(tower.specs, inputs)
    except DataDependentOutputException:
        assert any(name in tower.name for name in READS_ON_HOST)


@pytest.mark.all("every family of towers")
def test_towers_of_every_family(cases, subtests):
    for name, case in cases.items():
        with subtests.test(name):
            check(case.tower(dropout=True), case.inputs())


@pytest.mark.parametrize(
    "towers", ["resnet, max+bert, mean", "vit, attention+clip, attention", "vit, avg+bert, last"]
)
def test_pools_and_what_a_fusion_reads(towers):
    check_both(towers, FusionSizes(layers=1, width=16, heads=2, scales=1))


@pytest.mark.parametrize("towers", ["tnt+coca", "dinov3+open_clip", "swin_t+open_clip"])
def test_traced_towers(towers):
    check_both(towers)


def test_regions_and_phrases():
    boxes = torch.tensor([[0, 0, WHOLE, WHOLE], [5, 7, WHOLE // 2, WHOLE // 3]], dtype=torch.int32)
    more = {"region_boxes": boxes, "region_row": torch.tensor([2, 0])}
    for towers in ("resnet+bert", "vit+clip"):
        check_both(
            towers, images=more, texts={"phrase_position": torch.arange(3)}, annotations="region"
        )


def test_moments():
    tower = video_tower("resnet18:layers=1-1-1-1,time=transformer,time_layers=1", 32, 3)
    frames = {
        "video_frames": torch.randn(5, 3, 32, 32),
        "video_row": torch.tensor([0, 0, 0, 1, 1]),
        "video_clips": torch.tensor([3, 2]),
        "video_time": torch.tensor([0, 400, 800, 0, 400]),
        "moment_spans": torch.tensor([[350, 450], [-200, 1000]], dtype=torch.int32),
        "moment_row": torch.tensor([1, 0]),
    }
    check(with_head(tower, 8, {}, annotations="moment"), frames)


def check_both(towers, fusion=None, images=None, texts=None, annotations=None):
    image, text, size = TOWERS[towers]
    ids = torch.randint(5, VOCAB, (4, MAX_TOKENS))
    mask = (torch.arange(MAX_TOKENS) < torch.tensor([[16], [5], [9], [3]])).long()
    tower = with_head(image_tower(image, size), 8, None, fusion, annotations=annotations)
    check(tower, {"pixel_values": torch.randn(4, 3, size, size)} | (images or {}))
    tower = with_head(
        text_tower(text, VOCAB, MAX_TOKENS, 0, 2), 8, {}, fusion, annotations=annotations
    )
    check(tower, {"input_ids": ids * mask, "attention_mask": mask} | (texts or {}))


class Waiting(torch.nn.Module):
    def forward(self, tensors):
        return tensors if tensors["x"].sum() > 0 else {}


def test_a_layer_that_waits_is_found():
    found = counted([Waiting()], {"x": torch.ones(2, requires_grad=True)})
    assert sum(found.values()) == 1
    spec = type("Spec", (), {"template": Waiting()})
    with pytest.raises(DataDependentOutputException):
        run_on_fake_gpu([spec], {"x": torch.ones(2)})
