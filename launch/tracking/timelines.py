"""Pictures of the plan and of sampled steps, as `python -m launch.tools.timeline` draws them.
Drawing imports matplotlib, which a run without a tracker does without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.optimizer.locking import lock_costs
from engine.planning.planner import RunPlan, describe_schedule
from engine.planning.simulator import simulate

if TYPE_CHECKING:
    from launch.tools.drawing import Timeline


class Timelines:
    """Of the run that `plan` is of; sampled steps are read from `trace.json` in `folder`."""

    def __init__(self, plan: RunPlan, folder: Path):
        self.plan, self.folder = plan, folder

    def draw_plan(self, file: Path) -> str:
        """One step as the simulator predicts it. Returns the line below the picture."""
        from launch.tools.drawing import save_comparison_png

        predicted = self._predicted()
        save_comparison_png(file, None, predicted)
        return self.plan.describe()

    def draw_step(self, step: int, file: Path) -> str:
        """A sampled step below the prediction, on one time axis. Returns the line below it."""
        from launch.tools.drawing import Timeline, save_comparison_png
        from launch.tools.timeline import choose_step, measured_tracks

        _, ranks = choose_step(self.folder / "trace.json", step)
        stages = {stage.name: list(stage.ranks) for stage in self.plan.graph.stages}
        end_s = max(span.end_s for spans in ranks.values() for span in spans)
        tracks = measured_tracks(stages, ranks)
        measured = Timeline(f"Measured: step {step}", tracks, end_s)
        save_comparison_png(file, self._predicted(), measured)
        return f"step {step}"

    def _predicted(self) -> Timeline:
        from launch.tools.drawing import predicted_timeline, shape

        plan = self.plan
        schedule = describe_schedule(plan.schedule, plan.batches)
        title = f"Predicted: {shape(plan.graph)}, {schedule}, {plan.costs.machine.name}"
        costs = lock_costs(plan.costs, plan.trainable)
        simulation = simulate(plan.graph, plan.batches, plan.schedule, costs, timeline=True)
        return predicted_timeline(title, plan.graph, simulation)
