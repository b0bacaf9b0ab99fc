"""Gathers the metrics of a step over all ranks."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence

import torch
from deepspeed.accelerator import get_accelerator

from engine.backend.protocol import Backend
from engine.communication import Communicator
from engine.json_messages import from_all_ranks
from engine.loss.last_stage import LastStageLoss
from engine.optimizer.bad_steps import BadStep, bad_step, seen_by
from engine.optimizer.clipping import GroupedClipping
from engine.optimizer.parameter_groups import OptimizerGroups
from engine.step_metrics import RankNumbers, Slowest, StepMetrics, losses_of, losses_of_sources
from engine.streams import runs_behind
from engine.trace import OWN


class StepMeter:
    """Reads what this rank measured in a step, and adds it up with what all others did, in one sum.

    `base_lr`: of the JSON's optimizer, which the rates of `groups` are parts of; None: it has none.
    """

    def __init__(
        self,
        comm: Communicator,
        last_stage_loss: LastStageLoss,
        clipping: GroupedClipping,
        backend: Backend,
        groups: OptimizerGroups,
        base_lr: float | None,
    ):
        self.comm, self.graph, self.objective = comm, comm.graph, comm.objective
        self.last_stage_loss, self.clipping, self.backend = last_stage_loss, clipping, backend
        self.groups, self.base_lr = groups, base_lr
        self.bad_steps_in_a_row = 0
        self._sent_bytes_before = 0.0

    def begin(self, bad_steps_in_a_row: int) -> None:
        """Go on: what earlier processes sent is no next step's."""
        self._sent_bytes_before = self._sent_bytes()
        self.bad_steps_in_a_row = bad_steps_in_a_row

    def read(
        self,
        *,
        step_applied: bool,
        lr: Mapping[int | None, float],
        data_wait_s: float,
        stop_requested: bool,
        counts: Mapping[str, float],
    ) -> StepMetrics:
        """The metrics of the step that the recorder holds, the same on all ranks, which call it
        together. Each number is given by one rank, zeros by the others. `lr`: by length of warm-up.
        Raises RuntimeError where the branches had other samples."""
        recorder, rank = self.comm.recorder, self.comm.rank
        sent_bytes = self._sent_bytes()
        own = RankNumbers(
            busy_s=[recorder.busy_s()],
            own_s=[recorder.busy_s(OWN)],
            step_s=[recorder.step_s],
            ready_s=[recorder.start_of("OptimizerStep")],
            peak_bytes=[float(peak_memory_bytes(self.comm.device))],
            data_wait_s=[data_wait_s],
        )
        totals = self.comm.sum_parts(
            {
                **self.last_stage_loss.sums.reported(),
                "groups": self.clipping.reported(step_applied),
                "sums": [float(stop_requested), sent_bytes - self._sent_bytes_before],
                "counts": list(counts.values()),
                "ranks": own.between_zeros(rank, self.graph.world_size),
            }
        )
        self._sent_bytes_before = sent_bytes
        (loss,), (stopping, sent) = totals["loss"], totals["sums"]
        self._refuse_misaligned(int(totals["misaligned"][0]))
        bad = self._seen_in_bad_step(step_applied, loss)
        ranks = self._without_waits(RankNumbers.of_sum(totals["ranks"]))
        busy_s, waits_s = self._by_stage(ranks.busy_s), self._by_stage(ranks.data_wait_s)
        pairs, weights = self.objective.terms, self.last_stage_loss.weights
        scalars = [(pair, name) for pair in pairs for name in pair.loss.parameters]
        norms, coefficients, shares = (
            dict(zip(self.clipping.rules, totals["groups"][i::3])) for i in range(3)
        )
        return StepMetrics(
            loss=loss,
            scalars=dict(
                pair.reported(name, value)
                for (pair, name), value in zip(scalars, totals["scalars"], strict=True)
            ),
            grad_norm=norms,
            clip_coefficient=coefficients,
            clipped_share=shares,
            lr=lr[None],
            group_lr=self.groups.rates(lr, self.base_lr),
            step_applied=step_applied,
            skipped_steps=self.backend.num_skipped,
            bad_step=bad,
            bad_steps_in_a_row=self.bad_steps_in_a_row,
            loss_scale=self.backend.loss_scale,
            stop_requested=stopping > 0,
            idle={name: max(0.0, 1 - s / max(ranks.step_s)) for name, s in busy_s.items()},
            busy_s=busy_s,
            slowest={
                stage.name: Slowest.of(stage.ranks, ranks.own_s)
                for stage in self.graph.stages
                if stage.replicas > 1
            },
            data_wait_s={s.name: waits_s[s.name] for s in self.graph.stages if s.loads},
            sent_bytes=int(sent),
            peak_memory_bytes=int(max(ranks.peak_bytes)),
            left_out={pair.name: int(n) for pair, n in zip(pairs, totals["left_out"])},
            duplicates={pair.name: int(n) for pair, n in zip(pairs, totals["duplicates"])},
            counts=dict(zip(counts, totals["counts"])),
            sources=losses_of_sources(
                self.objective, totals["source_shares"], totals["source_samples"], weights
            ),
            losses=losses_of(self.objective, totals["losses"], weights),
            rank_memory_bytes=tuple(map(int, ranks.peak_bytes)),
            rank_busy_s=tuple(ranks.busy_s),
            rank_own_s=tuple(ranks.own_s),
            slowest_step_s=max(ranks.step_s),
        )

    def _refuse_misaligned(self, number: int) -> None:
        if number:
            raise RuntimeError(
                f"the {' and '.join(self.objective.names)} branches disagree about {number} "
                "samples of this batch; all must be given the same samples at the same positions "
                "(data order, seed and number of samples must be equal on all ranks)"
            )

    def _seen_in_bad_step(self, step_applied: bool, loss: float) -> BadStep | None:
        """What the step was made of, where its loss or a gradient was not finite; counts such steps
        in a row. All ranks call it together."""
        if step_applied:
            self.bad_steps_in_a_row = 0
            return None
        if self.backend.searches_loss_scale(loss):
            return None
        self.bad_steps_in_a_row += 1
        seen = seen_by(self.last_stage_loss.sums.given)
        return bad_step(from_all_ranks(seen), self.objective.names)

    def _without_waits(self, ranks: RankNumbers) -> RankNumbers:
        """With ZeRO-1 and in half precision DeepSpeed asks all ranks whether a gradient is not
        finite before any of them steps; the recorder sees no wait in that, since the collective is
        not ours."""
        if not self.backend.is_sharded:
            return ranks
        waited_s = [max(ranks.ready_s) - ready for ready in ranks.ready_s]
        self.comm.recorder.add_wait("OptimizerStep", waited_s[self.comm.rank])
        busy_s = [max(0.0, busy - waited) for busy, waited in zip(ranks.busy_s, waited_s)]
        return ranks._replace(busy_s=busy_s)

    def _by_stage(self, values: Sequence[float]) -> dict[str, float]:
        """The mean of the replicas of each stage; `values`: by rank."""
        return {
            stage.name: sum(values[rank] for rank in stage.ranks) / stage.replicas
            for stage in self.graph.stages
        }

    def _sent_bytes(self) -> float:
        """What this rank has sent in the run."""
        return self.comm.sent_bytes + self.backend.sent_bytes(self.backend.num_steps)


def peak_memory_bytes(device: torch.device) -> int:
    """The most this rank has held so far: tensors on its GPU; on a CPU all of the process."""
    if runs_behind(device):
        return get_accelerator().max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
