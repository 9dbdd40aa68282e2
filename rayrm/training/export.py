"""The final model: gathered, checked against the model's shapes, reloaded and compared."""

import inspect
import json
import os
import shutil
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from rayrm.config.schema import ModelSection
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import CheckpointError
from rayrm.model.adapters import HEADS, merge_adapter, reload_adapter
from rayrm.model.quantize import quantization_options
from rayrm.model.reward import EncoderRewardModel, PaddingSide, RewardModel
from rayrm.model.tokenizer import pad_token_id, resolve_name_or_path

_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative and absolute difference allowed between trained and reloaded rewards, by dtype: plain
transformers computes the head in the model's dtype, rayrm in float32."""
BASE = "base"
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Proof:
    """A few real texts with the rewards that training computes for them."""

    texts: list[np.ndarray]
    """Token ids of each text."""
    rewards: Tensor
    """float32 ``[texts]``."""


def take_proof(
    score: Callable[[Sequence[TokenizedPair]], tuple[Tensor, Tensor]],
    pairs: Sequence[TokenizedPair],
) -> Proof:
    """Note what ``score`` makes of both sides of ``pairs``; it is to score as in evaluation."""
    rewards = torch.cat(score(pairs)).float().cpu()
    texts = [np.concatenate([pair.prompt_ids, pair.chosen_ids]) for pair in pairs]
    texts += [np.concatenate([pair.prompt_ids, pair.rejected_ids]) for pair in pairs]
    return Proof(texts, rewards)


def export_model(
    trained: RewardModel | EncoderRewardModel,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    model: ModelSection,
    *,
    folder: str,
    final_path: str,
    proof: Proof,
    reward_moments: tuple[float, float] | None = None,
) -> float:
    """Write a model that plain transformers or peft loads, and prove it.

    Args:
        trained: the model; its own weights may be partitioned.
        state: whole weights by name, those of the adapter where one was trained; emptied.
        tokenizer: saved beside the model, with its chat template.
        model: says whether the adapter or all weights are written.
        folder: where to.
        final_path: where the folder will be in the end.
        proof: rewards that the reloaded model has to give.
        reward_moments: mean and standard deviation of the rewards, kept as ``reward_mean`` and
            ``reward_std`` in ``config.json``; null where nobody knows them.

    Returns:
        The largest difference of a reloaded reward.

    Raises:
        CheckpointError: a tensor has the wrong shape, or the reloaded model scores differently.
    """
    classifier: Any = trained.classifier
    _check_shapes(classifier, state)
    kept = classifier.state_dict()
    buffers = classifier.named_buffers(remove_duplicate=False)  # VeRA's are shared, and asked for
    state |= {name: buffer for name, buffer in buffers if name in kept}
    config = _config_of(classifier)
    config.reward_mean, config.reward_std = reward_moments or (None, None)
    # embeddings that are trained are among the adapter's weights, and its base has all others
    options = {"save_embedding_layers": False} if model.trains_adapter else {}
    classifier.save_pretrained(folder, state_dict=state, **options)
    state.clear()  # the proof loads the weights again: one copy at a time
    tokenizer.save_pretrained(folder)
    if model.trains_adapter:
        _write_adapter_base(folder, final_path, classifier, model)
    return prove_export(
        folder,
        model,
        proof,
        pad_token_id=pad_token_id(tokenizer),
        padding_sides=trained.padding_sides,
    )


def _config_of(classifier: Any) -> Any:
    plain = classifier.get_base_model() if isinstance(classifier, PeftModel) else classifier
    return plain.config


def _check_shapes(classifier: torch.nn.Module, state: dict[str, Tensor]) -> None:
    for name, parameter in classifier.named_parameters():
        expected = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if name in state and (tuple(state[name].shape) != expected or state[name].numel() == 0):
            raise CheckpointError(
                f"export: {name} was gathered as {tuple(state[name].shape)}, not {expected}"
            )
        if name in state and not torch.isfinite(state[name]).all():
            raise CheckpointError(f"export: {name} holds numbers that are not finite")


