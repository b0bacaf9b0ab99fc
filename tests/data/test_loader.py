"""Micro-batches: what they hold, what they never touch, and that workers change nothing."""

import itertools
import multiprocessing
import os
import re
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from dying_source import NamesItsReaders
from number_modality import Long, Made, Numbers, calculated, parts, whole
from plain_requests import plain_requests, request_of, square_images

from data.batching.draws import AUGMENTATION, PATCHES, generator_of, patch_numbers
from data.batching.load_control import FeedRates
from data.batching.order import GlobalOrder
from data.batching.requests import MicroBatchRequest, TextRows, evaluation_requests
from data.cache import SampleCache
from data.index.sources import open_source
from data.loader import MicroBatchDataset, _lost, micro_batches, resolve_workers
from data.modalities import memory
from data.modalities.image import GREY
from data.modalities.modality import ValueModality
from data.modalities.text import TextModality
from data.modalities.transforms import TrainTransform
from data.processes import start_method

AT_ONCE = 5  # blocks of a worker: two ready, one being made, one handed out, one on its way
BOTH = frozenset({"image", "text"})
ORDER = GlobalOrder(num_samples=40, global_batch_size=12, seed=1)
SUBSET = np.arange(300, 340)


def make(source, modalities=BOTH, tokenizer=None, seed=0):
    made = []
    if "image" in modalities:
        made.append(square_images(16))
    if "text" in modalities:
        made.append(TextModality(tokenizer, 32))
    return MicroBatchDataset(source, made, seed)


def request(*samples, **more):
    return request_of(samples, **more)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def shapes(micro_batch):
    return [(name, tensor.dtype, tensor.shape) for name, tensor in micro_batch.items()]


class Without:
    """A source of which one of these must not be asked for: value, captions."""

    def __init__(self, source, what):
        self.source, self.what = source, what

    def __len__(self):
        return len(self.source)

    def __getattr__(self, name):
        if name == self.what:
            raise RuntimeError(f"asked for {name}")
        return getattr(self.source, name)


def test_both_modalities(demo, tokenizer):
    batch = make(demo, BOTH, tokenizer)[
        MicroBatchRequest(3, 0, np.array([7, 900]), np.array([4, 5]), True)
    ]
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "pixel_values": ((2, 3, 16, 16), torch.uint8),
        "input_ids": ((2, 4), torch.int64),
        "attention_mask": ((2, 4), torch.int64),
        **{
            f"{side}_{what}": ((2,), torch.int64)
            for side in BOTH
            for what in ("position", "index", "key")
        },
    }
    assert batch["image_index"].tolist() == batch["text_index"].tolist() == [7, 900]
    assert batch["image_position"].tolist() == batch["text_position"].tolist() == [4, 5]
    assert (
        tokenizer.decode(batch["input_ids"][1], skip_special_tokens=True)
        == demo.captions(900)[0].lower()
    )
    batch["image_index"][0] = 0  # belongs to the caller


def test_equal_images_and_captions_have_equal_keys(demo, tmp_path, tokenizer):
    """A line per caption, as most tables have it; a caption differs by case and spaces."""
    for i in (0, 1):
        (tmp_path / f"{i}.png").write_bytes(demo.value("image", i))
    rows = [("0.png", "a smile"), ("0.png", "a face"), ("1.png", " A  smile"), ("1.png", "a grin")]
    table = tmp_path / "captions.csv"
    table.write_text("filepath,title\n" + "".join(f"{path},{text}\n" for path, text in rows))
    batch = make(open_source(f"csv:{table}"), BOTH, tokenizer)[request(0, 1, 2, 3)]
    image, text = (batch[f"{side}_key"].tolist() for side in ("image", "text"))
    assert image[0] == image[1] != image[2] == image[3]
    assert text[0] == text[2] and len(set(text)) == 3


@pytest.mark.parametrize(
    ("branch", "names", "never"),
    [
        ("image", ["pixel_values"], "captions"),
        ("text", ["input_ids", "attention_mask"], "value"),
    ],
)
def test_a_branch_reads_its_own_modality_only(demo, tokenizer, branch, names, never):
    """And images need no tokenizer."""
    source = Without(demo, never)
    dataset = make(source, {branch}, tokenizer if branch == "text" else None)
    labels = [f"{branch}_{label}" for label in ("position", "index", "key")]
    assert set(dataset[request(1, 2)]) == {*names, *labels}
    with pytest.raises(RuntimeError, match=f"asked for {never}"):
        make(source, BOTH, tokenizer)[request(1, 2)]


