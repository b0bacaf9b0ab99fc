"""The batching of a run, without its processes."""

from cost_models import BRANCHES

from engine.config.reading import check_config
from engine.planning.planner import plan_run
from engine.trace import Span
from launch.batching.batching import Batching, order_of_run
from launch.config.options import parse_options


def make_batching(
    data,
    folder,
    costs,
    batch_size=48,
    options=(),
    patch_size=None,
    earlier=(),
    rank=0,
    workers=1,
    **block,
) -> Batching:
    """Of one of two ranks. `earlier`: sizes that global batches had before."""
    config, block = check_config(
        {"train_batch_size": batch_size, "optimizer": {"type": "AdamW"}, "branches": block},
        BRANCHES,
    )
    asked = parse_options(["--epochs", "1", *options])
    order, total_steps = order_of_run(data, asked, batch_size, {"batch_sizes": earlier})
    return Batching(
        plan_run(config, block, 2, costs),
        rank,
        workers,
        data=data,
        order=order,
        total_steps=total_steps,
        options=asked,
        block=block,
        patch_size=patch_size,
        folder=folder,
    )


class Ranks:
    """The first ranks of all stages of a run, each with its own batching; times and losses are made
    up by `measured(step)`: seconds of each micro-batch by stage, and the losses by data set."""

    def __init__(self, make, measured, workers=1, traced=True):
        """`make(rank=, workers=)`: a batching. `traced`: they see the seconds of single
        micro-batches."""
        stages = make().plan.graph.stages
        self.ranks = [make(rank=stage.ranks[0], workers=workers) for stage in stages]
        self.names = [stage.name for stage in stages]
        self.measured, self.traced, self.records = measured, traced, []

    @property
    def first(self) -> Batching:
        return self.ranks[0]

    def run(self, start, stop):
        for step in range(start, stop):
            seconds, sources = self.measured(self.first, step)
            busy_s = {name: float(sum(own)) for name, own in seconds.items()}
            due = []
            for batching, name in zip(self.ranks, self.names):
                own = seconds[name] if self.traced else ()
                spans = [Span("ForwardPass", m, 0.0, s) for m, s in enumerate(own)]
                due.append(batching.rebalancing.note(step + 1, busy_s, spans, sources))
            assert len(set(due)) == 1
            if due[0]:
                reports = [batching.rebalancing.report() for batching in self.ranks]
                decided = self.first.rebalancing.decide(step + 1, reports)
                self.records.append([rank.rebalancing.take_over(decided) for rank in self.ranks][0])

    def load(self, state, step):
        for batching in self.ranks:
            batching.load_state_dict(state, step)

    def settings(self):
        records = [
            [setting.record() for setting in batching.batches.settings] for batching in self.ranks
        ]
        assert all(other == records[0] for other in records)
        return records[0]

    def loaded(self, branch, step):
        """(samples, positions, feed rates) of each micro-batch that the first replica of a branch
        loads in a step."""
        batches = self.first.batches
        return [
            (*(rows.tolist() for rows in self._rows(request, branch)), request.feed_rates)
            for request in batches.requests(branch, 0, 1, step, step + 1)
        ]

    @staticmethod
    def _rows(request, branch):
        rows = request.texts() if branch == "text" else request
        return rows.index, rows.position
