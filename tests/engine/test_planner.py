"""From a configuration and a world to a plan: what is said is kept, what is "auto" is searched, and
every refusal says what to do."""

import copy
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cost_models import BRANCHES, proportional
from refusals import not_refused, refused

from engine.batch import BranchBatch
from engine.build import deepspeed_config
from engine.config.auto import filled
from engine.config.reading import BranchesBlock, check_config, read_config
from engine.planning import planner
from engine.planning.planner import RunPlan, Search, check_world, plan_run, search_plans
from engine.planning.simulator import simulate
from engine.planning.ways import Ways
from engine.schedule import SCHEDULES
from launch.config.blocks import balancing
from launch.config.hyperparameters import PRESETS

FILES = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
MINIMAL = {"train_batch_size": 48, "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}}
# images cost 4 times a text
COSTS = {"image": [1.0, 2.0, 2.0, 2.0, 1.0], "text": [0.5, 0.5, 0.5, 0.5]}


def search(
    world_size: int,
    branches: dict | None = None,
    costs=COSTS,
    memory_bytes=1e15,
    machine=None,
    **keys,
) -> Search:
    model = proportional(costs, memory_bytes, **(machine or {}))
    return search_plans(
        *check_config(copy.deepcopy(MINIMAL) | keys | {"branches": branches or {}}, BRANCHES),
        world_size,
        model,
    )


def plan(world_size: int, branches: dict | None = None, costs=COSTS, **keys) -> RunPlan:
    return plan_run(
        *check_config(copy.deepcopy(MINIMAL) | keys | {"branches": branches or {}}, BRANCHES),
        world_size,
        proportional(costs),
    )


def block(layout: str | None = None, stages=None, replicas=None, **keys) -> dict:
    """The block "branches"; two numbers are those of images and of texts."""
    given = {"layout": layout, "stages": stages, "replicas": replicas, **keys}
    return {
        key: dict(zip(BRANCHES, value)) if isinstance(value, tuple) else value
        for key, value in given.items()
        if value is not None
    }


FORK = block("fork", (1, 1))
MERGED = block("merged", {"merged": 1})


# -- refusals


REFUSALS = [
    # stages
    (4, block("fork", (6, 1)), {}, "6 image stages … 5 layers … at most 5"),
    (6, block("fork", (1, 5)), {}, "5 text stages … 4 layers … at most 4"),
    (5, block("merged", {"merged": 5}), {}, "5 merged stages … 4 layers … at most 4"),
    (2, block("fork", 6), {}, "6 image stages … 5 layers … at most 5"),
    (4, block("fork", {"merged": 2}), {}, 'branches.stages … {"image": 2, "text": 1}'),
    (4, block("fork", {"image": 2}), {}, 'branches.stages … {"image": 2, "text": 1}'),
    (4, block("merged", (2, 2)), {}, '"stages": {"merged": 2} (or "stages": 2)'),
    (3, block("merged", (2, 1)), {}, '"stages": {"merged": 1} (or'),  # 2 would not fill 3
    (1, block(None, (1, 1)), {}, "layout 'merged', the only one for one rank"),
    (1, block(None, 2), {}, "layout 'merged' needs a rank for each of its 2 stages … fewer stages"),
    (3, block("fork", (2, 2)), {}, "4 stages (image 2, text 2), but there are 3 … take fewer"),
    # replicas
    (8, block("fork", replicas=4), {}, "branches.replicas: 4 for a fork … each branch its own"),
    (8, block("fork", replicas={"image": 4}), {}, "branches.replicas … give each branch its own"),
    (8, block("fork", (1, 1), (3, 2)), {}, "image 1×3 + text 1×2 … start 5 ranks or change"),
    (7, block(None, (2, 1), (2, 2)), {}, "image 2×2 + text 1×2 … fill 6 ranks, but there are 7"),
    (
        4,
        block("merged", 1, (2, 2)),
        {},
        'branches.replicas: {"image": 2, "text": 2} … "replicas": 4',
    ),
    (5, block("merged", 2), {}, "merged of 2 … does not fill 5 ranks … use 4 … auto"),
    (5, block("fork", (2, 2)), {}, "cannot fill 5 ranks … use 4 ranks, or fewer stages"),
    (1, block("fork"), {}, "layout 'fork' needs a rank … deepspeed --num_gpus 2"),
    (1, block("fork", (1, 1), (1, 1)), {}, "layout 'fork' needs a rank … deepspeed --num_gpus 2"),
    (1, {"balance": {"strategy": "feed", "captions_per_image": [1, 2]}}, {}, "branches.balance"),
    (4, block("merged", {"merged": 1}, 3), {}, "3 replicas does not fill 4 ranks … use 3 ranks"),
    # the batch
    (
        7,
        block("fork", (1, 1), (5, 2), micro_batch_size=3),
        {},
        "to 5 image replicas … use 45 or 50",
    ),
    (
        3,
        block("fork", (1, 1), (1, 2), schedule="per_micro_batch"),
        {"train_batch_size": 7},
        "train_batch_size 7 is no multiple of 2 text replicas … use 6, or batch_sync",
    ),
    (5, FORK, {"train_batch_size": 2}, "cannot be dealt to 4 text replicas … at least 4"),
    # (1, 1) stages would not fill the ranks, (2, 2) do
    (10, block("fork", replicas=(3, 2)), {"train_batch_size": 2}, "dealt to 3 image replicas"),
    (2, block("fork", micro_batch_size=32), {}, "image: micro_batch_size 32 … use 24"),
    (2, block("fork", micro_batch_size=(16, 5)), {}, "text: micro_batch_size 5 … use 4"),
    (2, FORK, {"train_micro_batch_size_per_gpu": 10}, "image: micro_batch_size 10 … use 8"),
    (2, FORK, {"gradient_accumulation_steps": 5}, "steps 5 does not divide … use a divisor of 48"),
    (2, FORK, {"gradient_accumulation_steps": 96}, "steps 96 does not divide … use a divisor"),
    (1, block(micro_batch_size=(8, 16)), {}, 'only a fork … slice … "micro_batch_size": 8'),
    # the schedule
    (
        3,
        block("fork", (1, 1), (2, 1), schedule="per_micro_batch"),
        {},
        "all branches need the same micro-batches … image 24 × 1 × 2, text 48 × 1 × 1",
    ),
    (
        2,
        block("merged", schedule="replay", kept_micro_batches=(1, 2)),
        {},
        "kept_micro_batches … only a fork",
    ),
]


def checked(world_size: int, branches: dict, **keys) -> str | None:
    """What check_world says, which knows no towers."""
    try:
        check_world(
            *check_config(copy.deepcopy(MINIMAL) | keys | {"branches": branches}, BRANCHES),
            world_size,
            BRANCHES,
        )
    except ValueError as error:
        return str(error)


def test_one_stage_of_each_branch_cannot_be_fewer():
    class Two:
        world_size = 2

    with pytest.raises(ValueError, match='or take "layout": "merged", which runs on any number'):
        Ways._refuse_too_few(Two(), "fork", {"image": 1, "text": 1, "audio": 1})


def test_refusals_of_a_plan():
    """In the same words without towers, unless their layers are counted."""

    def given(world_size, branches, keys):
        return plan(world_size, branches, **keys)

    assert not_refused(given, REFUSALS) == []
    for world_size, branches, keys, words in REFUSALS:
        if "layers" not in words:
            with pytest.raises(ValueError) as refusal:
                plan(world_size, branches, **keys)
            assert checked(world_size, branches, **keys) == str(refusal.value), words


# -- the arithmetic of a plan


def test_one_rank_is_merged():
    decided = plan(1)
    assert decided.graph.describe() == "merged: merged 0 ×1" and decided.schedule == "batch_sync"
    assert decided.batches == dict.fromkeys(BRANCHES, BranchBatch(1, 48, 1))


def test_a_fork_divides_the_ranks_by_cost():
    def slowest(costs: dict[str, list[float]], replicas: dict[str, int]) -> float:
        return max(sum(costs[b]) / replicas[b] for b in BRANCHES)

    for world_size, image_cost in itertools.product((2, 3, 5, 8, 13, 16), (0.1, 1.0, 3.0, 12.0)):
        costs = {"image": [image_cost], "text": [1.0]}
        decided = plan(world_size, FORK, costs=costs, train_batch_size=960)
        replicas = {branch: batch.replicas for branch, batch in decided.batches.items()}
        assert decided.graph.layout == "fork"
        assert decided.graph.world_size == sum(replicas.values()) == world_size
        assert all(batch.global_batch_size == 960 for batch in decided.batches.values())
        best = min(
            slowest(costs, {"image": i, "text": world_size - i})
            for i in range(1, world_size)
            if 960 % i == 960 % (world_size - i) == 0
        )
        assert slowest(costs, replicas) <= best * 1.02, (world_size, image_cost)


def test_replicas_around_given_stages():
    decided = plan(8, {"layout": "fork", "stages": {"image": 2, "text": 1}}, train_batch_size=960)
    assert decided.graph.describe() == "fork: image 0 ×3 ─ image 1 ×3 | text 0 ×2"
    first, second, text = (next(iter(stage.layers.values())) for stage in decided.graph.stages)
    assert sorted(sum(COSTS["image"][i] for i in cut) for cut in (first, second)) == [3.0, 5.0]
    assert text == range(0, 4)


def test_a_batch_need_not_divide_evenly():
    """Five replicas of images for five times the work, whatever the batch: shares differ by one."""
    costs = {"image": [5.0], "text": [1.0]}
    even = plan(6, FORK, costs=costs, train_batch_size=40)
    assert even.graph.describe() == "fork: image 0 ×5 | text 0 ×1"
    assert even.batches["image"].is_even
    uneven = plan(6, FORK, costs=costs, train_batch_size=48)
    assert uneven.graph.describe() == "fork: image 0 ×5 | text 0 ×1"
    image = uneven.batches["image"]
    assert not image.is_even and image.global_batch_size == 48 <= image.places
    assert uneven.batches["text"].is_even and "image ≤" in uneven.describe()


def test_every_division_of_eight_ranks_is_offered_for_a_power_of_two():
    for image in (4, 5, 6, 7):
        costs = {"image": [float(image)], "text": [float(8 - image)]}
        batches = plan(8, FORK, costs=costs, train_batch_size=8192).batches
        assert [batches[branch].replicas for branch in BRANCHES] == [image, 8 - image]


def test_a_division_that_is_not_even_must_pay():
    """6 + 2 is even and as fast as 5 + 3 with these costs."""
    costs = {"image": [3.0], "text": [1.0]}
    assert plan(8, FORK, costs=costs, train_batch_size=960).batches["image"].replicas == 6


def test_replicas_fit_a_given_micro_batch_size():
    # 6+2 is faster but 960/6 = 160 is no multiple of 64; 5+3 is
    decided = plan(8, {**FORK, "micro_batch_size": 64}, train_batch_size=960)
    assert decided.graph.describe() == "fork: image 0 ×5 | text 0 ×3"


def test_lines_fill_the_world():
    batch = 960 * 7 * 11 * 13
    for length, replicas in itertools.product((2, 3, 4), (1, 2, 4)):
        decided = plan(
            length * replicas, block("merged", {"merged": length}), train_batch_size=batch
        )
        assert decided.graph.world_size == length * replicas
        assert len(decided.graph.stages) == length
        own = decided.batches["image"]
        assert own == decided.batches["text"] and own.replicas == replicas
        assert own.global_batch_size == batch


def test_one_number_of_stages_is_that_of_every_branch_or_of_the_merged_line():
    for layout, number in itertools.product(("fork", "merged"), (1, 2)):
        names = ("merged",) if layout == "merged" else BRANCHES
        short, long = (
            plan(8, {"layout": layout, "stages": stages}, train_batch_size=960)
            for stages in (number, dict.fromkeys(names, number))
        )
        assert short == long and len(short.graph.stages) == number * len(names)


def test_one_number_of_stages_holds_in_each_layout_that_auto_tries():
    found = search(8, {"stages": 2}, train_batch_size=960).ranked
    stages = {
        c.graph.layout: {
            tuple(sum(b in stage.layers for stage in c.graph.stages) for b in BRANCHES)
        }
        for c in found
    }
    assert stages == dict.fromkeys(("fork", "merged"), {(2, 2)})
    assert {len(c.graph.stages) for c in found if c.graph.layout == "merged"} == {2}


def test_one_micro_batch_size_is_that_of_both_branches_in_every_layout():
    for world_size, branches in (
        (3, {**FORK, "replicas": {"image": 2, "text": 1}}),
        (4, {"layout": "merged"}),
    ):
        batches = plan(world_size, {**branches, "micro_batch_size": 4}).batches.values()
        assert [batch.micro_batch_size for batch in batches] == [4, 4]
        assert all(batch.global_batch_size == 48 for batch in batches)


def test_micro_batches_per_branch_of_a_fork():
    branches = {**FORK, "replicas": {"image": 3, "text": 2}}
    given = plan(5, {**branches, "micro_batch_size": {"image": 8, "text": 24}}).batches
    assert given == {"image": BranchBatch(3, 8, 2), "text": BranchBatch(2, 24, 1)}
    for unsaid in ({"image": 4, "text": "auto"}, {"image": 4}):
        batches = plan(5, {**branches, "micro_batch_size": unsaid}).batches
        assert batches["image"] == BranchBatch(3, 4, 4)
        assert batches["text"].global_batch_size == 48


def test_deepspeeds_own_keys_for_micro_batches():
    assert plan(2, FORK, train_micro_batch_size_per_gpu=12).batches["text"] == BranchBatch(1, 12, 4)
    assert plan(2, FORK, gradient_accumulation_steps=3).batches["text"] == BranchBatch(1, 16, 3)
    unsaid = plan(
        2, FORK, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto"
    )
    assert unsaid.batches["text"].global_batch_size == 48


def test_a_pipeline_is_kept_busy():
    """Equal layers and no overhead: with M micro-batches S stages idle (S − 1)/(M + S − 1), so many
    are taken."""
    for depth in (2, 3, 4):
        costs = {branch: [1.0] * depth for branch in BRANCHES}
        block = {"layout": "merged", "stages": {"merged": depth}}
        batch = plan(depth, block, costs=costs, train_batch_size=960).batches["image"]
        assert (depth - 1) / (batch.num_micro_batches + depth - 1) < 0.05


def test_every_small_fork_adds_up():
    for *numbers, size in itertools.product((1, 2), (1, 2), (1, 3), (1, 2), ("auto", 1, 4)):
        stages, replicas = (dict(zip(BRANCHES, each)) for each in (numbers[:2], numbers[2:]))
        world_size = sum(stages[b] * replicas[b] for b in BRANCHES)
        block = {"stages": stages, "replicas": replicas, "micro_batch_size": size}
        decided = plan(world_size, {"layout": "fork", **block})
        assert decided.graph.world_size == world_size
        for branch, batch in decided.batches.items():
            assert batch.global_batch_size == 48 and batch.replicas == replicas[branch]
            assert decided.graph.last_stage(branch).replicas == replicas[branch]
            assert size == "auto" or batch.micro_batch_size == size


# -- the search


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_the_best_is_as_good_as_trying_everything(world_size):
    """Every graph that the block allows, written out by hand, and simulated."""
    costs = {"image": [1.0, 2.0, 2.0], "text": [0.5, 0.5]}
    machine = {
        "link_bytes_per_s": 1e6,
        "link_latency_s": 1e-3,
        "instruction_s": 1e-2,
        "gradient_s_per_parameter": 1e-6,
    }
    found = search(world_size, costs=costs, machine=machine)
    model = proportional(costs, **machine)
    explicit = []
    for i, t in itertools.product((1, 2, 3), (1, 2)):
        for r in range(1, world_size):
            if (world_size - i * r) > 0 and (world_size - i * r) % t == 0:
                explicit.append(block("fork", (i, t), (r, (world_size - i * r) // t)))
        if world_size % i == 0 and i <= 2:
            explicit.append(block("merged", {"merged": i}))
    best = float("inf")
    for branches, schedule, size in itertools.product(
        explicit, ("batch_sync", "replay"), (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
    ):
        own = {**branches, "schedule": schedule, "micro_batch_size": size}
        try:
            one = plan(world_size, own, costs=costs)
        except ValueError:
            continue
        best = min(best, simulate(one.graph, one.batches, one.schedule, model).step_s)
    assert found.ranked[0].simulation.step_s <= best * (1 + 1e-9)


def test_among_equals_a_fork_wins():
    """Images and texts cost the same: a fork is as fast as data parallel training, and each rank
    holds one tower."""
    costs = {"image": [1.0, 1.0], "text": [1.0, 1.0]}
    best = search(2, costs=costs).best
    assert best.graph.describe() == "fork: image 0 ×1 | text 0 ×1"
    merged = search(2, MERGED, costs=costs).best
    assert best.simulation.step_s <= merged.simulation.step_s * 1.02
    assert best.peak_bytes < merged.peak_bytes


def predicted(world_size, branches, step_s, peak_bytes, sizes="auto"):
    """A candidate for which the simulator has said so."""
    found = search(
        world_size, {**branches, "schedule": "batch_sync", "micro_batch_size": sizes}
    ).best
    stages = tuple(replace(stage, peak_bytes=peak_bytes) for stage in found.simulation.stages)
    return replace(found, simulation=replace(found.simulation, step_s=step_s, stages=stages))


def test_the_fastest_wins_unless_its_memory_is_nearly_full():
    limit = proportional(COSTS, memory_bytes=1000.0)
    for fork, merged, expected in (
        ((1.00, 100), (1.00, 100), "fork"),  # equal in all
        ((1.02, 100), (1.00, 50), "fork"),  # as fast as can be distinguished
        ((1.03, 100), (1.00, 800), "merged"),  # memory that fits is worth no time
        ((1.00, 800), (1.03, 100), "fork"),
        ((1.00, 910), (1.09, 100), "merged"),  # nearly full, and what is not is about as fast
        ((1.09, 100), (1.00, 910), "fork"),
        ((1.00, 910), (1.11, 100), "fork"),  # slower
        ((1.11, 50), (1.00, 990), "merged"),
        ((1.00, 950), (1.09, 920), "merged"),  # both nearly full
        ((1.05, 920), (1.00, 921), "fork"),  # memory is not known to a percent
    ):
        ways = [predicted(2, FORK, *fork), predicted(2, MERGED, *merged)]
        ranked = tuple(sorted(ways, key=lambda way: way.simulation.step_s))
        found = Search(ranked, len(ranked), 0, limit).best.graph.layout
        assert found == expected, (fork, merged)


def test_micro_batches_are_not_cut_small_for_their_memory():
    """The fewest with which a graph is at its fastest: within 2 %, which cannot be
    distinguished."""
    ways = [
        predicted(2, FORK, *figures)
        for figures in ((1.00, 100, 8), (1.01, 105, 24), (1.03, 110, 48), (1.05, 80, 2))
    ]
    best = Search(tuple(ways), len(ways), 0, proportional(COSTS)).best
    assert {batch.micro_batch_size for batch in best.batches.values()} == {24}


def test_where_everything_fits_replay_keeps_nothing_or_is_not_needed():
    """Otherwise a replay that leaves out a micro-batch or two would be taken for its memory."""
    replays = [way for way in search(2, FORK).ranked if way.schedule == "replay"]
    assert {batch.num_kept for way in replays for batch in way.batches.values()} == {0}


def test_a_layout_without_a_limit_of_memory_leaves_the_schedule_to_the_planner():
    """What a run does where the layout is given: costs are estimated, and memory is not."""
    for branches in (FORK, MERGED):
        found = search(2, branches, memory_bytes=float("inf"))
        assert found.best.schedule == "batch_sync"
        assert {way.schedule for way in found.ranked} == {"batch_sync", "replay"}


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_what_timing_every_candidate_finds(seed):
    """The fastest of each layout and schedule, and whatever is as good, is never left out for a
    bound that says too much."""
    rng = random.Random(seed)
    branches = ("image", "text", "audio")[: rng.choice((2, 2, 3))]
    layers = {b: [rng.uniform(0.1, 3) for _ in range(rng.randint(2, 5))] for b in branches}
    world_size, batch_size = rng.choice((4, 5, 6)), rng.choice((24, 48))
    memory_bytes = rng.choice((300e6, 600e6, float("inf")))
    pairs = [("image", other) for other in branches[1:]]
    model = proportional(layers, memory_bytes, pairs)
    config, block = MINIMAL | {"train_batch_size": batch_size}, BranchesBlock()
    found = search_plans(config, block, world_size, model)

    graph_of = planner._graphs_of(model)
    every: dict[tuple[str, str], dict[tuple, float]] = {}
    for split in planner.candidate_splits(config, block, world_size, model):
        graph = graph_of(split)
        for deal, schedule in split.ways:
            if SCHEDULES[schedule].recomputes:
                deal = planner._keeping(block, graph, deal, model)
            simulation = simulate(graph, deal, schedule, model)
            if max(stage.peak_bytes for stage in simulation.stages) <= memory_bytes:
                way = (graph.describe(), planner._describe(graph, deal, schedule))
                every.setdefault((split.layout, schedule), {})[way] = simulation.step_s
    of_search = {(c.graph.describe(), c.describe()): c.simulation.step_s for c in found.ranked}
    assert found.num_candidates >= len(found.ranked) > 0
    for ways in every.values():
        as_good = planner.AS_GOOD * planner.ALIKE * min(ways.values())
        for way, step_s in ways.items():
            if step_s <= as_good:
                assert of_search[way] == pytest.approx(step_s)


def test_replay_is_chosen_where_batch_sync_does_not_fit():
    roomy, tight = search(2, FORK), search(2, FORK, memory_bytes=250e6)
    assert roomy.best.schedule == "batch_sync" and tight.best.schedule == "replay"
    assert tight.best.peak_bytes <= 250e6 < roomy.best.peak_bytes and tight.num_too_large > 0
    assert "too large for the memory" in tight.why()


def test_where_replay_is_chosen_it_keeps_what_fits():
    every, tight = search(2, FORK), search(2, FORK, memory_bytes=330e6)
    best, batches = tight.best, tight.best.batches.values()
    assert best.schedule == "replay"
    assert all(0 < batch.num_kept <= batch.num_micro_batches for batch in batches)
    assert best.peak_bytes <= 330e6 < every.best.peak_bytes
    # asked for by name: as little memory as can be
    plain = search(2, {**FORK, "schedule": "replay"}, memory_bytes=330e6).best
    assert all(batch.num_kept == 0 for batch in plain.batches.values())
    assert best.simulation.step_s < plain.simulation.step_s
    assert "replay keeping image " in best.describe()


def test_kept_micro_batches_as_asked_for():
    replay = block("fork", (1, 1), micro_batch_size=(8, 24), schedule="replay")
    for kept, expected in (
        (0, [0, 0]),
        (3, [3, 2]),
        (99, [6, 2]),
        ({"image": 5}, [5, 0]),
        ({"image": "auto", "text": 1}, [6, 1]),
        ("auto", [6, 2]),
    ):
        batches = plan(2, {**replay, "kept_micro_batches": kept}).batches
        assert [batches[branch].num_kept for branch in BRANCHES] == expected, kept


def test_kept_micro_batches_are_refused_where_they_mean_nothing():
    with refused('kept_micro_batches: 1 with schedule "batch_sync" … remove the key'):
        plan(2, {**FORK, "schedule": "batch_sync", "kept_micro_batches": 1})
    wrong = [
        ({**FORK, "schedule": "replay", "kept_micro_batches": n},) for n in (-1, 1.5, True, "some")
    ]
    words = "branches.kept_micro_batches … whole number of at least 0"
    assert not_refused(lambda branches: plan(2, branches), [(*each, words) for each in wrong]) == []


def test_slow_links_keep_gradients_within_a_branch():
    """With replicas of everything each gradient crosses the slow link; in a fork of one rank per
    branch none does."""
    costs = {"image": [1e-3] * 2, "text": [1e-3] * 2}
    assert search(2, costs=costs, machine={"link_bytes_per_s": 1e7}).best.graph.layout == "fork"


def test_why_names_the_best_and_what_the_others_would_cost():
    lines = search(4).why().splitlines()
    assert lines[0].startswith("auto: ") and re.search(
        r"predicted [\d.]+ m?s a step, \d+% idle, at most [\d.]+ MiB a rank; \d+ ways", lines[1]
    )
    pattern = r"  ([\d.]+) × the time.*: (fork|merged): .*, (batch_sync|replay),"
    others = [re.match(pattern, line).groups() for line in lines[2:]]
    assert len({(layout, schedule) for _, layout, schedule in others}) == len(others) == 3
    assert all(float(times) >= 0.98 for times, _, _ in others)


def test_the_plan_tells_why_where_it_chose_and_of_another_objective():
    assert plan(4).reasons.startswith("auto: ") and plan(4, FORK).reasons == ""
    assert "another objective" in plan(2, {**FORK, "schedule": "per_micro_batch"}).reasons


def test_when_nothing_fits_it_says_by_how_much_and_what_would():
    words = "2 ranks of 95.4 MiB (test) … MiB too much … optimizer state"
    with refused(f'{words} … with "pipeline": … 1}}, more ranks, … or smaller towers'):
        search(2, memory_bytes=0.1e9)
    branches = {**FORK, "schedule": "batch_sync", "micro_batch_size": 48}
    with refused(
        'nothing fits … with "schedule": "replay", "micro_batch_size": "auto", "pipeline"'
    ):
        search(2, branches, memory_bytes=250e6)
    # which then fits
    assert search(2, {**FORK, "schedule": "replay"}, memory_bytes=250e6).best


# -- what DeepSpeed reads


def test_deepspeed_config_per_branch():
    params = {"total_num_steps": "auto", "warmup_num_steps": 20}
    keys = {
        "branches": block("fork", (1, 1), (3, 2), micro_batch_size=(8, 12)),
        "scheduler": {"type": "WarmupCosineLR", "params": params},
        "pipeline": {"activation_checkpoint_interval": 2},
    }
    written, own = check_config(MINIMAL | keys, BRANCHES)
    decided = plan_run(written, own, 5, proportional(COSTS))
    before = copy.deepcopy(written)
    image, text = (
        deepspeed_config(written, decided.batches[branch], total_num_steps=700)
        for branch in BRANCHES
    )
    assert written == before
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [image[key] for key in keys] == [48, 8, 2]
    assert [text[key] for key in keys] == [48, 12, 2]
    for resolved in (image, text):
        assert resolved["scheduler"]["params"] == {"total_num_steps": 701, "warmup_num_steps": 20}
        assert resolved["gradient_clipping"] == 0.0  # DeepSpeed's default would be 1.0
        assert resolved["pipeline"] == {"activation_checkpoint_interval": 2, "use_reentrant": False}
        assert "branches" not in resolved and resolved["optimizer"] == MINIMAL["optimizer"]


def test_zero_is_left_out_where_it_has_nothing_to_shard():
    fp16 = {"fp16": {"enabled": True}}
    for keys, most_replicas, asked, stage in (
        *(({}, 1, 1, 0), ({}, 2, 1, 1), (fp16, 1, 1, 1)),
        *(({}, 1, 2, 0), ({}, 2, 2, 2), (fp16, 1, 2, 1), ({}, 1, 0, 0)),
    ):
        zero = {"stage": asked, "reduce_bucket_size": 100}
        written = MINIMAL | {"zero_optimization": zero} | keys
        resolved = deepspeed_config(written, BranchBatch(1, 48, 1), 10, most_replicas)
        assert resolved["zero_optimization"] == {"stage": stage, "reduce_bucket_size": 100}
        assert written["zero_optimization"]["stage"] == asked


def test_zero_2_is_planned_with_whole_branches():
    """What is "auto" is searched among one stage for each branch, or for all together."""
    zero = {"zero_optimization": {"stage": 2}}
    for layout in ("auto", "fork", "merged"):
        written, own = check_config(MINIMAL | zero | {"branches": {"layout": layout}}, BRANCHES)
        found = search_plans(written, own, 4, proportional(COSTS))
        assert found.num_candidates > 1
        for candidate in found.ranked:
            assert all(stage.is_last for stage in candidate.graph.stages), candidate.describe()


# -- the files we ship


def test_every_file_runs_on_1_2_4_8_ranks():
    recipe = PRESETS["long"].values(960, 10_000, {"image": False, "text": False})
    costs = proportional({"image": [4.0, 4.0], "text": [1.0, 1.0]})
    for file in FILES:
        read, own = filled(*read_config(file, BRANCHES), recipe, BRANCHES)
        fixed, feeds = isinstance(own.replicas, dict), balancing(own).strategy == "feed"
        forks = own.layout == "fork"  # written for a fork, some for so many ranks and no others
        for world_size, layout in itertools.product(
            (8,) if fixed else (1, 2, 4, 8), ("fork",) if forks else ("auto", "fork", "merged")
        ):
            if world_size == 1 and (layout == "fork" or feeds):
                continue
            decided = plan_run(read, replace(own, layout=layout), world_size, costs)
            ranks = {rank for stage in decided.graph.stages for rank in stage.ranks}
            assert ranks == set(range(world_size)), (file.name, layout)
            for batch in decided.batches.values():
                assert batch.global_batch_size == read["train_batch_size"]
                resolved = deepspeed_config(read, batch, total_num_steps=100)
                assert "auto" not in json.dumps(resolved), (file.name, layout)


def test_communicators_of_nccl_leave_less_room():
    """Those of the world and of the embeddings."""
    less = search(2, FORK, memory_bytes=430e6, machine={"communicator_bytes": 50e6})
    same = search(2, FORK, memory_bytes=330e6)
    one, other = (
        [(each.graph, each.batches, each.peak_bytes) for each in found.ranked]
        for found in (less, same)
    )
    assert one == other
    with refused("nothing fits 2 ranks of 410.1 MiB (test, 381.5 MiB of it NCCL's)"):
        search(2, FORK, memory_bytes=430e6, machine={"communicator_bytes": 200e6})