def test_augmentation_is_a_pure_function_of_seed_epoch_and_index(demo):
    dataset = make(demo, {"image"})
    first = dataset[request(5, 6, 7)]["pixel_values"]
    torch.manual_seed(99)
    dataset[request(50, epoch=3)]
    # other company, other order
    assert torch.equal(dataset[request(7, 5)]["pixel_values"], first[[2, 0]])
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
    assert drawn(dataset, 0, training=False) == drawn(
        make(open_source("demo"), {"text"}, tokenizer), 0
    )
    choices = {
        tokenizer.decode(dataset[request(3, epoch=e)]["input_ids"][0], skip_special_tokens=True)
        for e in range(40)
    }
    captions = [tokenizer(text)["input_ids"] for text in source.captions(3)]
    assert choices == {tokenizer.decode(tokens, skip_special_tokens=True) for tokens in captions}


def test_workers_change_nothing(demo, tokenizer):
    """Neither micro-batches nor the list of meta batches, nor an error when it is due."""
    dataset = make(demo, BOTH, tokenizer)
    requests = [
        *plain_requests(ORDER, SUBSET, 1, 2, 2, 0, 4),
        *evaluation_requests(SUBSET, 0, 1, 16),
    ]
    found = []
    for workers in (0, 2):
        bad = request(-1 if workers else len(demo))
        batches = micro_batches(dataset, iter([requests, *requests, bad]), workers)
        found.append([next(batches) for _ in (requests, *requests)])
        with pytest.raises(ValueError) as error:
            next(batches)
        assert re.match(
            r"samples (-1..-1|3944..3944) asked for; demo has 0..3943$", str(error.value)
        )
        assert error.value.__cause__ is not None  # where it happened
    (metas, *here), (_, *there) = found
    assert len(requests) == 11
    for meta, a, b in zip(metas, here, there, strict=True):
        assert_equal(a, b)
        assert shapes(meta) == shapes(a) and meta["pixel_values"].is_meta
    assert list(map(shapes, found[1][0])) == list(map(shapes, metas))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_gives_its_place_to_another_and_is_reported(
    emoji_set, tokenizer, workers
):
    file = emoji_set(5)
    folder = file.parent / "images of emoji"
    dataset = make(open_source(f"jsonl:{file}"), BOTH, tokenizer)
    whole = dataset[request(0, 1, 2, 3)]["pixel_values"]
    (folder / "1.png").write_bytes(b"broken")
    (folder / "2.png").unlink()
    (folder / "4.png").write_bytes((folder / "4.png").read_bytes()[:-60])
    reports = []
    asked = [request(0, 1, 2, 3), request(0, 3), request(1), request(4, 2)]
    first, second, grey, none = micro_batches(dataset, asked, workers, on_load=reports.append)
    assert first["image_index"].tolist() == [0, -2, -3, 3] and first["text_index"].tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert torch.equal(first["pixel_values"][[0, 3]], whole[[0, 3]])
    assert torch.equal(first["pixel_values"][1], whole[3]) and torch.equal(
        first["pixel_values"][2], whole[3]
    )
    assert second["image_index"].tolist() == [0, 3]
    assert grey["image_index"].tolist() == [-2] and grey["pixel_values"].unique().tolist() == [GREY]
    assert none["image_index"].tolist() == [-5, -3] and torch.equal(
        none["pixel_values"][0], none["pixel_values"][1]
    )
    assert [[bad[:2] for bad in report.bad] for report in reports] == [
        [(1, "unreadable"), (2, "missing-file")],
        [],
        [(1, "unreadable")],
        [(4, "unreadable"), (2, "missing-file")],
    ]
    # where, and what
    assert reports[0].bad[0][2].startswith(f"{file}:2: the image has changed since")
    assert [report.num_decoded for report in reports] == [4, 2, 1, 2]


