"""PEFT on a reward model: the head is trained and saved with the adapter, never adapted itself."""

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from inspect import formatannotation
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast, get_type_hints

from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftType,
    TaskType,
    get_peft_config,
    get_peft_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from rayrm.config.faults import shown
from rayrm.config.schema import LoraSection, ModelSection
from rayrm.errors import ConfigError
from rayrm.model.heads import Head, find_head
from rayrm.model.tokenizer import check_is_no_run

logger = logging.getLogger(__name__)

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]
"""Opens a context in which partitioned parameters are whole, and in which rank 0 may write them."""

HEADS = ("score", "classifier")
"""Names of the head in transformers' sequence classifiers; peft knows the same."""
_NEED_MORE = {
    PeftType.ADALORA: "its ranks are cut during training",
    PeftType.XLORA: "it mixes adapters that are trained already",
    PeftType.POLY: "it needs the number of each row's task",
    PeftType.TRAINABLE_TOKENS: "it reads rows of embeddings that ZeRO-3 has parted",
    PeftType.OSF: "it changes the gradients of whole weights",
}
"""Methods that wrap layers and cannot be trained by optimizer steps alone."""
_REFUSALS = (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError, KeyError)
"""How peft's methods say that fields do not fit each other or the model."""
_FRESH = ("gaussian", "orthogonal")
"""Ways to draw LoRA's weights that leave the base as it is."""


def add_adapter(
    classifier: PreTrainedModel,
    model: ModelSection,
    *,
    head: str,
    gather: Gather,
    train_embeddings: bool = False,
) -> tuple[PreTrainedModel, PeftModel, str]:
    """Wrap a classifier in the adapter that ``model`` asks for: a new one, or one to go on with.

    Adapters keep the type of the weights they sit on: DeepSpeed refuses mixed types in one
    parameter group, and holds float32 master copies of whatever is trained.

    Args:
        classifier: base of the adapter.
        model: asks for ``lora``, ``peft`` or ``adapter_path``; with the last and another, the old
            adapter is merged into the weights first.
        head: name of the module that is trained in full beside the adapter.
        gather: makes partitioned parameters whole.
        train_embeddings: train those of a new adapter's base in full, too, since some are new.

    Returns:
        The classifier inside, what wraps it, and where its head is from, or nothing if the adapter
        has none.

    Raises:
        ConfigError: the adapter is of another base, cannot be read, names no layer of this model,
            or is of a method that does not work here.
    """
    origin = ""
    if model.adapter_path is not None:
        wrapped, origin = reload_adapter(classifier, model.adapter_path, head=head, gather=gather)
        if not model.stacks_adapter:
            return classifier, wrapped, origin
        classifier = merge_adapter(wrapped, gather)
    field = "model.peft" if model.peft else "model.lora"
    config = _lora_config(model.lora) if model.lora is not None else _peft_config(model.peft)
    _check_names(config, classifier, field)
    if train_embeddings:
        _train_embeddings(config, classifier)
    return classifier, _wrap(classifier, config, head=head, field=field, gather=gather), origin


def _train_embeddings(config: Any, classifier: PreTrainedModel) -> None:
    """Have peft train and save the embeddings; its way to train rows alone needs CUDA in ZeRO-3."""
    embeddings = classifier.get_input_embeddings()
    path = next(name for name, module in classifier.named_modules() if module is embeddings)
    config.modules_to_save = [*(config.modules_to_save or []), path.rpartition(".")[2]]


def read_adapter_config(adapter_path: str) -> PeftConfig:
    """Read what peft saved about an adapter.

    Raises:
        ConfigError: the folder holds no adapter.
    """
    check_is_no_run(adapter_path, field="model.adapter_path")
    if not Path(adapter_path, "adapter_config.json").is_file():
        raise ConfigError(
            f"model.adapter_path: {adapter_path} holds no adapter (adapter_config.json is missing)"
        )
    try:
        return PeftConfig.from_pretrained(adapter_path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"model.adapter_path: cannot read {adapter_path} ({error})") from error


def _lora_config(lora: LoraSection) -> LoraConfig:
    targets = lora.target_modules
    return LoraConfig(
        r=lora.r,
        lora_alpha=cast("int", lora.lora_alpha),
        lora_dropout=lora.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )


def _peft_config(fields: dict[str, Any]) -> PeftConfig:
    """Return the configuration that ``model.peft`` spells out."""
    name = str(fields["peft_type"]).upper()
    known = sorted(kind.value for kind in PeftType)
    if name not in known:
        raise ConfigError(f"model.peft: peft_type {name} is none of {', '.join(known)}")
    _check_kind(PeftType(name), "model.peft")  # first: it may ask for fields that change nothing
    _check_types(fields, PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name)])
    _check_fields(fields)
    try:
        return get_peft_config({**fields, "peft_type": name})
    except _REFUSALS as error:
        raise ConfigError(f"model.peft: {error}") from error


