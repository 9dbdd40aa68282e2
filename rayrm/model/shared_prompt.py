"""Attention over a flat row in which each reply sees its prompt and itself.

Registered with transformers' ``AttentionInterface``, it serves every model whose attention goes
through that interface, without touching model code: the ``segments`` are a keyword argument that
the model hands down to each layer, through PEFT, ZeRO-3 and gradient checkpointing.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from rayrm.data.packing import RowGroup, Segments
from rayrm.errors import RayrmError

try:  # private in some releases of torch
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
_HAS_VARLEN_ATTN = (
    varlen_attn is not None and "enable_gqa" in signature(varlen_attn).parameters
)  # its first releases lack what is needed here

IMPLEMENTATION = "rayrm_shared_prompt"


@dataclass(frozen=True, slots=True)
class _Options:
    """What a layer asks for besides its queries, keys and values."""

    scaling: float
    dropout: float
    window: int | None
    softcap: float | None


_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers, as configurations name them, that see no more than ``Segments`` tell."""
_NO_EFFECT = {"position_ids", "output_attentions", "use_cache", "is_causal", "cache_position"}
"""Arguments of attention functions that change nothing here."""


def carries_state(classifier: PreTrainedModel) -> bool:
    """Whether tokens reach later ones through a state too (state-space and linear layers)."""
    kinds: list[str] = getattr(classifier.config.get_text_config(), "layer_types", None) or []
    return bool(getattr(classifier, "_is_stateful", False)) or any(
        kind == "linear_attention" or "attention" not in kind for kind in kinds
    )


def reason_against(classifier: PreTrainedModel) -> str | None:
    """Return why this model cannot be computed on a flat row exactly; null if it can."""
    config = classifier.config.get_text_config()
    name = type(classifier).__name__
    if carries_state(classifier):
        return f"{name} carries a state from token to token"
    if not getattr(type(classifier), "_supports_attention_backend", False):
        return f"{name} does not take its attention function from outside"
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        return f"{name} attends in both directions"
    kinds = set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES
    if kinds:
        return f"{name} has layers of the kind {', '.join(sorted(kinds))}"
    if any(parameter.endswith("sinks") for parameter, _ in classifier.named_parameters()):
        return f"{name} has attention sinks"
    return None


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within ``segments``; the arguments are those of transformers' attention functions.

    Args:
        module: the attention layer.
        query: ``[1, heads, tokens, head_dim]``.
        key: ``[1, key_value_heads, tokens, head_dim]``.
        value: as ``key``.
        attention_mask: none: the segments say who sees whom.
        segments: of the flat row.
        scaling: factor of the scores; null is ``head_dim ** -0.5``.
        dropout: probability with which an attention weight is dropped.
        sliding_window: a query sees so many positions, its own included; null is all.
        softcap: scores are bent into ``(-softcap, softcap)`` (Gemma 2, section 2); null is not.
        kwargs: what else the model hands down.

    Returns:
        ``[1, tokens, heads, head_dim]``, and no attention weights.

    Raises:
        RayrmError: the layer asks for something that is not computed here.
    """
    unknown = {name for name, given in kwargs.items() if given is not None} - _NO_EFFECT
    if unknown or attention_mask is not None:
        raise RayrmError(
            f"train.shared_prompt: {type(module).__name__} needs "
            f"{', '.join(sorted(unknown)) or 'a mask'}, which the flat row does not serve; set "
            "train.shared_prompt: off"
        )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    options = _Options(scaling or query.shape[-1] ** -0.5, dropout, sliding_window, softcap)
    if _has_ragged_kernel(query) and not dropout and softcap is None:
        output = _attend_ragged(query, key, value, segments, options)
    else:
        output = _attend_in_groups(query, key, value, segments, options)
    return output[None], None


def _has_ragged_kernel(query: Tensor) -> bool:
    """Whether torch's flash attention for rows of any length takes these queries."""
    return (
        _HAS_VARLEN_ATTN
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_ragged(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: _Options
) -> Tensor:
    """Attend with a kernel that takes rows of any length; queries are the last of their keys."""
    assert varlen_attn is not None
    left = -1 if options.window is None else options.window - 1
    output = varlen_attn(
        query.contiguous(),
        key.index_select(0, segments.segment_keys),
        value.index_select(0, segments.segment_keys),
        segments.query_ends,
        segments.key_ends,
        segments.max_queries,
        segments.max_keys,
        scale=options.scaling,
        window_size=(left, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(output, Tensor)  # it returns more only where more is asked for
    return output


def _attend_in_groups(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: _Options
) -> Tensor:
    """Attend in padded groups of rows of like length; arguments are ``[tokens, heads, head_dim]``.

    On a CPU this is done in float32: the kernels there are several times slower in bfloat16,
    backward above all, and attention is a small part of the memory.
    """
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    masks = _masks(segments, options.window, query.dtype)
    groups = segments.groups
    sizes_q = [group.num_rows * group.num_queries for group in groups]
    sizes_k = [group.num_rows * group.num_keys for group in groups]
    queries = query.index_select(0, segments.query_slots).split(sizes_q)
    keys = key.index_select(0, segments.key_slots).split(sizes_k)
    values = value.index_select(0, segments.key_slots).split(sizes_k)
    outputs = [
        _attend(q, k, v, group, mask, options)
        for q, k, v, group, mask in zip(queries, keys, values, groups, masks, strict=True)
    ]
    return torch.cat(outputs).index_select(0, segments.output_slots).to(dtype)


def _masks(segments: Segments, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
    """Return the groups' additive masks; each is made once a batch, not once a layer."""
    masks = segments.masks.get((window, dtype))
    if masks is None:
        masks = segments.masks[window, dtype] = [
            None
            if seen is None
            else torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                ~seen, -torch.inf
            )
            for seen in (group.mask(window) for group in segments.groups)
        ]
    return masks


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: RowGroup,
    mask: Tensor | None,
    options: _Options,
) -> Tensor:
    """Attend in one group; arguments and result are ``[rows * length, heads, head_dim]``."""
    query, key, value = (
        tensor.unflatten(0, (group.num_rows, -1)).transpose(1, 2) for tensor in (query, key, value)
    )
    if options.softcap is not None:
        output = _attend_capped(query, key, value, mask, options.softcap, options)
    else:
        output = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=options.dropout,
            is_causal=mask is None,
            scale=options.scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return output.transpose(1, 2).flatten(0, 1)


def _attend_capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float,
    options: _Options,
) -> Tensor:
    """Attend with bent scores, which ``scaled_dot_product_attention`` does not have."""
    num_groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(num_groups, dim=1) for t in (key, value))
    scores = torch.tanh(query @ key.transpose(-1, -2) * (options.scaling / softcap)) * softcap
    if mask is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    else:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return functional.dropout(weights, options.dropout) @ value


AttentionInterface.register(IMPLEMENTATION, shared_prompt_attention)