def test_truncated_texts_are_counted(demo, tokenizer):
    texts = [demo.captions(i)[0] for i in range(300, 340)]
    whole = [len(tokenizer(text)["input_ids"]) for text in texts]
    # each is the exact length of some text, which then does not count
    limits = sorted(set(whole))[:-1]
    assert len(limits) >= 2
    for limit in limits:
        dataset, reports = MicroBatchDataset(demo, [TextModality(tokenizer, limit)]), []
        loaded = list(
            micro_batches(dataset, evaluation_requests(SUBSET, 0, 1, 16), on_load=reports.append)
        )
        assert sum(len(micro_batch["input_ids"]) for micro_batch in loaded) == 40
        assert (
            sum(report.counts["truncated_texts"] for report in reports)
            == sum(length > limit for length in whole)
            > 0
        )


def large_images(demo, *more):
    """Micro-batches that travel in shared memory."""
    return MicroBatchDataset(demo, [square_images(96), *more])


def shared_blocks(process="self"):
    return open(f"/proc/{process}/maps").read().count("/torch_")


def test_micro_batches_that_are_kept_are_never_written_to_again(demo):
    dataset = large_images(demo)
    requests = [request(*range(n, n + 3)) for n in range(24)]
    batches = micro_batches(dataset, iter(2 * requests), 2)
    kept = [next(batches) for _ in requests]  # all 24 at once
    rows = [batch["pixel_values"][1] for batch in batches]  # a view of each is all that stays
    for asked, batch, row in zip(requests, kept, rows, strict=True):
        expected = dataset[asked]["pixel_values"]
        assert torch.equal(batch["pixel_values"], expected) and torch.equal(row, expected[1])
        assert batch["pixel_values"].is_contiguous(memory_format=torch.channels_last)


def test_workers_use_their_memory_again(demo):
    equal = [request(*range(n, n + 8)) for n in range(0, 240, 8)]
    unlike = [request(*range(n)) for n in (1, 2, 4, 16, 3, *range(17, 26))]
    places, dataset = set(), large_images(demo)
    batches = micro_batches(dataset, iter(equal + unlike), 1)
    for _ in equal:
        places.add(next(batches)["pixel_values"].data_ptr())
    assert len(places) <= AT_ONCE  # not 30
    for asked in unlike:
        assert torch.equal(next(batches)["pixel_values"], dataset[asked]["pixel_values"])
        assert shared_blocks() <= AT_ONCE  # larger and larger ones, and none of the smaller
    assert list(batches) == [] and not memory._received


def test_modalities_of_one_s_own_may_do_anything_with_shared_memory(demo):
    own = [Numbers(), Long(), *map(Made, (whole, calculated, parts))]
    dataset = large_images(demo, *own)
    asked = [request(*range(n, n + 8)) for n in range(0, 240, 8)]
    others = multiprocessing.active_children()
    batches = micro_batches(dataset, (x for each in asked for x in ([each], each)), 1)
    for each in asked:
        next(batches)  # the meta batch, for which some of them make all of it
        assert_equal(next(batches), dataset[each])
    (worker,) = [each for each in multiprocessing.active_children() if each not in others]
    assert shared_blocks(worker.pid) <= AT_ONCE * (1 + len(own))  # not one more for each request
    assert dataset[request(3, 1)]["numbers"].tolist() == [[3.0], [1.0]]


def test_killed_workers_are_one_clear_error(demo, tmp_path):
    dataset = make(NamesItsReaders(demo, tmp_path / "pids"), {"image"})
    batches = micro_batches(
        dataset, (request(n % 3000) for n in itertools.count()), 2, name="rank 3"
    )
    for _ in range(6):
        next(batches)
    killed = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    assert len(killed) == 2 and os.getpid() not in killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChildProcessError) as error:
        for _ in range(100):
            next(batches)
    message = str(error.value)
    assert (
        message.startswith("the loader of rank 3 lost worker")
        and "SIGKILL" in message
        and "memory" in message
        and "--workers" in message
    )
    assert any(str(pid) in message for pid in killed)
    of_its_own = start_method().Process(target=os._exit, args=(1,))
    of_its_own.start()
    message = _lost([of_its_own], "")
    assert "its own exit with status 1" in message and "memory" not in message


@pytest.mark.parametrize("workers", [0, 1])
def test_cached_images_are_equal_bit_for_bit(emoji_set, tmp_path, workers):
    file = emoji_set(12)
    source = open_source(f"jsonl:{file}")
    asked = [request(*range(12), epoch=e) for e in (0, 1)] + [request(*range(12), training=False)]
    expected = [make(source, {"image"})[each] for each in asked]
    keys = [TrainTransform((16, 16)).stored.key(source.content_hash("image", i)) for i in range(12)]
    for _ in range(2):  # filling, then filled
        cached, cache = make(source, {"image"}), SampleCache(tmp_path / "cache")
        cached.modalities[0].cache = cache
        for a, b in zip(expected, micro_batches(cached, asked, workers), strict=True):
            assert_equal(a, b)
        cache.close()  # as a worker does when it ends
        assert all(map(cache.has, keys))
        cache.close()


