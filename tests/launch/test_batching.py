"""From the balance block, a plan and costs to the micro-batches of a run."""

from dataclasses import replace

import numpy as np
import pytest
from batching_runs import make_batching
from cost_models import BRANCHES, proportional

from data.batching.branch_cost import BranchCost
from data.batching.buckets import Buckets
from data.batching.load_control import FeedRates
from data.batching.order import GlobalOrder
from data.batching.packing import padding_share, predicted_s
from data.options import DataOptions
from data.prepare import prepare_data
from launch.batching.planned import num_kept, text_cost, with_numbers

COSTS = proportional({"image": [1.0, 2.0], "text": [0.5, 1.5]})


@pytest.fixture(scope="module")
def data(module_folder):
    return prepare_data(DataOptions(data=("demo:en+de+es+fr+it",)), None, module_folder("run"))


def made(data, folder, layout, balance, **keys):
    stages = {"merged": 2} if layout == "merged" else {"image": 1, "text": 1}
    block = {"layout": layout, "stages": stages, "micro_batch_size": 12, "schedule": "batch_sync"}
    return make_batching(data, folder, COSTS, **block | {"balance": balance} | keys)


def numbers(batching, setting, step=0):
    found = with_numbers(setting, batching.batches, batching.plan, batching.balance, step)
    return found.num_micro_batches


def images(batching, step=0):
    """Positions of the images of the first replica's micro-batches."""
    requests = batching.batches.requests("image", 0, 1, step, step + 1)
    return [request.position for request in requests]


def texts(batching, step, number):
    """(positions of the texts of each micro-batch, lengths of all)."""
    batch, packer = batching.batches.at(step), batching.batches.texts
    (parts,) = packer.pack(batch, 1, [number])
    return parts, packer.lengths(batch)


def test_texts_are_packed_and_images_stay_in_order(data, tmp_path):
    packs = {"balance": {"strategy": "deal"}}
    for layout, keys, packed in (
        ("fork", {"balance": None}, True),  # the default
        ("fork", {"balance": {"strategy": "off"}}, False),
        ("fork", packs, True),
        ("merged", packs, True),
        # another objective, a loss for each micro-batch
        ("merged", packs | {"schedule": "per_micro_batch"}, False),
    ):
        batching = made(data, tmp_path, layout, **keys)
        assert (batching.batches.texts is not None) == packed, (layout, keys)
        assert batching.equal_shares == (not packed)
        assert np.concatenate(images(batching)).tolist() == list(range(48))
        batching.batches.buckets = Buckets(((32, 64), (64, 32)), np.arange(len(data.train)) % 2)
        assert sorted(np.concatenate(images(batching)).tolist()) == list(range(48))


def test_last_stages_know_what_the_others_bring_where_it_is_not_equal(data, tmp_path):
    """And none has to ask in a step. In a line of several stages the last does not pack all."""
    for layout, keys, known in (
        ("fork", {}, True),
        ("fork", {"balance": {"strategy": "off"}}, False),
        ("merged", {"balance": {"strategy": "deal"}, "stages": {"merged": 1}}, True),
        ("merged", {"balance": {"strategy": "deal"}}, False),
    ):
        asked = {"balance": None} | keys
        for stage in made(data, tmp_path, layout, **asked).plan.graph.stages:
            batching = made(data, tmp_path, layout, **asked, rank=stage.ranks[0])
            for step in range(2):
                spec = batching.step_spec(step, {})
                assert list(spec.shares) == (list(stage.last_of) if known else [])
                assert all(sum(own) == 48 for own in spec.shares.values())
                assert all(len(own) == stage.replicas for own in spec.shares.values())


