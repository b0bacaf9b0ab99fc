"""What DeepSpeed's keys mean for those who do not read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def precision_of(config: Mapping[str, Any]) -> str:
    """fp32, bf16 or fp16, from DeepSpeed's configuration."""
    return next((key for key in ("bf16", "fp16") if config.get(key, {}).get("enabled")), "fp32")


def steps_matrices(optimizer: Mapping[str, Any]) -> bool:
    """Whether the `optimizer` block is that of Muon, which steps matrices otherwise than the rest."""
    return str(optimizer.get("type", "")).lower() == "muon"


def zero_stage(config: Mapping[str, Any]) -> int:
    """What the replicas of a stage share out, as DeepSpeed counts: 1, the optimizer's state; 2, the
    gradients too; 0, nothing."""
    return config.get("zero_optimization", {}).get("stage", 0)


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state is on the CPU."""
    zero = config.get("zero_optimization", {})
    return (zero.get("offload_optimizer") or {}).get("device") == "cpu"


def averages_early(config: Mapping[str, Any]) -> bool:
    """Whether gradients are averaged over replicas while the last backward runs: not under
    DeepSpeed's ZeRO-1 optimizer of fp32, fp16 and offloaded state, which keeps to itself what it has
    averaged, nor under ZeRO-2 and ZeRO-3, where every backward averages its own, nor where the configuration says so
    (`overlap_comm`) or asks for another order or precision of the sums."""
    zero, bf16 = config.get("zero_optimization", {}), config.get("bf16", {})
    plain = (
        zero.get("overlap_comm") is not False
        and not offloads(config)
        and not config.get("prescale_gradients", False)
        and config.get("gradient_predivide_factor", 1.0) == 1.0
        and config.get("communication_data_type") in (None, "fp32")
    )
    if bf16.get("enabled", False):
        return plain and zero_stage(config) < 2 and bf16.get("immediate_grad_update", True)
    return plain and zero_stage(config) == 0
