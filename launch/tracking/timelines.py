"""Figures of the plan and of sampled steps, as `python -m launch.tools.timeline` draws them. Drawing
imports plotly, which a run without a tracker does without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.planning.planner import RunPlan

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from launch.reporting.timelines import Timeline


class Timelines:
    """Of the run that `plan` is of; sampled steps are read from `trace.json` in `folder`."""

    def __init__(self, plan: RunPlan, folder: Path):
        self.plan, self.folder = plan, folder

    def draw_plan(self) -> go.Figure:
        """One step as the simulator predicts it."""
        from launch.reporting.timelines import timeline_figure

        return timeline_figure([self._predicted()])

    def draw_step(self, step: int) -> go.Figure:
        """A sampled step below the prediction, on one time axis."""
        from launch.reporting.timelines import measured_step, timeline_figure
        from launch.tools.timeline import choose_step

        _, ranks = choose_step(self.folder / "trace.json", step)
        stages = {stage.name: list(stage.ranks) for stage in self.plan.graph.stages}
        return timeline_figure([self._predicted(), measured_step(step, stages, ranks)])

    def _predicted(self) -> Timeline:
        from launch.reporting.timelines import predicted_step

        plan = self.plan
        return predicted_step(plan.graph, plan.batches, plan.schedule, plan.costs, plan.trainable)
