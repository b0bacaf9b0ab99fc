"""Regions and their phrases in the micro-batches of a run: every one once, and each in its
place."""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from common.boxes import WHOLE
from data.batching.batches import Batches, TextPacker
from data.batching.branch_cost import BranchCost
from data.batching.order import GlobalOrder
from data.batching.requests import evaluation_requests
from data.batching.settings import Setting
from data.batching.shown import ShownAnnotations
from data.index.sources import open_source
from data.keys import caption_key
from data.loader import MicroBatchDataset
from data.modalities.image import ImageModality
from data.modalities.lengths import TokenCounts
from data.modalities.text import TextModality
from data.modalities.tokenizer import train_tokenizer
from data.modalities.transforms import EvalTransform, TrainTransform, Views
from data.stored.derived import REGIONS

G, SIZE = 12, (32, 32)
PAIRS = (("image", "text"), ("image", "region"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Twelve images; a third has no region, one has twenty."""
    folder = tmp_path_factory.mktemp("regions")
    lines = []
    for i in range(G):
        Image.new("RGB", (40, 60), (20 * i, 0, 0)).save(folder / f"{i}.png")
        number = 0 if i % 3 == 0 else 20 if i == 4 else i
        regions = [
            {
                "box": [k, 2 * k, 10, 12],
                "text": [f"word{i} {k}", f"other{i} {k}"],
                "negatives": [f"wrong{i} {k}"] * (k % 2),
            }
            for k in range(number)
        ]
        lines.append({"image_path": f"{i}.png", "text": f"picture {i}", "regions": regions})
    file = folder / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return open_source(f"jsonl:{file}", PAIRS, folder=folder / "index")


@pytest.fixture(scope="module")
def modalities(source, tmp_path_factory):
    words = [phrase for i in range(G) for phrase in ([f"picture {i}"] + _phrases(source, i))]
    tokenizer = train_tokenizer(iter(words), tmp_path_factory.mktemp("words") / "tokenizer")
    return ImageModality(Views(TrainTransform(SIZE), EvalTransform(SIZE))), TextModality(
        tokenizer, 16
    )


def _regions(source, i):
    return source.value("region", i) if source.numbers("num_regions", np.array([i]))[0] else []


def _phrases(source, i):
    return [p for region in _regions(source, i) for p in (*region.phrases, *region.negatives)]


def batches_of(source, packed: bool) -> Batches:
    setting = Setting(0, {"image": 2, "text": 3}, text_cost=BranchCost(0.0, 0.0, 1.0))
    texts = None
    if packed:
        counts = TokenCounts(np.full(G, 4, np.uint16), np.arange(G + 1))
        texts = TextPacker(counts, 16, seed=0, phrase_tokens=5)
    order, train = GlobalOrder(G, G, 0), np.arange(G)
    regions = ShownAnnotations(source, REGIONS, most=6, most_negatives=2)
    return Batches(order, train, [setting], texts=texts, annotations=regions)


@pytest.mark.parametrize("packed", [False, True])
def test_every_region_and_phrase_is_in_one_micro_batch_and_in_its_place(source, modalities, packed):
    batches, epochs = batches_of(source, packed), []
    for step in range(2):
        rows: dict[str, dict[int, tuple]] = {"region": {}, "phrase": {}}
        for branch, modality, replicas in (("image", modalities[0], 2), ("text", modalities[1], 3)):
            dataset = MicroBatchDataset(source, [modality])
            for replica in range(replicas):
                for request in batches.requests(branch, replica, replicas, step, step + 1):
                    loaded = dataset[request]
                    name = "region" if branch == "image" else "phrase"
                    labels = (loaded[f"{name}_{what}"].tolist() for what in ("index", "key"))
                    for place, *found in zip(loaded[f"{name}_position"].tolist(), *labels):
                        assert place not in rows[name]
                        rows[name][place] = tuple(found)
                    if name == "region":
                        shown = loaded["image_index"][loaded["region_row"]]
                        index = loaded["region_index"]
                        assert (np.where(index < 0, -1 - index, index) == shown.numpy()).all()
                        seen = loaded["region_boxes"][index >= 0]
                        assert (seen >= 0).all() and (seen <= WHOLE).all()
                        assert (seen[:, :2] < seen[:, 2:]).all()
                    else:
                        texts = len(loaded["text_index"]) + len(loaded["phrase_index"])
                        assert len(loaded["input_ids"]) == texts
        numbers = [min(6, len(_regions(source, i))) for i in range(G)]
        assert sorted(rows["region"]) == list(range(sum(numbers)))
        negatives = [min(2, sum(len(r.negatives) for r in _regions(source, i))) for i in range(G)]
        assert sorted(rows["phrase"]) == list(range(sum(numbers) + sum(negatives)))
        for place, (index, key) in rows["phrase"].items():
            own = _regions(source, index)
            good = {caption_key(p) for region in own for p in region.phrases}
            bad = {caption_key(p) for region in own for p in region.negatives}
            if place in rows["region"]:
                (region, _) = rows["region"][place]
                assert key in good and index == (region if region >= 0 else -1 - region)
            else:
                assert key in bad
        epochs.append(rows)
    other = {caption_key(r.phrases[1]) for i in range(G) for r in _regions(source, i)}
    assert other & {key for _, key in epochs[0]["phrase"].values()}
    # other regions and other phrases in the next epoch
    assert {key for _, key in epochs[0]["phrase"].values()} != {
        key for _, key in epochs[1]["phrase"].values()
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loads", [("image",), ("text",), ("image", "text")])
def test_what_each_replica_brings_is_known_without_loading_it(source, modalities, packed, loads):
    of = {"image": modalities[0], "text": modalities[1]}
    made = {"image": ("image", "region"), "text": ("text", "phrase")}
    dataset = MicroBatchDataset(source, [of[branch] for branch in loads])
    for replicas in (1, 2, 3):
        batches = replace(batches_of(source, packed), keeps_shares=True)
        for step in range(2):
            brought = {name: [] for branch in loads for name in made[branch]}
            for replica in range(replicas):
                given = replica, replicas, step, step + 1, loads
                loaded = [dataset[request] for request in batches.requests(loads[0], *given)]
                for name, own in brought.items():
                    own.append(sum(len(each[f"{name}_position"]) for each in loaded))
            with mock.patch.object(TextPacker, "pack") as packs:
                shares = batches.shares(loads[0], loads, replicas, step)
            assert shares.of_replicas == brought and not packs.called
            assert all(sum(brought[name]) == shares.made.get(name, G) for name in brought)
            other = replace(batches_of(source, packed), keeps_shares=True)
            assert other.shares(loads[0], loads, replicas, step) == shares


def test_an_evaluation_shows_the_first_regions_and_phrases_and_no_negatives(source, modalities):
    regions = ShownAnnotations(source, REGIONS, most=6, most_negatives=2)
    requests = evaluation_requests(np.arange(G), 0, 1, 5, regions)
    found = {"region": [], "phrase": []}
    for request in requests:
        for modality, name in zip(modalities, found):
            loaded = MicroBatchDataset(source, [modality])[request]
            found[name] += zip(*(loaded[f"{name}_{w}"].tolist() for w in ("position", "key")))
    numbers = [min(6, len(_regions(source, i))) for i in range(G)]
    first = [caption_key(r.phrases[0]) for i in range(G) for r in _regions(source, i)[:6]]
    assert found["phrase"] == list(enumerate(first)) and len(first) == sum(numbers)
    assert [place for place, _ in found["region"]] == list(range(sum(numbers)))


def test_a_region_of_which_the_view_shows_little_is_left_out(source, modalities):
    """The centre of a 40 × 60 image, from row 10 on, is all that an evaluation sees."""
    regions = ShownAnnotations(source, REGIONS, most=20, most_negatives=0)
    (request,) = evaluation_requests(np.array([4]), 0, 1, 1, regions)
    loaded = MicroBatchDataset(source, [modalities[0]])[request]
    # the k-th box is at rows 2 k to 2 k + 12
    expected = [(min(2 * k + 12, 50) - max(2 * k, 10)) / 12 >= 0.5 for k in range(20)]
    assert (loaded["region_index"] >= 0).tolist() == expected
    box = loaded["region_boxes"][8].numpy() / WHOLE
    assert box == pytest.approx([8 / 40, 6 / 40, 18 / 40, 18 / 40], abs=1e-4)
    upright = ImageModality(
        Views(TrainTransform((48, 32)), EvalTransform((48, 32)))
    )  # as the image is
    loaded = MicroBatchDataset(source, [upright])[request]
    shown = loaded["region_boxes"].numpy() / WHOLE
    given = [region.extent for region in _regions(source, 4)]
    assert shown == pytest.approx(np.array(given), abs=1e-4)