def test_a_file_that_has_changed_is_not_cached_under_its_old_hash(emoji_set, tmp_path):
    file = emoji_set(3)
    dataset = make(open_source(f"jsonl:{file}"), {"image"})
    cache = dataset.modalities[0].cache = SampleCache(tmp_path / "cache")
    folder = file.parent / "images of emoji"
    (folder / "0.png").write_bytes((folder / "1.png").read_bytes())
    assert dataset[request(0, 1)]["image_index"].tolist() == [-1, 1]
    cache.close()
    stored = TrainTransform((16, 16)).stored
    assert [cache.has(stored.key(dataset.source.content_hash("image", i))) for i in (0, 1)] == [
        False,
        True,
    ]
    cache.close()


def test_resolve_workers():
    for asked, ranks, cores, gpu, workers in (
        ("auto", 2, 2, False, 0),
        ("auto", 4, 2, False, 0),
        ("auto", 2, 4, False, 1),
        ("auto", 1, 64, False, 2),
        ("auto", 1, 1, True, 1),
        ("auto", 8, 32, True, 3),
        ("auto", 1, 64, True, 16),
        (0, 8, 64, True, 0),
        (5, 8, 2, False, 5),
    ):
        assert resolve_workers(asked, ranks, cores, gpu) == workers, (asked, ranks, cores, gpu)


def test_the_size_of_a_request_is_that_of_its_images(demo, tokenizer):
    """A bucket shrinks with the image size."""
    dataset = make(demo, BOTH, tokenizer)
    plain, wide = request(3, 8), request(3, 8, size=(32, 64))
    assert dataset[wide]["pixel_values"].shape == (2, 3, 32, 64)
    assert dataset[plain]["pixel_values"].shape == (2, 3, 16, 16)
    assert torch.equal(dataset[wide]["input_ids"], dataset[plain]["input_ids"])
    images = MicroBatchDataset(demo, [square_images(64, side_multiple=16)])
    asked = request(3, 8, size=(48, 96), feed_rates=FeedRates(image_size=32))
    assert images[asked]["pixel_values"].shape == (2, 3, 32, 48)


# -- feed rates


def test_several_captions_of_a_sample_are_different_ones_while_it_has_them(tokenizer):
    source = open_source("demo:en+de+es+it")
    dataset = make(source, {"text"}, tokenizer)

    def shown(c, of_texts=False):
        rows = TextRows(np.repeat([7, 9], c), np.arange(2 * c), None)
        packed = rows if of_texts else None
        own, rates = () if of_texts else (7, 9), FeedRates(captions_per_image=c)
        loaded = dataset[request_of(own, 3, feed_rates=rates, packed_texts=packed)]
        assert loaded["text_position"].tolist() == list(range(2 * c))
        assert loaded["text_index"].tolist() == [7] * c + [9] * c
        return [tuple(row[row != 0].tolist()) for row in loaded["input_ids"]]

    first, four, six = shown(1), shown(4), shown(6)
    assert (four[0], four[4]) == (first[0], first[1])
    assert len(set(four[:4])) == len(set(four[4:])) == 4
    assert six[:6] == [*four[:4], *four[:2]]  # then from the beginning
    assert shown(4, of_texts=True) == four


def test_kept_patches_are_a_share_of_the_grid_drawn_for_each_sample_and_epoch(demo):
    dataset = MicroBatchDataset(demo, [square_images(32, side_multiple=8, patch_size=8)])

    def kept(share, epoch, size=0, training=True):
        rates = FeedRates(kept_patches=share, image_size=size)
        return dataset[request_of(range(5), epoch, training, feed_rates=rates)]

    drawn = kept(0.5, 1)["kept_patches"]
    assert drawn.shape == (5, 8) and drawn.min() >= 0 and drawn.max() <= 15
    assert (drawn.diff(dim=1) > 0).all() and not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn, kept(0.5, 1)["kept_patches"])
    assert not torch.equal(drawn, kept(0.5, 2)["kept_patches"])
    assert "kept_patches" not in kept(1.0, 1)
    smaller = kept(0.5, 1, size=24)  # of 9
    assert smaller["pixel_values"].shape == (5, 3, 24, 24)
    assert smaller["kept_patches"].shape == (5, 4)
    assert kept(0.5, 1, size=24, training=False)["pixel_values"].shape == (5, 3, 32, 32)


