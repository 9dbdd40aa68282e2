"""The DeepSpeed configuration of a run, and what its state takes: pure functions."""

from dataclasses import dataclass
from typing import Any, cast

from rayrm.config.schema import ZeroSection

_BUCKET_SIZE = 20_000_000
"""Gradients that are reduced at once; DeepSpeed's own 500 million take a gigabyte on every rank."""


def deepspeed_config(zero: ZeroSection, *, dtype: str, max_grad_norm: float) -> dict[str, Any]:
    """Return DeepSpeed's dict for these sections, ``zero.extra`` laid over it key by key.

    Accumulation stays 1 throughout: the loop says itself which backward ends a step, so that the
    number of micro-batches may change from step to step.
    """
    optimization: dict[str, Any] = {"stage": zero.stage, "reduce_bucket_size": _BUCKET_SIZE}
    if zero.offload_optimizer:
        optimization["offload_optimizer"] = {"device": zero.offload_optimizer}
    if zero.offload_param:
        optimization["offload_param"] = {"device": zero.offload_param}
    if zero.stage == 3:
        optimization["stage3_gather_16bit_weights_on_model_save"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": optimization,
        "steps_per_print": 2**31 - 1,
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _laid_over(config, dict(zero.extra))


def _laid_over(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _laid_over(cast("dict[str, Any]", below), value) if both else value
    return merged


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What one rank holds between steps, in bytes."""

    parameters: float
    """In the type of forward and backward."""
    gradients: float
    """Summed up in float32."""
    optimizer: float
    """Both moments of AdamW and, but for stage 0, master weights, in float32."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    num_parameters: int, num_trained: int, *, stage: int, dtype: str, world_size: int
) -> StateBytes:
    """Return what the training state takes on each rank.

    The arithmetic of ZeRO (Rajbhandari et al. 2020, section 3), with gradients in float32: a stage
    divides one thing more among the ranks.
    """
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    share = [1 / world_size if stage >= least else 1.0 for least in (3, 2, 1)]
    return StateBytes(
        parameters=itemsize * num_parameters * share[0],
        gradients=4 * num_trained * share[1],
        optimizer=(12 if stage else 8) * num_trained * share[2],
    )
