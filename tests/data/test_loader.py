"""Micro-batches: what they hold, what they never touch, and that workers change nothing."""

import numpy as np
import pytest
import torch

from data.loader import MicroBatchDataset, micro_batches, resolve_workers
from data.sampler import GlobalOrder, MicroBatchRequest, evaluation_requests, training_requests
from data.sources import open_source
from data.transforms import eval_transform, train_transform

BOTH = frozenset({"image", "text"})
ORDER = GlobalOrder(num_samples=40, global_batch_size=12, seed=1)
SUBSET = np.arange(300, 340)


def make(source, modalities=BOTH, tokenizer=None, seed=0):
    return MicroBatchDataset(source, frozenset(modalities), train_transform(16), eval_transform(16), tokenizer, 32, seed)


def request(*indices, epoch=0, training=True):
    return MicroBatchRequest(0, epoch, np.array(indices), np.arange(len(indices)), training)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


class NoPictures:
    """The demo, with pictures that must not be asked for."""

    def __init__(self, source):
        self.spec, self.captions, self.source = source.spec, source.captions, source

    def __len__(self):
        return len(self.source)

    def image(self, i):
        raise AssertionError("decoded")


class NoTexts:
    """The demo, with captions that must not be asked for."""

    def __init__(self, source):
        self.spec, self.image, self.source = source.spec, source.image, source

    def __len__(self):
        return len(self.source)

    def captions(self, i):
        raise AssertionError("read a caption")


def test_both_modalities(demo, tokenizer):
    batch = make(demo, BOTH, tokenizer)[MicroBatchRequest(3, 0, np.array([7, 900]), np.array([4, 5]), True)]
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "pixel_values": ((2, 3, 16, 16), torch.float32),
        "input_ids": ((2, 8), torch.int64),
        "attention_mask": ((2, 8), torch.int64),
        **{f"{side}_{what}": ((2,), torch.int64) for side in BOTH for what in ("position", "index")},
    }
    assert batch["image_index"].tolist() == batch["text_index"].tolist() == [7, 900]
    assert batch["image_position"].tolist() == batch["text_position"].tolist() == [4, 5]
    assert tokenizer.decode(batch["input_ids"][1], skip_special_tokens=True) == demo.captions(900)[0].lower()
    batch["image_index"][0] = 0  # belongs to the caller


def test_text_only_never_decodes(demo, tokenizer):
    dataset = MicroBatchDataset(NoPictures(demo), frozenset({"text"}), tokenizer=tokenizer, max_text_tokens=32)
    assert set(dataset[request(1, 2)]) == {"input_ids", "attention_mask", "text_position", "text_index"}
    with pytest.raises(AssertionError, match="decoded"):
        make(NoPictures(demo), BOTH, tokenizer)[request(1, 2)]


def test_image_only_never_reads_a_caption_and_needs_no_tokenizer(demo, tokenizer):
    dataset = MicroBatchDataset(NoTexts(demo), frozenset({"image"}), train_transform(16), eval_transform(16))
    assert set(dataset[request(1, 2)]) == {"pixel_values", "image_position", "image_index"}
    with pytest.raises(AssertionError, match="read a caption"):
        make(NoTexts(demo), BOTH, tokenizer)[request(1, 2)]


def test_augmentation_is_a_pure_function_of_seed_epoch_and_index(demo):
    dataset = make(demo, {"image"})
    first = dataset[request(5, 6, 7)]["pixel_values"]
    torch.manual_seed(99)
    dataset[request(50, epoch=3)]
    assert torch.equal(dataset[request(7, 5)]["pixel_values"], first[[2, 0]])  # other company, other order
    assert not torch.equal(dataset[request(5, epoch=1)]["pixel_values"][0], first[0])
    assert not torch.equal(make(demo, {"image"}, seed=1)[request(5)]["pixel_values"][0], first[0])
    assert torch.equal(make(demo, {"image"})[request(5)]["pixel_values"][0], first[0])
    evaluated = [dataset[request(5, epoch=e, training=False)]["pixel_values"] for e in (0, 1)]
    assert torch.equal(*evaluated)


def test_loading_leaves_the_model_s_random_state_alone(demo, tokenizer):
    before = torch.get_rng_state()
    list(micro_batches(make(demo, BOTH, tokenizer), [request(1, 2)]))
    assert torch.equal(torch.get_rng_state(), before)


