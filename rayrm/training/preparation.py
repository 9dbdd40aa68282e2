"""What a worker settles before the first step: what fits into memory, and that it is exact."""

import logging
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from rayrm.config.schema import RunConfig
from rayrm.data.packing import pack_pairs
from rayrm.data.plan import Cutting
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import ConfigError, RayrmError
from rayrm.model.reward import RewardModel
from rayrm.training.engine import Engine
from rayrm.training.loop import Progress

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
"""Share of the free memory that activations may take; the rest is for what comes and goes."""
MIN_TOKENS, MAX_TOKENS = 512, 65_536
"""Tokens of a forward, at least and at most."""
ROUND_TOKENS = 256
"""Tokens of a forward are a multiple of this."""
GOOD_TOKENS = {"cpu": 1_024, "cuda": 4_096}
"""Tokens from which on a forward is fast: recomputing activations is worth so many."""
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative and absolute difference allowed between rewards of a flat row and of padded rows."""


def settle_memory(
    engine: Engine,
    config: RunConfig,
    progress: Progress,
    *,
    longest_pair: int,
    workers_on_node: int,
) -> None:
    """Choose a forward's tokens and gradient checkpointing where they are ``auto``.

    They are kept in ``progress``, so that a restart cuts steps as the first start did. Every rank
    must call this, and gets the same.

    Args:
        engine: gets the choice.
        config: says what is to be chosen.
        progress: holds the choice of the first start, or gets it.
        longest_pair: tokens of the longest pair; it is never cut.
        workers_on_node: with whom host memory is shared.
    """
    tokens = config.train.max_tokens_per_micro_batch
    checkpointing = config.model.gradient_checkpointing
    if progress.max_tokens is not None and progress.gradient_checkpointing is not None:
        tokens, checkpointing = progress.max_tokens, progress.gradient_checkpointing
    if tokens == "auto" or checkpointing == "auto":
        whole = _bytes_a_token(engine)
        free = _agreed_free_bytes(engine, workers_on_node)
        if checkpointing == "auto":
            wanted = GOOD_TOKENS[engine.device.type] if tokens == "auto" else tokens
            checkpointing = whole * max(wanted, longest_pair) > free
        if tokens == "auto":
            # checkpointing keeps the input of each layer, and one layer at a time in full
            classifier: Any = engine.model.classifier
            shape = classifier.config.get_text_config()
            num_layers = shape.num_hidden_layers
            itemsize = getattr(torch, config.model.dtype).itemsize
            kept = shape.hidden_size * itemsize * num_layers + whole / num_layers
            most = free / (kept if checkpointing else whole)
            tokens = int(min(max(most, MIN_TOKENS), MAX_TOKENS)) // ROUND_TOKENS * ROUND_TOKENS
        logger.info("%.2f MB a token, %.1f GB for activations", whole / 1e6, free / 1e9)
    if checkpointing:
        engine.enable_gradient_checkpointing()
    engine.cutting = Cutting(engine.cutting.layout, tokens)
    progress.max_tokens, progress.gradient_checkpointing = tokens, checkpointing


def _bytes_a_token(engine: Engine) -> float:
    """Return what a token more makes a forward keep for backward, without checkpointing."""
    ids = np.arange(96, dtype=np.int32)
    pair = TokenizedPair(ids[:64], ids[64:], ids[::-1][:32], 0.0)
    small, large = (engine.pack([pair] * count) for count in (1, 4))
    kept = engine.measure_activations(large) - engine.measure_activations(small)
    return kept / (large.num_slots - small.num_slots)


def _agreed_free_bytes(engine: Engine, workers_on_node: int) -> float:
    """Return what the rank with the least memory has for activations during training."""
    if engine.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(engine.device)[0])
    else:
        free = psutil.virtual_memory().available / workers_on_node
    free = max(free - engine.bytes_to_come, 0.0) * MEMORY_SHARE
    least = engine.reduce_max(torch.tensor([-free], dtype=torch.float64, device=engine.device))
    return -least.item()


def slow_dtype(dtype: str, device: torch.device) -> str | None:
    """Say that another type is many times faster, where this machine only imitates ``dtype``."""
    if dtype != "bfloat16" or device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return "this CPU has no bfloat16 arithmetic: model.dtype=float32 is many times faster here"


def unusual_learning_rate(config: RunConfig, num_parameters: int) -> str | None:
    """Say that a rate is far from what others take for as many parameters.

    TRL, OpenRLHF and LLaMA-Factory take 1e-5 or less for every weight of a large model, and about
    1e-4 for adapters.
    """
    rate = config.train.learning_rate
    if not config.model.trains_adapter and num_parameters > 1e9 and rate > 5e-5:
        return (
            f"train.learning_rate {rate:g} is high for training every weight of "
            f"{num_parameters / 1e9:.1f} billion, and may end in equal rewards: 1e-5 is usual"
        )
    if config.model.trains_adapter and rate < 2e-5:
        return f"train.learning_rate {rate:g} is low for adapters, which may not learn: take 1e-4"
    return None


def check_finite(engine: Engine, name_or_path: str) -> None:
    """Refuse weights that no update can mend and that could not be exported; collective.

    Raises:
        ConfigError: a trained weight holds a NaN or an infinity.
    """
    if bad := engine.trained_but_not_finite():
        raise ConfigError(
            f"model.name_or_path: {name_or_path} holds numbers that are not finite, in "
            f"{', '.join(bad[:3])}{f' and {len(bad) - 3} more' if len(bad) > 3 else ''}; mend the "
            "model, or train adapters beside what is broken (model.lora)"
        )


def prove_layout(
    engine: Engine, progress: Progress, pairs: list[TokenizedPair], *, dtype: str
) -> None:
    """Compare real pairs' rewards of a flat row with those of padded rows; every rank must call it.

    A restart on the same kind of device does not compare again: ``progress`` holds what was proved.

    Raises:
        RayrmError: they differ by more than the type's rounding.
    """
    model = engine.model
    if engine.cutting.layout == "padded" or not isinstance(model, RewardModel):
        return
    place = _kind_of_place(engine.device)
    elsewhere = float(progress.layout_proved_on != place)
    if not engine.reduce_max(torch.tensor([elsewhere], device=engine.device)).item():
        return
    with engine.evaluating():
        flat = torch.stack(engine.score(engine.pack(pairs)), dim=1)
        with model.padded():
            padded = torch.stack(engine.score(pack_pairs(pairs, "padded").to(engine.device)), dim=1)
    tolerance = _TOLERANCE[dtype]
    is_close = torch.isclose(flat, padded, rtol=tolerance, atol=tolerance, equal_nan=True)
    if engine.reduce_max((~is_close).any().double()[None]).item():
        raise RayrmError(
            f"train.shared_prompt: {type(model.classifier).__name__} gives rewards {flat.tolist()} "
            f"with the prompt computed once, and {padded.tolist()} in padded batches; set "
            "train.shared_prompt: off, and please report the model"
        )
    progress.layout_proved_on = place


def _kind_of_place(device: torch.device) -> str:
    """Name whatever may bring other attention kernels."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"