def _check_types(fields: dict[str, Any], config_class: type[PeftConfig]) -> None:
    """Hold each value to the type that peft declares, which it does not look at itself."""
    declared = get_type_hints(config_class)
    for name in fields.keys() & declared.keys():
        try:
            with suppress(PydanticUserError):  # a type that only code can give
                TypeAdapter(declared[name]).validate_python(fields[name], strict=True)
        except ValidationError as error:
            expected = formatannotation(declared[name])
            raise ConfigError(
                f"model.peft.{name}: got {shown(fields[name])}, expected {expected}"
            ) from error


def _check_fields(fields: dict[str, Any]) -> None:
    """Refuse what peft takes and what cannot be trained, or reloaded, as it is done here."""
    if fields.get("inference_mode"):
        raise ConfigError("model.peft.inference_mode: true trains nothing; leave it out")
    if fields.get("trainable_token_indices") is not None:
        raise ConfigError(
            "model.peft.trainable_token_indices: peft reads rows of embeddings that ZeRO-3 has "
            "parted; train the embeddings whole: modules_to_save: [embed_tokens]"
        )
    begins_as = fields.get("init_lora_weights", True)
    if isinstance(begins_as, str) and begins_as not in _FRESH:
        raise ConfigError(
            f"model.peft.init_lora_weights: {begins_as} changes the base or looks at data first; "
            f"take true, false, {' or '.join(_FRESH)}"
        )


def _check_names(config: Any, classifier: PreTrainedModel, field: str) -> None:
    """Hold the names to the modules there are: peft passes over one that it does not find."""
    paths = [path for path, _ in classifier.named_modules() if path]
    targets = getattr(config, "target_modules", None) or []
    if isinstance(targets, str):
        shorthand = targets.lower() == "all-linear"
        found = shorthand or any(_matches(targets, path, field) for path in paths)
        unknown = [] if found else [("target_modules", targets)]
    else:
        dotted = [f".{path}" for path in paths]
        unknown = [("target_modules", name) for name in targets if not _ends(dotted, f".{name}")]
    saved = [name for name in config.modules_to_save or [] if name not in HEADS]
    unknown += [("modules_to_save", name) for name in saved if not _ends(paths, name)]
    if unknown:
        part, name = unknown[0]
        weights = [path for path, _ in classifier.named_parameters()]
        names = dict.fromkeys(path.split(".")[-2] for path in weights)
        raise ConfigError(f"{field}.{part}: {name} is no module here: there are {', '.join(names)}")


def _ends(paths: list[str], end: str) -> bool:
    return any(path.endswith(end) for path in paths)


def _matches(pattern: str, path: str, field: str) -> bool:
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error as error:
        raise ConfigError(f"{field}.target_modules: no regular expression ({error})") from error


def _check_kind(kind: PeftType, field: str) -> None:
    if kind in _NEED_MORE:
        raise ConfigError(f"{field}: {kind.value} does not train here: {_NEED_MORE[kind]}")


def _wrap(
    classifier: PreTrainedModel, config: PeftConfig, *, head: str, field: str, gather: Gather
) -> PeftModel:
    """Wrap in an adapter of fresh weights; the module named ``head`` is trained in full."""
    given: Any = config
    kind = PeftType(given.peft_type)
    if given.is_prompt_learning or given.is_adaption_prompt:
        raise ConfigError(
            f"{field}: {kind.value} puts vectors of its own before the text or into attention; "
            "take a method that wraps layers, such as LORA, LOHA, LOKR, IA3, OFT or VERA"
        )
    _check_kind(kind, field)
    if given.task_type not in (None, TaskType.SEQ_CLS):
        raise ConfigError(
            f"{field}: task_type is {given.task_type}; a reward model's is SEQ_CLS: leave it out"
        )
    given.task_type = TaskType.SEQ_CLS  # by which peft trains and saves the head
    if hasattr(given, "exclude_modules") and given.exclude_modules is None:
        given.exclude_modules = [head]
    # LoRA takes its sizes from the layers, most others from weights that have to be whole for it
    looked_at = [] if kind == PeftType.LORA else list(classifier.parameters())
    try:
        with gather(looked_at):
            wrapped = get_peft_model(classifier, given, autocast_adapter_dtype=False)
    except _REFUSALS as error:
        raise ConfigError(f"{field}: {error}") from error
    return cast("PeftModel", wrapped)


