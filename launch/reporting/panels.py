"""The charts of a report: which keys of metrics.jsonl each draws, and on which axis. A new metric
gets its chart by a line in one of the tables below."""

from __future__ import annotations

from data.batching.load_control import BRANCH_OF
from launch.reporting.charts import Axis, Lines
from launch.terminal.tables import duration

FROM_ZERO = {"rangemode": "tozero"}
LOG = {"type": "log", "dtick": 1}
LOSS, WEIGHT, SCALE = Axis("loss"), Axis("weight"), Axis("logit_scale_exp")
RATE = Axis("learning rate", "{:.3g}".format, {"tickformat": "~e"})
RECALL = Axis("recall", "{:.1%}".format, {"tickformat": "~p", **FROM_ZERO})
GEOMETRIC = Axis("value", "{:.3f}".format)
SHARE = Axis("share of the step", "{:.1%}".format, {"tickformat": ".0%", **FROM_ZERO})
SECONDS = Axis("seconds", duration, FROM_ZERO)
SAMPLES = Axis("samples/s", "{:,.1f}".format, FROM_ZERO)
TOKENS = Axis("tokens/s", "{:,.0f}".format, FROM_ZERO)
PADDING = Axis("padding share", "{:.2%}".format, {"tickformat": "~p", **FROM_ZERO})
RATIO = Axis("predicted ÷ measured", "{:.2f}".format)
GIB = Axis("GiB", "{:.2f} GiB".format, FROM_ZERO)
NORM = Axis("norm before clipping", "{:.3g}".format, LOG)
CLIPPED = Axis("norm after ÷ before", "{:.3f}".format, {"range": [0, 1.05]})
SHARE_OF_STEPS = Axis("share of steps", "{:.1%}".format, {"tickformat": ".0%", **FROM_ZERO})
FP16, STEPS = Axis("loss scale", layout=LOG), Axis("steps")

OBJECTIVE = {"contrastive loss": "contrastive_loss", "contrastive *": "contrastive_loss/*"}
OBJECTIVE |= {"matching loss": "matching_loss", "matching *": "matching_loss/*"}
SCALARS = {"*logit_scale_exp": "*logit_scale_exp", "*logit_bias": "*logit_bias"}

LOSSES = (
    Lines("loss", "Loss", LOSS, {"loss": "loss"}, smooth=True, wide=True),
    Lines("loss-parts", "Losses of the objective", LOSS, OBJECTIVE, smooth=True),
    Lines("loss-sets", "Loss by data set", LOSS, {"*": "loss/*"}, smooth=True),
    Lines("loss-weights", "Weights of the losses", WEIGHT, {"*": "loss_weight/*"}),
    Lines("rate", "Learning rate", RATE, {"schedule": "lr", "*": "lr/*"}),
    Lines("scalars", "Learned scale of the similarities", SCALE, SCALARS),
)
TIMES = (
    Lines("throughput", "Throughput", SAMPLES, {"samples/s": "samples_per_s"}, smooth=True),
    Lines("idle", "Idle time by stage", SHARE, {"*": "idle/*"}, smooth=True),
    Lines("busy", "Computing time of a step by stage", SECONDS, {"*": "busy_s/*"}, smooth=True),
    Lines("data-wait", "Time spent waiting for data", SECONDS, {"*": "data_wait_s/*"}, smooth=True),
)
BALANCE = (
    Lines("padding", "Padding", PADDING, {"*": "padding_share/*"}),
    Lines(
        "tokens", "Text tokens per second", TOKENS, {"tokens/s": "text_tokens_per_s"}, smooth=True
    ),
    *(
        Lines(rate, f"Feed rate {rate}", Axis(rate, "{:g}".format), {rate: rate})
        for rate in BRANCH_OF
    ),
)
# of the measurements every balance.interval steps
BRANCH_SECONDS = {"* predicted": "predicted_s/*", "* measured": "measured_s/*"}
MEASURED = (
    Lines("branches", "Time of the micro-batches of a measurement", SECONDS, BRANCH_SECONDS),
    Lines("predicted", "Predicted ÷ measured time of a branch", RATIO, {"*": "ratio/*"}),
)
MEMORY = Lines(
    "memory",
    "Peak memory by rank",
    GIB,
    {"rank that held most": "peak_memory_bytes", "rank *": "peak_memory_bytes/rank *"},
    scale=1 / 2**30,
    note="The most that a rank has held so far: tensors on a GPU; on a CPU the whole process.",
)
CLIPPED_SHARE = "Share of steps that were clipped so far"
GRADIENTS = (
    Lines("norms", "Gradient norms", NORM, {"*": "grad_norm/*"}, smooth=True),
    Lines("clipping", "Clipping", CLIPPED, {"*": "clip_coefficient/*"}, idle=1.0),
    Lines("clipped", CLIPPED_SHARE, SHARE_OF_STEPS, {"*": "clipped_share/*"}, idle=0.0),
    Lines("loss-scale", "Loss scale (fp16)", FP16, {"scale": "loss_scale"}),
    Lines("skipped", "Skipped steps so far", STEPS, {"skipped": "skipped_steps"}, idle=0.0),
)
GEOMETRY = ("alignment", "modality_gap", "cosine_pairs", "cosine_others")
GEOMETRY_NOTE = (
    "alignment: mean squared distance of pairs. modality gap: distance of the mean embeddings. "
    "cosine: mean similarity of pairs, and of all others."
)