def _write_adapter_base(
    folder: str, final_path: str, classifier: PeftModel, model: ModelSection
) -> None:
    """Let the adapter name a base that has one label and its padding.

    peft builds the base from its own configuration: with the label count and pad id of a language
    model the trained head would not fit, and padded batches would be read at the wrong token. The
    weights are linked, not copied, unless another adapter was merged into them, or there are more
    embeddings now.
    """
    config = copy(_config_of(classifier))
    config.base_quantization = model.quantization  # for people, and for rayrm.export
    vars(config).pop("quantization_config", None)  # the weights beside it are whole
    original = resolve_name_or_path(model)
    config.save_pretrained(folder)
    base = Path(folder, BASE)
    own = AutoConfig.from_pretrained(
        original, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    has_new_tokens = config.get_text_config().vocab_size > own.get_text_config().vocab_size
    if model.stacks_adapter or has_new_tokens:
        plain: Any = _load_enlarged(original, own, config, model)
        if model.stacks_adapter:
            head = next(name for name, _ in plain.named_children() if name in HEADS)
            below, _ = reload_adapter(plain, str(model.adapter_path), head=head)
            plain = merge_adapter(below)
        plain.save_pretrained(base)
    else:
        # the base inside another adapter's folder may go when that goes
        is_anothers = Path(original).name == BASE and Path(original, "..", _ADAPTER).is_file()
        fits = own.num_labels == 1 and own.pad_token_id == config.pad_token_id
        if (fits and not is_anothers) or "://" in final_path:
            return
        base.mkdir()
        config.save_pretrained(base)
        for weights in _weight_files(original, model.revision):
            if is_anothers and not weights.is_symlink():
                shutil.copyfile(weights, base / weights.name)
            else:
                (base / weights.name).symlink_to(weights.resolve())
    adapter_config = Path(folder, _ADAPTER)
    settings = json.loads(adapter_config.read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = os.path.join(final_path, BASE)
    settings["revision"] = None
    adapter_config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _load_enlarged(path: str, own: Any, config: Any, model: ModelSection) -> PreTrainedModel:
    """Load what an adapter sits on, with the embeddings of tokens that its own weights lack."""
    vocab_size = config.get_text_config().vocab_size
    narrow = deepcopy(config)
    narrow.get_text_config().vocab_size = own.get_text_config().vocab_size
    narrow.pad_token_id = None  # it may be among the new ones
    plain = _load_plain(path, narrow, model)
    plain.resize_token_embeddings(vocab_size, mean_resizing=False)
    plain.config.pad_token_id = config.pad_token_id
    return plain


def _load_plain(path: str, config: Any, model: ModelSection) -> PreTrainedModel:
    """Load what an adapter sits on; it may lack the head, of which every adapter has its own."""
    return AutoModelForSequenceClassification.from_pretrained(
        path,
        config=config,
        revision=model.revision,
        dtype=getattr(torch, model.dtype),
        trust_remote_code=model.trust_remote_code,
        **quantization_options(model),
    )


def _weight_files(name_or_path: str, revision: str) -> list[Path]:
    found = None
    for name in ("model.safetensors", "model.safetensors.index.json"):
        found = cached_file(
            name_or_path, name, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if found is not None:
            break
    if found is None:
        raise CheckpointError(f"export: {name_or_path} has no safetensors weights to refer to")
    if not found.endswith(".json"):
        return [Path(found).absolute()]
    shards = sorted(set(json.loads(Path(found).read_text())["weight_map"].values()))
    return [Path(found).absolute(), *(Path(found).absolute().parent / shard for shard in shards)]


def prove_export(
    folder: str,
    model: ModelSection,
    proof: Proof,
    *,
    pad_token_id: int,
    padding_sides: Sequence[PaddingSide],
) -> float:
    """Load the folder with plain libraries and compare its rewards with those of training.

    Args:
        folder: a full model, or an adapter.
        model: says how it was trained.
        proof: texts and the rewards that they have to get, singly and in one padded batch.
        pad_token_id: what the batch is padded with.
        padding_sides: where; ``RewardModel.padding_sides``.

    Returns:
        The largest difference of a reward.

    Raises:
        CheckpointError: a reward differs by more than the dtype explains.
    """
    reloaded = _reload(folder, model)
    # bitsandbytes computes in bfloat16 where a CPU has it, whatever type was asked for
    tolerance = _TOLERANCE["bfloat16" if model.quantization else model.dtype]
    largest = 0.0
    for side in padding_sides:
        for batch in (range(len(proof.texts)), *([i] for i in range(len(proof.texts)))):
            texts = [proof.texts[i] for i in batch]
            rewards = _score(reloaded, texts, pad_token_id=pad_token_id, padding_side=side)
            expected = proof.rewards[list(batch)]
            # a broken weight beside an adapter is none of its doing: a text may have no reward
            is_close = torch.isclose(
                rewards, expected, rtol=tolerance, atol=tolerance, equal_nan=True
            )
            largest = max(largest, (rewards - expected).abs().nan_to_num(0.0).max().item())
            if not is_close.all():
                raise CheckpointError(
                    f"export: the saved model scores {rewards.tolist()}, the trained one "
                    f"{expected.tolist()} ({side}-padded); {folder} is not to be trusted"
                )
    return largest


def _reload(folder: str, model: ModelSection) -> Any:
    trust = model.trust_remote_code
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    if not model.trains_adapter:
        return _load_plain(folder, config, model).eval()
    own_base = os.path.join(folder, BASE)
    path = own_base if os.path.isdir(own_base) else resolve_name_or_path(model)
    base = _load_plain(path, config, model)
    return PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval()


def _score(
    classifier: Any,
    texts: list[np.ndarray],
    *,
    pad_token_id: int,
    padding_side: PaddingSide,
) -> Tensor:
    width = max(len(text) for text in texts)
    input_ids = torch.full((len(texts), width), pad_token_id)
    attention_mask = torch.zeros((len(texts), width), dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if padding_side == "right" else slice(width - len(text), width)
        input_ids[row, place] = torch.from_numpy(text.astype(np.int64))
        attention_mask[row, place] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    own = classifier.get_base_model() if isinstance(classifier, PeftModel) else classifier
    if padding_side == "left" and "position_ids" in inspect.signature(own.forward).parameters:
        # as in generation: learned positions (GPT-2) would otherwise count the padding
        inputs["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = classifier(**inputs).logits
    return logits[:, 0].float()