def test_the_first_view_draws_as_runs_do_that_know_no_views():
    """Else a run that goes on would see other crops."""
    as_before = np.random.default_rng([3, 5, 7, AUGMENTATION]).random(4)
    assert (generator_of(3, 5, 7, AUGMENTATION).random(4) == as_before).all()
    assert (generator_of(3, 5, 7, AUGMENTATION, 1).random(4) != as_before).any()
    kept = np.random.default_rng([3, 5, 7, PATCHES]).permutation(16)[:4]
    assert patch_numbers(3, 5, 7, 16, 4).tolist() == sorted(kept.tolist())


def test_views_of_an_image_are_drawn_each_by_itself_and_the_first_as_if_alone(demo):
    dataset = MicroBatchDataset(demo, [square_images(32, side_multiple=8, patch_size=8)])
    weight = np.array([5, 6])

    def loaded(c, **more):
        rates = FeedRates(views_per_image=c, kept_patches=0.5)
        return dataset[request_of((7, 9), 3, feed_rates=rates, weight=weight, **more)]

    one, three = loaded(1), loaded(3)
    assert three["image_position"].tolist() == list(range(6))
    assert three["image_index"].tolist() == [7] * 3 + [9] * 3
    assert three["image_weight"].tolist() == [5] * 3 + [6] * 3
    assert three["image_key"].tolist() == one["image_key"].repeat_interleave(3).tolist()
    for name in ("pixel_values", "kept_patches"):
        assert torch.equal(three[name][::3], one[name])
        different = {tuple(row.flatten().tolist()) for row in three[name]}
        assert len(different) == 6, name
    assert loaded(3, training=False)["pixel_values"].shape[0] == 2


# -- meta batches


class Tones(ValueModality):
    """A value of equal shape for every sample; reading one is an error here."""

    name = "tone"

    def encode(self, value, generator):
        raise AssertionError("read")

    def blank(self):
        return {"samples": torch.zeros(7, 2), "rate": torch.tensor(8_000)}


ASKED = request(3, 8, 5)
THREE = np.array([1, 2, 3])
ASKED_FOR = {
    "plain": {},
    "evaluation": {"training": False},
    "bucket": {"size": (32, 64)},
    "smaller bucket": {"size": (32, 64), "feed_rates": FeedRates(image_size=24)},
    "patches": {"feed_rates": FeedRates(kept_patches=0.5)},
    "captions": {"feed_rates": FeedRates(captions_per_image=3)},
    "views": {"feed_rates": FeedRates(views_per_image=2, kept_patches=0.5), "weight": THREE},
    "weights": {"weight": THREE},
    "packed texts": {"packed_texts": TextRows(np.array([8, 9]), THREE[:2], THREE[1:])},
    "captions with weights": {"feed_rates": FeedRates(captions_per_image=2), "weight": THREE},
}


def test_a_meta_batch_has_the_shapes_of_the_micro_batch_and_no_image_is_read_for_it(
    demo, tokenizer
):
    images = square_images(32, side_multiple=8, patch_size=8)
    modalities = [images, TextModality(tokenizer, 32, length_multiple=4)]
    for name, more in ASKED_FOR.items():
        asked = replace(ASKED, **more)
        meta = MicroBatchDataset(Without(demo, "value"), modalities).meta_batch(asked)
        assert shapes(meta) == shapes(MicroBatchDataset(demo, modalities)[asked]), name
        assert {tensor.device.type for tensor in meta.values()} == {"meta"}, name


def test_the_meta_batch_of_values_is_that_of_a_blank_one(demo):
    meta = MicroBatchDataset(demo, [Tones()]).meta_batch(ASKED)
    assert shapes(meta) == [
        ("samples", torch.float32, (3, 7, 2)),
        ("rate", torch.int64, (3,)),
        ("tone_position", torch.int64, (3,)),
        ("tone_index", torch.int64, (3,)),
        ("tone_key", torch.int64, (3,)),
    ]
