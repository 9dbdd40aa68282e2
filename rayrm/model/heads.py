"""The scalar head of a reward model, under whatever name its trainer saved it."""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from rayrm.errors import ConfigError

_MODULES = ("score", "value_head", "v_head.summary")
"""As transformers, OpenRLHF and TRL's value-head models call it."""
_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "value_head.safetensors",  # LLaMA-Factory's, beside a language model or an adapter
    "value_head.bin",
)


@dataclass(frozen=True, slots=True)
class Head:
    """What a file holds of a head."""

    weight: Tensor
    """``[1, hidden]``."""
    bias: float
    """Transformers' heads have none; the same for every text, it moves no difference."""
    place: str
    """Names the tensor and the file."""

    def __str__(self) -> str:
        """Tell where the head is from, and what becomes of its bias."""
        if not self.bias:
            return self.place
        side = "lower" if self.bias > 0 else "higher"
        return f"{self.place}, without its bias: rewards are {side} by {abs(self.bias):.6g}"


def find_head(
    name_or_path: str,
    *,
    field: str,
    revision: str = "main",
    module: str | None = None,
    hidden_size: int | None = None,
) -> Head | None:
    """Read the head that a model, or an adapter, has in its files; null where there is none.

    Args:
        name_or_path: a folder or hub name.
        field: of the configuration that gave it.
        revision: of a hub model.
        module: a further name to look for, ``value_head_prefix`` of OpenRLHF's configuration.
        hidden_size: of the model that is to take it, where that is known.

    Raises:
        ConfigError: a file cannot be read, or its head does not fit.
    """
    modules = _MODULES if module is None else (module, *_MODULES)
    wanted = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
    for file in _FILES:
        try:
            found = _read(name_or_path, file, wanted, revision=revision)
        except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
            first_line = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"{field}: {file} of {name_or_path} cannot be read ({first_line}); copy it again"
            ) from error
        for module in modules:
            if f"{module}.weight" in found:
                head = _head_of(found, module, f"{module} of {Path(name_or_path, file)}", field)
                if hidden_size not in (None, head.weight.shape[1]):
                    raise ConfigError(
                        f"{field}: {head.place} takes a hidden size of {head.weight.shape[1]}, the "
                        f"model has {hidden_size}; copy model and head from one checkpoint"
                    )
                return head
    return None


def rename_head(config: PretrainedConfig) -> None:
    """Let OpenRLHF, should it load what is saved, find ``score``, and no moments of old rewards."""
    if hasattr(config, "value_head_prefix"):
        config.value_head_prefix = "score"
        for name in {"mean", "std"} & set(vars(config)):
            delattr(config, name)


def _head_of(found: dict[str, Tensor], module: str, place: str, field: str) -> Head:
    weight, bias = found[f"{module}.weight"], found.get(f"{module}.bias")
    if weight.ndim != 2 or weight.shape[0] != 1 or (bias is not None and bias.numel() != 1):
        raise ConfigError(
            f"{field}: {place} has the shape {list(weight.shape)}, that of a reward model "
            "[1, hidden]; start from its backbone, saved without this head"
        )
    return Head(weight, 0.0 if bias is None else bias.item(), place)


def _read(
    name_or_path: str, file: str, wanted: Sequence[str], *, revision: str
) -> dict[str, Tensor]:
    """Return those of the wanted tensors that a file holds, which need not be there."""
    path = cached_file(
        name_or_path, file, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if path is None:
        return {}
    if file.endswith(".json"):
        shard_of = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        found: dict[str, Tensor] = {}
        for shard in {shard_of[name] for name in wanted if name in shard_of}:
            found |= _read(name_or_path, shard, wanted, revision=revision)
        return found
    if file.endswith(".safetensors"):
        with safe_open(path, "pt") as tensors:
            return {name: tensors.get_tensor(name) for name in wanted if name in tensors.keys()}  # noqa: SIM118
    pickled = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    return {name: pickled[name] for name in wanted if name in pickled}
