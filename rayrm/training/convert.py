"""Export without training: from a checkpoint, an adapter or a model to a folder that loads."""

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from rayrm.config.loader import load_config
from rayrm.config.schema import ModelSection, RunConfig
from rayrm.data.packing import pack_pairs
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import CheckpointError, ConfigError
from rayrm.model.adapters import adapter_has_head, merge_adapter, read_adapter_config
from rayrm.model.build import build_reward_model
from rayrm.model.heads import find_head
from rayrm.model.reward import EncoderRewardModel, RewardModel
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.card import CARD, CURVES, card_of_merged, write_card
from rayrm.training.commits import (
    CHECKPOINTS,
    PROGRESS,
    WEIGHT,
    complete_checkpoints,
    state_file,
)
from rayrm.training.export import BASE, Proof, export_model, take_proof
from rayrm.training.job import MODEL, REPORT
from rayrm.training.storage import RunFolder
from rayrm.training.tracking import METRICS

logger = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the weights come from."""

    model: ModelSection
    """What to build, in the dtype that it was trained in."""
    tokenizer_path: str
    """Folder or hub name of its tokenizer."""
    folder: str
    """Of the checkpoint, whose training state is laid over the model, or of the model itself."""
    run: RunConfig | None = None
    """Configuration of the run that the checkpoint is of; null where ``folder`` is a model."""
    reward_moments: tuple[float, float] | None = None
    """Mean and standard deviation of its rewards, where they are known."""


def convert(source: str, out: str, *, merge: bool = False, dtype: Dtype | None = None) -> float:
    """Write the model of ``source`` to ``out``, reload it with plain libraries and compare.

    Args:
        source: a run, one of its checkpoints, an adapter or a model. Of a run without an exported
            model its newest complete checkpoint is taken.
        out: a folder that is not there yet, or is empty.
        merge: add an adapter to its base, so that no more than transformers is needed to load it.
        dtype: of the weights; null keeps that of the training.

    Returns:
        The largest difference between a reward before and after.

    Raises:
        ConfigError: there is nothing to export, or no place for it.
        CheckpointError: the training state is broken, or the reloaded model scores differently.
    """
    source, out = os.path.expanduser(source), os.path.abspath(os.path.expanduser(out))
    _check_place(source, out)
    origin = find_origin(source)
    if merge and not origin.model.trains_adapter:
        raise ConfigError(
            f"{source}: is a whole model, there is nothing to merge; leave out --merge"
        )
    dtype = dtype or origin.model.dtype
    built_in = "float32" if merge else dtype  # in float32 a merge loses nothing
    section = origin.model.model_copy(update={"dtype": built_in})
    tokenizer = load_tokenizer(section.model_copy(update={"name_or_path": origin.tokenizer_path}))
    dequantized = section.quantization is not None
    model = build_reward_model(section, tokenizer, seed=0, dequantized=dequantized).eval()
    if origin.run is None:
        logger.info(model.origin)
    else:
        _load_weights(model, origin.folder)
    proof = _prove_on(model, tokenizer)
    if merge:
        model.classifier = merge_adapter(model.classifier)
        section = section.model_copy(
            update={"lora": None, "peft": {}, "adapter_path": None, "quantization": None}
        )
    model.classifier.to(getattr(torch, dtype))
    state: dict[str, Tensor] = {
        name: parameter.detach()
        for name, parameter in model.classifier.named_parameters()
        if parameter.requires_grad or not section.trains_adapter
    }
    with RunFolder(os.path.dirname(out)).building(os.path.basename(out)) as place:
        difference = export_model(
            model,
            state,
            tokenizer,
            section.model_copy(update={"dtype": dtype}),
            folder=place,
            final_path=out,
            proof=proof,
            reward_moments=origin.reward_moments,
        )
        _write_card(
            place, origin, tokenizer, is_adapter=section.trains_adapter, difference=difference
        )
    return difference


def _check_place(source: str, out: str) -> None:
    """Find that ``out`` cannot be written before there is anything to write."""
    if Path(out).resolve().is_relative_to(Path(source).resolve()):
        raise ConfigError(f"{out}: lies in {source}, which stays as it is; name another")
    if os.path.lexists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise ConfigError(f"{out}: is there already, and not an empty folder; name another")
    try:
        os.makedirs(out, exist_ok=True)
        os.rmdir(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be made ({error}); name another") from error


def find_origin(source: str) -> Origin:
    """Tell what ``source`` is by the files that are there.

    Raises:
        ConfigError: it is neither a run, a checkpoint, an adapter nor a model with a head.
    """
    place = Path(source)
    if not place.is_dir():
        raise ConfigError(f"{source}: there is no such folder")
    if (place / MODEL).is_dir():
        return find_origin(str(place / MODEL))
    if (place / PROGRESS).is_file():
        return _of_checkpoint(place)
    if (place / CHECKPOINTS).is_dir() or (place / REPORT).is_file():
        saved = complete_checkpoints(RunFolder(str(place)))
        if not saved:
            raise ConfigError(f"{source}: this run has no model and no complete checkpoint")
        logger.info("no exported model: taking the checkpoint of step %d", saved[-1].step)
        return _of_checkpoint(place / CHECKPOINTS / saved[-1].name)
    if (place / "adapter_config.json").is_file():
        base = _base_of(source)
        if not adapter_has_head(source) and find_head(source, field=source) is None:
            raise ConfigError(f"{source}: this adapter has no head; it is not a reward model's")
        has_tokenizer = (place / "tokenizer_config.json").is_file()
        told_by = source if (place / "config.json").is_file() else base
        config = _read_config(told_by)
        section = ModelSection(
            name_or_path=base,
            adapter_path=source,
            dtype=_dtype_of(config),
            quantization=getattr(config, "base_quantization", None),
        )
        tokenizer_path = source if has_tokenizer else base
        return Origin(section, tokenizer_path, source, reward_moments=_moments_of(config))
    if (place / "config.json").is_file():
        config = _read_config(source)
        _check_has_head(source, config)
        section = ModelSection(name_or_path=source, dtype=_dtype_of(config))
        return Origin(section, source, source, reward_moments=_moments_of(config))
    raise ConfigError(
        f"{source}: is neither a run of rayrm, one of its checkpoints, an adapter nor a model"
    )


def _base_of(adapter: str) -> str:
    """Return the base that an adapter names, or that beside it where its folder was moved.

    Raises:
        ConfigError: it is not there, or its weights are links to what is not.
    """
    base = str(read_adapter_config(adapter).base_model_name_or_path)
    if not os.path.isabs(base):
        return base
    beside = os.path.join(adapter, BASE)
    if not os.path.isdir(base) and os.path.isdir(beside):
        base = beside
    if not os.path.isdir(base):
        raise ConfigError(
            f"{adapter}: its base, {base}, is not there; bring it back, or write its new place "
            "as base_model_name_or_path into adapter_config.json"
        )
    for file in Path(base).iterdir():
        if not file.exists():
            raise ConfigError(
                f"{adapter}: the weights of its base are those at {os.readlink(file)}, which is "
                "not there; bring it back"
            )
    return base


def _check_has_head(source: str, config: Any) -> None:
    names = config.architectures or []
    if any(name.endswith("ForSequenceClassification") for name in names):
        return
    module = getattr(config, "value_head_prefix", None)
    if find_head(source, field=source, module=module) is None:
        raise ConfigError(
            f"{source}: {', '.join(names) or 'this model'} has no scalar head; it is not a reward "
            "model"
        )


def _moments_of(config: Any) -> tuple[float, float] | None:
    for mean, std in (("reward_mean", "reward_std"), ("mean", "std")):  # the latter OpenRLHF's
        if getattr(config, mean, None) is not None:
            return getattr(config, mean), getattr(config, std)
    return None


def _read_config(name_or_path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(f"{name_or_path}: config.json cannot be read ({first_line})") from error


def _dtype_of(config: Any) -> Dtype:
    return "bfloat16" if config.dtype == torch.bfloat16 else "float32"


def _of_checkpoint(place: Path) -> Origin:
    try:
        run = load_config(json.loads((place / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place}: not a complete checkpoint ({error})") from error
    return Origin(run.model, run.model.name_or_path, str(place), run=run)


def _load_weights(model: RewardModel | EncoderRewardModel, checkpoint: str) -> None:
    """Take the trained weights out of a checkpoint, whatever number of ranks wrote it."""
    left = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        progress = json.loads(Path(checkpoint, PROGRESS).read_text(encoding="utf-8"))
        world_size = progress["world_size"]
        for rank in range(world_size):
            with safe_open(Path(checkpoint, state_file(rank, world_size)), "pt") as file:
                for key in file.keys():  # noqa: SIM118, it is no dict
                    kind, _, name = key.partition(".")
                    if kind == WEIGHT and name in left:
                        left.pop(name).data.copy_(file.get_tensor(key))
    except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint}: cannot be read ({error})") from error
    if left:
        raise CheckpointError(f"{checkpoint}: {next(iter(left))} is missing in this checkpoint")


def _prove_on(model: RewardModel | EncoderRewardModel, tokenizer: Any) -> Proof:
    """Score texts of ids drawn from the whole vocabulary but the marks."""
    marks = set(tokenizer.all_special_ids)
    ids = np.array([i for i in range(len(tokenizer)) if i not in marks], dtype=np.int32)
    draw = np.random.default_rng(0)
    pairs = [
        TokenizedPair(draw.choice(ids, 12), draw.choice(ids, long), draw.choice(ids, short), 0.0)
        for long, short in ((20, 3), (7, 11))
    ]

    def score(batch: Any) -> tuple[Tensor, Tensor]:
        rewards = model(**pack_pairs(batch, model.layout).inputs)
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        return chosen, rejected

    with torch.no_grad():
        return take_proof(score, pairs)


def _write_card(
    place: str,
    origin: Origin,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_adapter: bool,
    difference: float,
) -> None:
    """Write the card of a checkpoint's run, or take over the one that the model has."""
    if origin.run is None:
        for name in (CARD, CURVES):
            if Path(origin.folder, name).is_file():
                shutil.copyfile(Path(origin.folder, name), Path(place, name))
        card = Path(place, CARD)
        if card.is_file() and not is_adapter:
            card.write_text(card_of_merged(card.read_text(encoding="utf-8")), encoding="utf-8")
        return
    progress = json.loads(Path(origin.folder, PROGRESS).read_text(encoding="utf-8"))
    run = RunFolder(str(Path(origin.folder).parents[1]))
    lines = [json.loads(line) for line in run.read_lines(METRICS)]
    write_card(
        place,
        origin.run,
        is_adapter=is_adapter,
        report=run.read_json(REPORT),
        lines=[line for line in lines if line["step"] <= progress["step"]],
        metrics=progress["metrics"],
        tokenizer=tokenizer,
        reward_moments=None,
        reload_difference=difference,
    )