def reload_adapter(
    classifier: PreTrainedModel,
    adapter_path: str,
    *,
    head: str,
    gather: Gather = lambda parameters: nullcontext(),
) -> tuple[PeftModel, str]:
    """Wrap in a saved adapter, trained on, and tell where its head is from.

    It is in the adapter, or in a file beside it; else the classifier's stays: nothing is told.
    """
    config: Any = read_adapter_config(adapter_path)
    _tell_of_another_base(config, classifier, adapter_path)
    hidden_size = getattr(classifier.get_submodule(head), "in_features", None)
    beside = find_head(adapter_path, field="model.adapter_path", hidden_size=hidden_size)
    config.task_type, config.inference_mode = None, False
    wrapped = _wrap(classifier, config, head=head, field="model.adapter_path", gather=gather)
    is_meta = next(wrapped.parameters()).is_meta
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    weights = _read_weights(adapter_path)
    try:
        with gather(list(trained.values())):
            new_head = _add_missing_head(weights, trained, head, beside)
            # without weights to fill there are only shapes to compare
            found = set_peft_model_state_dict(wrapped, weights, low_cpu_mem_usage=is_meta)
    except (ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().split("\n")[:2]
        raise _of_another_base(adapter_path, " ".join(line.strip() for line in first)) from error
    missing = [name for name in found.missing_keys if name in trained]
    if found.unexpected_keys or missing:
        name = (found.unexpected_keys or missing)[0]
        raise _of_another_base(adapter_path, f"{name} is in one of the two alone")
    if not new_head:
        return wrapped, f"that of {adapter_path}"
    if beside is None:
        logger.info("%s has no head: %s stay as in the model", adapter_path, ", ".join(new_head))
    return wrapped, str(beside or "")


def _tell_of_another_base(
    config: PeftConfig, classifier: PreTrainedModel, adapter_path: str
) -> None:
    """Warn where base and model have other names: weights of one shape fit either."""
    base, model = str(config.base_model_name_or_path), str(classifier.name_or_path)
    if base != model and not _same_files(base, model):
        logger.warning(
            "model.adapter_path: the adapter at %s was trained on %s, and goes on with %s",
            adapter_path, base, model,
        )  # fmt: skip


def _same_files(one: str, other: str) -> bool:
    """Whether two folders hold the same weights: an exported adapter's base is links to them."""
    files = [[*Path(folder).glob("model*.safetensors")] for folder in (one, other)]
    return all(files) and all(any(file.samefile(twin) for twin in files[1]) for file in files[0])


def _read_weights(adapter_path: str) -> dict[str, Tensor]:
    names = ("adapter_model.safetensors", "adapter_model.bin")
    if not any(Path(adapter_path, name).is_file() for name in names):
        raise ConfigError(f"model.adapter_path: {adapter_path} has no weights ({names[0]})")
    try:
        return load_peft_weights(adapter_path, device="cpu")
    except (OSError, ValueError, SafetensorError, UnpicklingError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model.adapter_path: the weights in {adapter_path} cannot be read ({first_line}); "
            "copy the adapter again"
        ) from error


def _add_missing_head(
    weights: dict[str, Tensor],
    trained: dict[str, nn.Parameter],
    head: str,
    beside: Head | None,
) -> list[str]:
    """Give an adapter without a head that beside it, or the model's; return the names it lacked."""
    inside = f".{head}.modules_to_save.default."
    own = {name.replace(inside, f".{head}."): p for name, p in trained.items() if inside in name}
    missing = [name for name in own if name not in weights]
    weights.update({name: own[name].detach() for name in missing})
    for name in missing:
        if beside is not None and name.endswith(f".{head}.weight"):
            weights[name] = beside.weight
    return missing


def _of_another_base(adapter_path: str, reason: str) -> ConfigError:
    base = read_adapter_config(adapter_path).base_model_name_or_path
    return ConfigError(
        f"model.adapter_path: the adapter at {adapter_path} does not fit this model ({reason}); it "
        f"was trained on {base}: give that as model.name_or_path"
    )


def adapter_has_head(adapter_path: str) -> bool:
    """Whether a saved adapter brings the head that it was trained with."""
    names = _read_weights(adapter_path)
    return any(f".{head}." in name for name in names for head in HEADS)


def merge_adapter(wrapped: Any, gather: Gather = lambda parameters: nullcontext()) -> Any:
    """Add an adapter to the weights it sits on, and return the bare classifier.

    Layer by layer, so that no more than one has to be whole at a time.
    """
    for module in wrapped.modules():
        if isinstance(module, BaseTunerLayer):
            with gather(list(cast("nn.Module", module).parameters())):
                module.merge()
    merged = wrapped.merge_and_unload()  # each layer is merged; takes over what was trained whole
    for name, module in list(merged.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):  # not every method takes the head over
            merged.set_submodule(name, module.modules_to_save[module.active_adapters[0]])
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    return merged
