"""This program on one GPU, for bench/gpu.py: the engine as train.py builds it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import open_clip
import torch
from torch import Tensor

from bench.on_gpu.jobs import CONFIG, NUM_TOKENS, Job, write_tiny
from bench.on_gpu.profile import waits_by_line
from bench.on_gpu.timing import (
    Device,
    Note,
    example,
    filled,
    largest_foretold,
    measured_steps,
    sizes_of,
)
from bench.towers import BRANCHES, laid_over
from data.modalities.preprocessing import CLIP
from data.modalities.transforms import normalise
from engine.build import build_engine
from engine.config.auto import filled as with_values
from engine.config.reading import read_config
from engine.executor import ForkEngine
from engine.planning.costs import CostModel, configured
from engine.planning.devices import DEVICES
from engine.planning.planner import RunPlan, plan_run
from engine.planning.profile import profile_together
from engine.processes.start import start_processes
from launch.config.hyperparameters import PRESETS
from launch.inputs import from_bytes
from launch.objective import objective_of, pairs_of
from launch.setup.estimates import estimated_costs
from models.losses import InfoNCE
from models.towers.building import build_towers
from models.towers.layers import library_models_kept


class Trained:
    """What train.py makes of a job before its loop, up to the engine."""

    def __init__(self, job: Job, device: Device) -> None:
        if job.tiny:
            write_tiny(Path(job.tower), open_clip.get_model_config(job.model))
        self.job, self.device = job, device
        self.batch = job.batch or 4 * job.probes[1]
        self.micro_batch = job.micro_batch or self.batch
        self.image_size, self.vocab_size = sizes_of(job)
        self.processes = start_processes()
        changes = {
            "train_batch_size": self.batch,
            "branches": {
                "layout": "merged",
                "stages": {"merged": 1},
                "replicas": 1,
                "micro_batch_size": self.micro_batch,
                "schedule": "replay" if job.of.accumulates else "batch_sync",
                "compile": "layers" if job.of.compiled else "off",
            },
        }
        config, block = read_config(CONFIG, BRANCHES, change=lambda read: laid_over(read, changes))
        values = PRESETS["long"].values(self.batch, 100_000, dict.fromkeys(BRANCHES, False))
        self.config, self.block = with_values(config, block, values, BRANCHES)
        self.towers = build_towers(
            f"open_clip:{job.tower}",
            f"open_clip:{job.tower}",
            job.spec.embed_dim,
            image_size=self.image_size,
            vocab_size=self.vocab_size,
            max_text_tokens=NUM_TOKENS,
            eos_token_id=self.vocab_size - 1,
        )

    def counted_costs(self) -> CostModel:
        """By counted operations, for the GPU that this is."""
        here = next((d for name, d in DEVICES.items() if name in self.device.name), None)
        return estimated_costs(
            self.towers,
            self.config,
            self.job.spec.embed_dim,
            here or DEVICES["H100"],
            float("inf"),  # what does not fit is to be seen, not refused
        )

    def measured_costs(self, seconds: float) -> CostModel:
        """As `"layout": "auto"` measures them, here for this micro-batch."""
        micro_batch = self.micro_batches()[0]
        inputs = {
            "image": {"pixel_values": normalise(micro_batch["pixel_values"])},
            "text": {key: micro_batch[key] for key in ("input_ids", "attention_mask")},
        }
        with library_models_kept():
            profile = profile_together(
                {tower.branch: tower.specs for tower in self.towers},
                lambda spec: spec.build(0),
                {branch: lambda size, b=branch: dict(inputs[b]) for branch in inputs},
                dtype=torch.bfloat16,
                device=self.device.torch,
                sizes=dict.fromkeys(inputs, (self.micro_batch,)),
                batch_size=self.batch,
                embed_dim=self.job.spec.embed_dim,
                places=self.processes.places,
                budget_s=seconds,
            )
        machine = replace(profile.machine, memory_bytes=float("inf"))  # as above
        own = {"embed_dim": self.job.spec.embed_dim, **configured(self.config)}
        return CostModel(profile.layers, machine, **own)

    def plan(self, costs: CostModel) -> RunPlan:
        return plan_run(self.config, self.block, 1, costs)

    def engine(self) -> ForkEngine:
        with library_models_kept():
            return build_engine(
                self.plan(self.counted_costs()),
                self.config,
                layers={tower.branch: tower.specs for tower in self.towers},
                build_layer=lambda spec: spec.build(0),
                objective=objective_of(self.towers, pairs_of("image:text", InfoNCE())),
                embed_dim=self.job.spec.embed_dim,
                total_num_steps=100_000,
                seed=0,
                timeout=self.processes.timeout,
                from_bytes=from_bytes(CLIP),
            )

    def micro_batches(self) -> list[dict[str, Tensor]]:
        """Of a step, as the loader makes them. They share their images and texts."""
        on_gpu = self.device.on_gpu
        images, texts = example(self.image_size, self.vocab_size, NUM_TOKENS)
        pixels = images.mul(64).add(128).clamp(0, 255).to(torch.uint8)
        shared = {
            "pixel_values": filled(pixels, self.micro_batch, on_gpu, channels_last=True),
            "input_ids": filled(texts, self.micro_batch, on_gpu),
            "attention_mask": filled(torch.ones_like(texts), self.micro_batch, on_gpu),
        }
        places = filled(torch.arange(self.batch), self.batch, on_gpu).split(self.micro_batch)
        labels = ("image_position", "image_index", "text_position", "text_index")
        return [{**shared, **dict.fromkeys(labels, own)} for own in places]


def train(job: Job, note: Note) -> None:
    device = Device(job.device)
    trained = Trained(job, device)
    note(batch=trained.batch, micro_batch=trained.micro_batch)
    if job.of.predicts:
        predict(trained, note)
        return
    engine, batch = trained.engine(), trained.micro_batches()
    held = device.held_bytes
    losses = []
    for _ in measured_steps(job, trained.batch, device, note):
        losses.append(engine.train_batch(iter(batch)).loss)
    note(losses=[losses[0], losses[-1]])
    peak, total = device.memory["peak_bytes"], device.memory["total_bytes"]
    if peak and total and not job.of.accumulates:
        note(largest_foretold=largest_foretold((0, held), (trained.batch, peak), total))
    with waits_by_line(device.torch) as waits:
        engine.train_batch(iter(batch))
    note(waiting_lines=dict(waits.most_common()))


def predict(trained: Trained, note: Note) -> None:
    """The step as the planner foretells it: by counted costs, then by costs measured here."""
    note(counted_step_s=trained.plan(trained.counted_costs()).predicted_step_s)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, WYE_CACHE=folder):
        measured = trained.plan(trained.measured_costs(4 * trained.job.seconds)).predicted_step_s
    note(status="ok", measured_step_s=measured)
