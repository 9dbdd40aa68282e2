"""The DeepSpeed configuration of a run, as a pure function of its sections."""

from typing import Any, cast

from rayrm.config.schema import ZeroSection


def deepspeed_config(zero: ZeroSection, *, dtype: str, max_grad_norm: float) -> dict[str, Any]:
    """Return DeepSpeed's dict for these sections, ``zero.extra`` laid over it key by key.

    Accumulation stays 1 throughout: the loop says itself which backward ends a step, so that the
    number of micro-batches may change from step to step.
    """
    optimization: dict[str, Any] = {"stage": zero.stage}
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