def test_caption_is_drawn_in_training_and_the_first_in_evaluation(tokenizer):
    source = open_source("demo:en+de+es+it")
    dataset = make(source, {"text"}, tokenizer)

    def drawn(dataset, epoch, training=True):
        return dataset[request(*range(40), epoch=epoch, training=training)]["input_ids"].tolist()

    assert drawn(dataset, 0) == drawn(dataset, 0) == drawn(make(source, {"text"}, tokenizer), 0)
    assert drawn(dataset, 0) != drawn(dataset, 1)
    assert drawn(dataset, 0) != drawn(make(source, {"text"}, tokenizer, seed=1), 0)
    assert drawn(dataset, 0, training=False) == drawn(make(open_source("demo"), {"text"}, tokenizer), 0)
    choices = [dataset._caption(request(3, epoch=e), 3) for e in range(40)]
    assert set(choices) == set(source.captions(3))


def test_unequal_replicas_see_the_same_samples_at_the_same_positions(demo, tokenizer):
    def run(modality, replicas, num_micro_batches):
        dataset, seen = make(demo, {modality}, tokenizer), {}
        for replica in range(replicas):
            requests = list(training_requests(ORDER, SUBSET, replica, replicas, num_micro_batches, 2, 5))
            for asked, batch in zip(requests, micro_batches(dataset, requests)):
                for position, index in zip(batch[f"{modality}_position"].tolist(), batch[f"{modality}_index"].tolist()):
                    assert (asked.step, position) not in seen
                    seen[asked.step, position] = index
        return seen

    image, text = run("image", 3, 2), run("text", 2, 3)
    assert image == text and len(image) == 3 * 12
    assert [image[2, p] for p in range(12)] == SUBSET[ORDER.batch(2)].tolist()


def test_workers_change_nothing(demo, tokenizer):
    dataset = make(demo, BOTH, tokenizer)
    requests = [*training_requests(ORDER, SUBSET, 1, 2, 2, 0, 4), *evaluation_requests(SUBSET, 0, 1, 16)]
    here, there = (list(micro_batches(dataset, iter(requests), workers)) for workers in (0, 2))
    assert len(here) == len(there) == len(requests) == 11
    for a, b in zip(here, there):
        assert_equal(a, b)


@pytest.mark.parametrize("workers", [0, 2])
def test_error_of_a_worker_has_its_own_message(emoji_set, workers):
    file = emoji_set(6)
    (file.parent / "pictures of emoji" / "4.png").write_bytes(b"broken")
    batches = micro_batches(make(open_source(f"jsonl:{file}"), {"image"}), [request(i) for i in range(6)], workers)
    for _ in range(4):
        next(batches)
    with pytest.raises(ValueError) as error:
        next(batches)
    assert str(error.value).startswith(f"{file}:5: sample '5': cannot read the image")
    assert "Traceback" not in str(error.value)
    assert error.value.__cause__ is not None  # where it happened


def test_evaluation_without_a_share(demo):
    assert list(micro_batches(make(demo, {"image"}), evaluation_requests(SUBSET[:1], 1, 2, 4))) == []


@pytest.mark.parametrize(
    ("asked", "ranks", "cores", "gpu", "workers"),
    [
        ("auto", 2, 2, False, 0),
        ("auto", 4, 2, False, 0),
        ("auto", 2, 4, False, 1),
        ("auto", 1, 64, False, 2),
        ("auto", 1, 1, True, 1),
        ("auto", 8, 32, True, 3),
        ("auto", 1, 64, True, 8),
        (0, 8, 64, True, 0),
        (5, 8, 2, False, 5),
    ],
)
def test_resolve_workers(asked, ranks, cores, gpu, workers):
    assert resolve_workers(asked, ranks, cores, gpu) == workers


def test_refusals(demo, tokenizer):
    for asked in ("many", -1, True, 1.5):
        with pytest.raises(ValueError, match="'auto' or a whole number >= 0 is needed"):
            resolve_workers(asked, 1, 1, False)
    with pytest.raises(ValueError, match="ranks_on_node 0"):
        resolve_workers("auto", 0, 1, False)
    for modalities in ({"images"}, set()):
        with pytest.raises(ValueError, match="one or both of image, text are needed"):
            make(demo, modalities, tokenizer)
    with pytest.raises(ValueError, match="'image' needs transform_train"):
        MicroBatchDataset(demo, frozenset({"image"}))
    with pytest.raises(ValueError, match="'text' needs tokenizer"):
        MicroBatchDataset(demo, frozenset({"text"}))
    with pytest.raises(ValueError, match="seed -1"):
        make(demo, BOTH, tokenizer, seed=-1)
    for index in (-1, len(demo)):
        with pytest.raises(ValueError, match=f"asked for; demo has 0..{len(demo) - 1}"):
            make(demo, {"image"})[request(index)]