@pytest.mark.parametrize("layout", ["fork", "merged"])
def test_packed_texts_of_the_demo_have_little_padding_and_keep_the_bounds(data, tmp_path, layout):
    batching = made(data, tmp_path, layout, {"strategy": "deal", "min_size": 5, "max_size": 30})
    number = batching.rebalancing.planned.num_micro_batches["text"]
    # A branch that is packed alone may have more micro-batches than planned; images keep theirs,
    # for batch normalisation.
    planned = batching.plan.batches["text"]
    assert number <= (48 // 5 if layout == "fork" else planned.num_micro_batches)
    parts, lengths = texts(batching, 3, number)
    assert sorted(np.concatenate(parts).tolist()) == list(range(48))
    assert min(map(len, parts)) >= 5 and max(map(len, parts)) <= 30
    in_order = [np.array_split(np.arange(48), number)]
    assert padding_share([parts], lengths) < padding_share(in_order, lengths)


def test_texts_are_cut_into_as_many_micro_batches_as_their_padding_asks_for(data, tmp_path):
    """By default, also where the plan has one: here a micro-batch costs as much as 20 tokens
    besides its tokens."""
    batching = made(data, tmp_path, "fork", None, micro_batch_size={"image": 12, "text": 48})
    cost = BranchCost(20.0, 0.0, per_token_s=1.0)
    first = replace(batching.rebalancing.planned, text_cost=cost)
    number = numbers(batching, first)
    assert batching.plan.batches["text"].num_micro_batches == 1
    assert number["image"] == 4 and 4 <= number["text"] <= 16
    seconds, padding = {n: 0.0 for n in (1, number["text"], 32)}, []
    for step in range(8):
        for n in seconds:
            parts, lengths = texts(batching, step, n)
            seconds[n] += predicted_s([parts], lengths, cost)
            padding += [padding_share([parts], lengths)] * (n == number["text"])
    assert min(seconds, key=seconds.get) == number["text"]  # neither whole nor in crumbs
    assert np.mean(padding) < 0.15
    free = replace(first, text_cost=replace(cost, fixed_s=1.0))
    # the less another one costs, the more there are
    assert number["text"] < numbers(batching, free)["text"] <= 32


def test_by_default_less_than_5_percent_of_the_demo_is_padding(tmp_path):
    data = prepare_data(DataOptions(data=("demo",)), None, tmp_path)
    batching = make_batching(data, tmp_path, COSTS, 120, layout="fork")
    number = batching.rebalancing.planned.num_micro_batches["text"]
    packed = [texts(batching, step, number) for step in range(8)]
    assert np.mean([padding_share([parts], lengths) for parts, lengths in packed]) < 0.05


def test_replicas_of_unequal_shares_have_as_many_micro_batches_as_those_of_equal_ones(
    data, tmp_path
):
    batching = made(data, tmp_path, "fork", {"strategy": "deal"})
    two = replace(batching.plan.batches["text"], replicas=2)
    batching.plan = replace(batching.plan, batches={**batching.plan.batches, "text": two})
    shares = replace(batching.rebalancing.planned, shares={"text": (0.6, 0.4)})
    number = numbers(batching, shares)["text"]
    assert number == numbers(batching, batching.rebalancing.planned)["text"]
    batch = batching.batches.at(0, replace(shares, num_micro_batches={"text": number}))
    packed = batching.batches.texts.pack(batch, 2, (number,))
    assert [len(own) for own in packed] == [number] * 2
    assert sum(map(len, packed[0])) > sum(map(len, packed[1]))


def test_branches_on_shared_stages_keep_the_planned_micro_batches(data, tmp_path):
    """Whatever another micro-batch would cost: memory and batch normalisation see their images."""
    for fixed_s in (0.0, 1.0, 1e3):
        batching = made(data, tmp_path, "merged", None, schedule="replay")  # 4 of 12 together
        cost = replace(batching.rebalancing.planned.text_cost, fixed_s=fixed_s)
        planned = {branch: own.num_micro_batches for branch, own in batching.plan.batches.items()}
        assert numbers(batching, replace(batching.rebalancing.planned, text_cost=cost)) == planned
        size = batching.plan.batches["image"].micro_batch_size
        assert all(len(part) == size for step in range(4) for part in images(batching, step))


def test_a_least_size_beyond_the_planned_one_leaves_fewer_micro_batches(data, tmp_path):
    for least in (13, 20, 24, 33, 48):
        batching = made(data, tmp_path, "merged", {"min_size": least})  # 4 of 12 were planned
        assert batching.rebalancing.planned.num_micro_batches["image"] == 48 // least, least
        sizes = [len(part) for part in images(batching)]
        assert min(sizes) >= least and sum(sizes) == 48


def test_a_micro_batch_of_one_text_holds_the_longest(data, tmp_path):
    """With a limit of tokens that some texts reach."""
    size = {"image": 12, "text": 1}
    options = ["--max-text-tokens", "10"]
    batching = made(data, tmp_path, "fork", None, micro_batch_size=size, options=options)
    assert max(texts(batching, step, 48)[1].max() for step in range(4)) == 10
    assert batching.rebalancing.planned.num_micro_batches["text"] >= 1


def test_replay_keeps_the_activations_of_as_many_samples_as_planned(data, tmp_path):
    """Micro-batches that are smaller and more than planned leave room for more of them; those of
    further captions do not."""
    keys = {"schedule": "replay", "kept_micro_batches": {"image": 1, "text": 2}}
    batching = made(data, tmp_path, "fork", None, **keys)  # 4 micro-batches of 12

    def kept(number, captions=1):
        setting = replace(
            batching.rebalancing.planned,
            num_micro_batches={"image": 4, "text": number},
            feed_rates=FeedRates(captions_per_image=captions),
        )
        return [num_kept(batching.plan, branch, setting) for branch in BRANCHES]

    assert kept(10) == [1, 5] and kept(12, captions=3) == [1, 2]
    assert kept(2) == [1, 1]  # twice as large


def test_costs_are_those_of_the_slowest_stage(data, tmp_path):
    plan = made(data, tmp_path, "merged", None).plan
    text = text_cost(plan, typical_length=16.0)
    batch = plan.batches["text"].micro_batch_size
    slowest = max(
        sum(COSTS.layers["text"][i].training_s(batch) for i in stage.layers["text"])
        for stage in plan.graph.stages
    )
    assert text.at(batch, 16) == pytest.approx(slowest)
    assert text.at(batch, 32) == pytest.approx(2 * text.at(batch, 16) - text.fixed_s)


def test_what_comes_with_epochs_comes_at_most_once_in_twenty_steps(data, tmp_path):
    """Of epochs with one step, with 25, and with numbers that do not divide 20."""
    for steps, every in ((1, 20), (25, 25)):
        batching = make_batching(data, tmp_path, COSTS, len(data.train) // steps)
        assert batching.order.steps_per_epoch == steps
        due = [step for step in range(103) if batching.is_due(step, None)]
        assert due == [*range(every, 103, every)]
        assert [step for step in range(103) if batching.is_due(step, 7)] == [*range(0, 103, 7)]
    for steps in (7, 15):  # whole epochs, however the sizes change
        size = len(data.train) // steps
        batching = make_batching(data, tmp_path, COSTS, size, earlier=((7, size + 4),))
        due = [step for step in range(1000) if batching.is_due(step, None)]
        assert len(due) > 2 and all(batching.order.ends_epoch(step) for step in due)
        assert min(np.diff(due)) >= 20


def test_the_explanation_is_of_the_packings_that_are_made(data, tmp_path):
    options = ["--explain-balance", "2"]
    batching = made(data, tmp_path, "fork", {"strategy": "deal"}, options=options)
    number = batching.rebalancing.planned.num_micro_batches["text"]
    told = batching.explain(3)
    assert told.startswith(
        "image: in order, 12 samples in every micro-batch\n"
        f"text, step 4: 48 samples, 1 replicas × {number} micro-batches"
    )
    lines = told.partition("text, step 5")[2].splitlines()
    sizes = [int(line.split()[2]) for line in lines if line.split()[:1] == ["0"]]
    assert sizes == [len(part) for part in texts(batching, 4, number)[0]] + [48]
    assert made(data, tmp_path, "merged", None).explain(0) == ""  # not asked for


def test_a_batch_that_does_not_fit_takes_as_little_more_as_goes(data, tmp_path):
    batching = made(data, tmp_path, "fork", {"strategy": "deal"})
    packer = batching.batches.texts
    batching.batches.texts = replace(packer, bounds=replace(packer.bounds, max_tokens=70))
    parts, lengths = texts(batching, 0, 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(48))
    assert 70 < max(len(p) * lengths[p].max() for p in parts) <= 1.35 * lengths.sum() / 4


# -- load control


def test_the_ladders_are_what_bounds_towers_and_data_leave(data, tmp_path):
    feed = {
        "strategy": "feed",
        "captions_per_image": [1, 40],
        "kept_patches": [0.5, 1],
        "image_size": [30, 64],
    }
    ladders = made(
        data, tmp_path, "fork", feed, schedule="replay", patch_size=8
    ).rebalancing.control
    assert ladders.captions_per_image == (1, 2, 3, 4, 5)  # there are no more
    assert ladders.kept_patches == tuple(n / 16 for n in range(8, 17))
    assert ladders.image_size == (32, 40, 48, 56, 64)
    # all activations wait for the loss: memory is a bound
    at_once = made(data, tmp_path, "fork", feed, patch_size=8).rebalancing.control
    assert 1 <= max(at_once.captions_per_image) < 5


def test_several_captions_get_micro_batches_of_their_own(data, tmp_path):
    feed = {"strategy": "feed", "captions_per_image": [1, 5]}
    batching = made(data, tmp_path, "fork", feed, schedule="replay")
    setting = replace(batching.rebalancing.planned, feed_rates=FeedRates(captions_per_image=5))
    setting = replace(setting, num_micro_batches=numbers(batching, setting, 8))
    batch, packer = batching.batches.at(8, setting), batching.batches.texts
    number = setting.num_micro_batches["text"]
    (parts,), lengths = packer.pack(batch, 1, [number]), packer.lengths(batch)
    assert sorted(np.concatenate(parts).tolist()) == list(range(48 * 5))
    # no more than was planned
    planned = batching.plan.batches["text"].micro_batch_size * 32
    assert max(len(part) * lengths[part].max() for part in parts) <= planned
    assert setting.num_micro_batches["image"] == 4


# -- weights of samples


def tokens(data, i):
    """Tokens of the longest caption, the special ones included."""
    return max(len(data.tokenizer(text)["input_ids"]) for text in data.source.captions(int(i)))


def test_the_sample_weights_block_weighs_the_samples_and_leaves_their_order(data, tmp_path):
    plain = GlobalOrder(len(data.train), 48, 0, data.parts)
    weights = {"use": "loss", "image": 0, "text": 1}
    batching = made(data, tmp_path, "fork", None, sample_weights=weights)
    assert batching.order == plain == made(data, tmp_path, "fork", None).order
    batch = batching.batches.at(5)
    expected = np.array([tokens(data, i) for i in batch.indices])
    found = batching.batches.weights_of(batch) / 1e6
    assert found == pytest.approx(expected / expected.mean(), abs=1e-6)
    assert made(data, tmp_path, "fork", None).batches.weights_of is None


def test_a_caption_weighs_by_its_tokens_in_any_script(tmp_path):
    """Chinese has a third as many characters as English for about the same tokens."""
    data = prepare_data(DataOptions(data=("demo:en", "demo:zh"), val_fraction=0.0), None, tmp_path)
    weights = {"use": "loss", "image": 0, "text": 1}
    batching = made(data, tmp_path, "fork", None, batch_size=960, sample_weights=weights)
    batch = batching.batches.at(0)
    chinese = batch.indices >= data.source_starts[1]
    found = batching.batches.weights_of(batch)
    assert 0.7 < found[chinese].mean() / found[~chinese].mean() < 1.5
    characters = data.source.column("num_characters")[batch.indices]
    assert characters[chinese].mean() < 0.5 * characters[~chinese].mean()


# -- refusals

FEED = {"strategy": "feed"}
BALANCE_REFUSALS = [
    ({"strategy": "deel"}, "did you mean 'deal'"),
    ({"strategie": "deal"}, "unknown key 'branches.balance.strategie'.* 'strategy'"),
    ({"min_size": 0}, "whole number of at least 1"),
    ({"min_size": 9, "max_size": 3}, "min_size 9 is above max_size 3"),
    ("deal", "it is an object"),
    ({"window": 4}, "branches.balance.window: .* remove the key"),
    (FEED, "needs bounds of one of captions_per_image, kept_patches"),
    (FEED | {"captions_per_image": [1, 4], "interval": 0}, "an interval of at least 1"),
    ({"captions_per_image": [1, 4]}, 'only "strategy": "feed" moves it'),
    (FEED | {"captions_per_image": [4, 1]}, r"takes \[least, most\], two whole numbers from 1"),
    (FEED | {"captions_per_image": [6, 20]}, "no image of this data has more than 5 captions"),
    (FEED | {"kept_patches": [0.5, 1]}, "has no patches to leave out"),
    (FEED | {"image_size": [32, 128]}, "goes beyond --image-size 64"),
    ({"strategy": "deal", "dead_band": 1.5}, "a number between 0 and 1"),
]


def test_a_balance_block_that_cannot_be_is_refused(data, tmp_path):
    for balance, words in BALANCE_REFUSALS:
        with pytest.raises(ValueError, match=words):
            made(data, tmp_path, "fork", balance)
    with pytest.raises(ValueError, match="different GPUs"):
        made(data, tmp_path, "merged", FEED | {"captions_per_image": [1, 4]})
