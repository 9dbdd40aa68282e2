"""Load a reward model: backbone, head, adapters, and how its batches are packed."""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rayrm.config.schema import ModelSection, SharedPrompt
from rayrm.errors import ConfigError
from rayrm.model.adapters import HEADS, Gather, add_adapter, read_adapter_config
from rayrm.model.heads import Head, find_head, rename_head
from rayrm.model.quantize import keep_packed_weights_as_they_are, quantization_options
from rayrm.model.reward import EncoderRewardModel, Float32Linear, RewardModel
from rayrm.model.shared_prompt import reason_against
from rayrm.model.tokenizer import pad_token_id, resolve_name_or_path, template_brings_tokens

logger = logging.getLogger(__name__)

_HEAD = "score.weight"


def load_config(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Load the backbone's configuration as that of a one-label classifier with this padding.

    Raises:
        ConfigError: the folder cannot be read, is a classifier with several labels, or has no place
            for the padding.
    """
    path = resolve_name_or_path(model)
    if Path(path, "adapter_config.json").is_file():
        base = read_adapter_config(path).base_model_name_or_path
        raise ConfigError(
            f"model.name_or_path: {path} is an adapter; give it as model.adapter_path, and its "
            f"base, {base}, as model.name_or_path"
        )
    options: dict[str, Any] = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
    }
    try:
        config = AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model.name_or_path: cannot load {model.name_or_path!r} ({first_line})"
        ) from error
    architectures = config.architectures or []
    is_classifier = any(name.endswith("ForSequenceClassification") for name in architectures)
    if is_classifier and config.num_labels != 1:
        raise ConfigError(
            f"model.name_or_path: {model.name_or_path} is a classifier with {config.num_labels} "
            "labels; a reward model has one: start from its backbone, or from a one-label model"
        )
    config.num_labels = 1
    config.problem_type = "regression"  # by which pipelines and servers apply no sigmoid
    config.pad_token_id = pad_token_id(tokenizer)
    if tokenizer.eos_token_id is not None:
        config.eos_token_id = tokenizer.eos_token_id
    if model.disable_dropout:
        for name, value in config.to_dict().items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "drop"))):
                setattr(config, name, 0.0)
    return config


def build_reward_model(
    model: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    shared_prompt: SharedPrompt = "auto",
    gather: Gather = lambda parameters: nullcontext(),
    dequantized: bool = False,
) -> RewardModel | EncoderRewardModel:
    """Load the backbone and its head, ready to train.

    A head that the folder has is kept, also under the names of OpenRLHF, TRL and LLaMA-Factory.
    Weights that it lacks, such as the head, are drawn from ``seed`` with the backbone's initializer
    range, alike on every rank and under every ZeRO stage. Under ZeRO-3 the weights go straight into
    their partitions.

    Args:
        model: what to load.
        tokenizer: whose padding the model gets.
        seed: of the weights that are drawn.
        shared_prompt: ``train.shared_prompt``.
        gather: makes partitioned parameters whole.
        dequantized: give weights of few bits, rounded as they are, the model's type again.

    Raises:
        ConfigError: no one-label classifier can be made of this model, or the prompt cannot be
            shared although it has to be.
    """
    torch.manual_seed(seed)  # for what is drawn elsewhere: adapters, the embedding of a new token
    config = load_config(model, tokenizer)
    has_new_token = len(tokenizer) > config.get_text_config().vocab_size
    if has_new_token:
        config.pad_token_id = None  # the embeddings to be loaded have no place for it yet
    classifier, new_weights = _load_classifier(model, config)
    if has_new_token:
        classifier.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        classifier.config.pad_token_id = pad_token_id(tokenizer)
    if model.quantization is not None:
        keep_packed_weights_as_they_are(classifier)
    if dequantized:
        classifier = cast(Any, classifier).dequantize().to(getattr(torch, model.dtype))
    head = _find_head(classifier, model) if _HEAD in new_weights else None
    _fill_weights(classifier, new_weights, head, seed, gather)
    rename_head(classifier.config)
    train_embeddings = template_brings_tokens(model, tokenizer)
    reward_model = _dressed(
        classifier, model, shared_prompt, train_embeddings=train_embeddings, gather=gather
    )
    reward_model.origin = _tell_origin(new_weights, reward_model.origin or str(head or ""))
    return reward_model


def check_reward_model(
    model: ModelSection, tokenizer: PreTrainedTokenizerBase, *, shared_prompt: SharedPrompt
) -> None:
    """Find what ``build_reward_model`` would find wrong, without loading weights.

    Raises:
        ConfigError: as there.
    """
    quantization_options(model)
    known = [*AttentionInterface().valid_keys(), "eager"]
    given = model.attn_implementation
    if given is not None and given not in known and "/" not in given:
        raise ConfigError(f"model.attn_implementation: {given!r} is none of {', '.join(known)}")
    config = load_config(model, tokenizer)
    config.pad_token_id = None  # it may be that of a token which the embeddings get later
    try:
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=model.trust_remote_code
            )
    except (ValueError, TypeError, ImportError) as error:
        raise _not_loaded(model, error) from error
    is_local = Path(resolve_name_or_path(model)).is_dir()  # nothing is to be fetched yet
    if is_local and isinstance(getattr(classifier, "score", None), nn.Linear):
        _find_head(classifier, model)
    train_embeddings = template_brings_tokens(model, tokenizer)
    _dressed(classifier, model, shared_prompt, train_embeddings=train_embeddings)


def _dressed(
    classifier: PreTrainedModel,
    model: ModelSection,
    shared_prompt: SharedPrompt,
    *,
    train_embeddings: bool,
    gather: Gather = lambda parameters: nullcontext(),
) -> RewardModel | EncoderRewardModel:
    """Give a classifier its float32 head, its adapters and its layout."""
    head_name = next((name for name, _ in classifier.named_children() if name in HEADS), None)
    if head_name is None:
        raise ConfigError(f"model.name_or_path: {type(classifier).__name__} has no scalar head")
    is_decoder = head_name == "score" and isinstance(classifier.get_submodule("score"), nn.Linear)
    if is_decoder:
        _compute_head_in_float32(classifier)
    padded_because = _why_padded(classifier, model, shared_prompt, is_decoder=is_decoder)
    wrapped: nn.Module = classifier
    origin = ""
    if model.trains_adapter:
        classifier, wrapped, origin = add_adapter(
            classifier, model, head=head_name, train_embeddings=train_embeddings, gather=gather
        )
    if model.quantization is not None:
        _give_trained_weights(wrapped, getattr(torch, model.dtype))
    if not is_decoder:
        return EncoderRewardModel(wrapped, padded_because=padded_because, origin=origin)
    return RewardModel(
        wrapped,
        backbone=cast("PreTrainedModel", classifier.base_model),
        head=classifier.get_submodule("score"),
        padded_because=padded_because,
        origin=origin,
    )


def _give_trained_weights(wrapped: nn.Module, dtype: torch.dtype) -> None:
    """Give one type to what is trained: on weights of 8 bits peft makes float32 adapters."""
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _why_padded(
    classifier: PreTrainedModel, model: ModelSection, setting: SharedPrompt, *, is_decoder: bool
) -> str | None:
    """Return why this model's prompts are not shared; null where they are."""
    if setting == "off":
        return "train.shared_prompt is off"
    reason = reason_against(classifier)
    if not is_decoder:
        reason = f"{type(classifier).__name__} attends in both directions"
    if model.attn_implementation is not None:
        reason = f"model.attn_implementation is {model.attn_implementation}"
    if reason is not None and setting == "on":
        raise ConfigError(f"train.shared_prompt: on, but {reason}; set it to auto")
    return reason


def _load_classifier(
    model: ModelSection, config: PretrainedConfig
) -> tuple[PreTrainedModel, set[str]]:
    init_kwargs: dict[str, Any] = dict(model.model_init_kwargs)
    if model.attn_implementation is not None:
        init_kwargs["attn_implementation"] = model.attn_implementation
    try:
        classifier, info = AutoModelForSequenceClassification.from_pretrained(
            resolve_name_or_path(model),
            config=config,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=getattr(torch, model.dtype),
            output_loading_info=True,
            **quantization_options(model),
            **init_kwargs,
        )
    except (OSError, ValueError, TypeError, ImportError, SafetensorError) as error:
        raise _not_loaded(model, error) from error
    return classifier, set(info["missing_keys"])


def _not_loaded(model: ModelSection, error: Exception) -> ConfigError:
    first_line = str(error).strip().split("\n")[0]
    for name in model.model_init_kwargs:
        if isinstance(error, TypeError) and f"'{name}'" in first_line:
            return ConfigError(f"model.model_init_kwargs.{name}: {first_line}; leave it out")
    return ConfigError(
        f"model: cannot load {model.name_or_path!r} as a sequence classifier ({first_line})"
    )


def _find_head(classifier: PreTrainedModel, model: ModelSection) -> Head | None:
    return find_head(
        resolve_name_or_path(model),
        field="model.name_or_path",
        revision=model.revision,
        module=getattr(classifier.config, "value_head_prefix", None),
        hidden_size=cast("nn.Linear", classifier.get_submodule("score")).in_features,
    )


def _fill_weights(
    classifier: PreTrainedModel, names: set[str], head: Head | None, seed: int, gather: Gather
) -> None:
    """Take the head, if there is one, and draw the other matrices from ``seed``.

    A bias begins at zero, the scale of a norm at one.
    """
    std = getattr(classifier.config.get_text_config(), "initializer_range", 0.02)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in classifier.named_parameters():
        if name not in names:
            continue
        with gather([parameter]), torch.no_grad():
            if name == _HEAD and head is not None:
                parameter.copy_(head.weight)
            elif parameter.ndim >= 2:
                draw = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
                parameter.copy_(draw)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _tell_origin(new_weights: set[str], head: str) -> str:
    """Tell where the head is from, and which weights are drawn; it is not, where it was found."""
    drawn = {name for name in new_weights if not head or name.partition(".")[0] not in HEADS}
    told = [f"head: {head}"] if head else []
    if drawn:
        told.append(f"new weights, drawn from run.seed: {', '.join(sorted(drawn))}")
    return "; ".join(told) or "head: kept"


def _compute_head_in_float32(classifier: PreTrainedModel) -> None:
    head = classifier.get_submodule("score")
    assert isinstance(head, nn.Linear)
    with torch.device("meta"):
        replacement = Float32Linear(head.in_features, head.out_features, head.bias is not None)
    replacement.weight, replacement.bias = head.weight, head.bias  # the very same parameters
    classifier.set_submodule("score", replacement)
