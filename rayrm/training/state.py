"""Training state by parameter, not by rank: a run goes on with any number of workers.

ZeRO spreads each weight and its moments over the ranks. Here they are whole: every parameter lies
in the file of one rank, and every rank takes its parts of all of them.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rayrm.errors import CheckpointError
from rayrm.training.commits import SCHEDULE, WEIGHT, state_file

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square (Kingma and Ba 2014)."""
KINDS = (WEIGHT, *MOMENTS)
_RANDOM = "random."
_SUMS = "sums"
"""In a state file's metadata: the sum of each tensor's bytes, which a flipped bit changes."""


class TrainingState:
    """Weights, moments, schedule and random state of a DeepSpeed engine under any ZeRO stage."""

    def __init__(self, engine: Any, scheduler: Any, *, stage: int, device: torch.device) -> None:
        """``engine`` is DeepSpeed's, its optimizer a torch AdamW; ``scheduler`` is torch's."""
        self._engine = engine
        self._scheduler = scheduler
        self._stage = stage
        self._device = device
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        if stage in (1, 2):  # DeepSpeed looks for the moments before Adam makes them, and only once
            self._make_moments()

    def save(self, folder: str) -> None:
        """Write this rank's share into ``folder``; every rank must call this.

        Raises:
            OSError: the disk is full, or refuses to be written.
        """
        self._make_moments()
        own = self._random_states()
        loads = [0] * self._world_size
        for name, parameter in self._trained():
            owner = loads.index(min(loads))
            for kind in KINDS:
                whole = self._read(parameter, kind)
                loads[owner] += whole.numel()
                if owner == self._rank:
                    own[f"{kind}.{name}"] = whole.to("cpu", copy=True).contiguous()
        try:
            sums = {name: _sum_of(tensor) for name, tensor in own.items()}
            path = os.path.join(folder, state_file(self._rank, self._world_size))
            save_file(own, path, metadata={_SUMS: json.dumps(sums)})
        except SafetensorError as error:  # what the operating system says is in its text
            raise OSError(str(error)) from error
        if self._rank == 0:
            num_updates = max((int(x["step"]) for x in self._adam.state.values()), default=0)
            schedule = {**self._scheduler.state_dict(), "num_updates": num_updates}
            with open(os.path.join(folder, SCHEDULE), "w", encoding="utf-8") as file:
                json.dump(schedule, file)

    def load(self, folder: str, *, world_size: int) -> None:
        """Read what ``world_size`` ranks saved; nothing is changed if it does not fit.

        With another number of ranks the random states begin anew, which only dropout feels.

        Raises:
            CheckpointError: a file is missing or broken, or it is of another model. Where only a
                tensor's content is broken, some of the state is that of the checkpoint by then.
        """
        try:
            with contextlib.ExitStack() as opened:
                paths = [os.path.join(folder, state_file(r, world_size)) for r in range(world_size)]
                files = [opened.enter_context(safe_open(path, "pt")) for path in paths]
                place = {key: file for file in files for key in _keys(file)}
                with open(os.path.join(folder, SCHEDULE), encoding="utf-8") as file:
                    schedule = json.load(file)
                self._check_fit(folder, place)
                self._make_moments()
                for name, parameter in self._trained():
                    for kind in KINDS:
                        key = f"{kind}.{name}"
                        self._write(parameter, kind, _checked(place[key], key))
                if world_size == self._world_size:
                    self._set_random_states(files[self._rank])
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: cannot be read ({error})") from error
        self._finish_writing(schedule.pop("num_updates"))
        self._scheduler.load_state_dict(schedule)
        for group, rate in zip(self._adam.param_groups, schedule["_last_lr"], strict=True):
            group["lr"] = rate  # torch's schedulers set it with their next step only

    def _check_fit(self, folder: str, place: dict[str, Any]) -> None:
        """Compare names and shapes before anything is overwritten."""
        expected = {
            f"{kind}.{name}": list(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in self._trained()
            for kind in KINDS
        }
        for key, shape in expected.items():
            found = list(place[key].get_slice(key).get_shape()) if key in place else "missing"
            if found != shape:
                raise CheckpointError(
                    f"{folder}: {key} is {found}, and {shape} in this model: this is a checkpoint "
                    "of another model; give another run.name"
                )
        for key in place:
            if key not in expected and not key.startswith(_RANDOM):
                raise CheckpointError(
                    f"{folder}: {key} is nothing that this model trains: this is a checkpoint of "
                    "another model; give another run.name"
                )

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trained parameters by name, in the same order on every rank."""
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def _read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """Return one of ``KINDS`` whole, float32, shaped as the parameter; every rank must call."""
        if self._stage == 0:
            whole = parameter if kind == WEIGHT else self._adam.state[parameter][kind]
        elif kind == WEIGHT:
            whole = safe_get_full_fp32_param(parameter)
        else:
            whole = safe_get_full_optimizer_state(parameter, kind)
        assert whole is not None
        return whole.detach()

    def _write(self, parameter: nn.Parameter, kind: str, whole: Tensor) -> None:
        """Take one of ``KINDS``, of which this rank keeps its part."""
        if self._stage == 0:
            target = parameter.data if kind == WEIGHT else self._adam.state[parameter][kind]
            target.copy_(whole)
        elif self._stage == 3:
            self._write_part(parameter, kind, whole)
        elif kind == WEIGHT:
            safe_set_full_fp32_param(parameter, whole)
        else:
            safe_set_full_optimizer_state(parameter, whole, kind)

    def _write_part(self, parameter: Any, kind: str, whole: Tensor) -> None:
        # parts are of one size, the last ones filled up; DeepSpeed's own way to set a whole
        # parameter does not fill them
        size = parameter.ds_tensor.ds_numel
        start = min(self._rank * size, whole.numel())
        own = whole.flatten()[start : start + size]
        part = torch.zeros(size, dtype=torch.float32, device=parameter.ds_tensor.device)
        part[: own.numel()] = own
        if kind == WEIGHT:
            safe_set_local_fp32_param(parameter, part)
            parameter.ds_tensor.data.copy_(part)
        else:
            safe_set_local_optimizer_state(parameter, part, kind)

    def _finish_writing(self, num_updates: int) -> None:
        """Make what was written count: Adam's bias correction, and low-precision weights."""
        for state in self._adam.state.values():
            state["step"].fill_(num_updates)
        if self._stage in (1, 2):
            self._engine.optimizer.update_lp_params()

    @property
    def _adam(self) -> torch.optim.Optimizer:
        return self._engine.basic_optimizer

    def _make_moments(self) -> None:
        """Make the moments that Adam itself makes with its first update."""
        for flat in self._flat_parameters():
            if not self._adam.state[flat]:
                # on the weights' device, as the fused kernels want it
                step = torch.zeros((), dtype=torch.float32, device=flat.device)
                moments = {name: torch.zeros_like(flat) for name in MOMENTS}
                self._adam.state[flat] = {"step": step, **moments}
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _flat_parameters(self) -> list[Tensor]:
        """Return what Adam updates: several parameters' parts in a row under ZeRO."""
        if self._stage == 3:  # Adam holds them only while it updates them
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [flat for group in self._adam.param_groups for flat in group["params"]]

    def _random_states(self) -> dict[str, Tensor]:
        states = {f"{_RANDOM}cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states[f"{_RANDOM}cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _set_random_states(self, file: Any) -> None:
        torch.set_rng_state(file.get_tensor(f"{_RANDOM}cpu"))
        if self._device.type == "cuda" and f"{_RANDOM}cuda" in _keys(file):
            torch.cuda.set_rng_state(file.get_tensor(f"{_RANDOM}cuda"), self._device)


def _sum_of(tensor: Tensor) -> int:
    """Return the sum of a tensor's memory, taken as whole numbers of four bytes where it can be."""
    flat = tensor.flatten()
    words = flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8)
    return int(words.sum(dtype=torch.int64))


def _checked(file: Any, key: str) -> Tensor:
    """Return a tensor of a state file that is as it was saved."""
    tensor = file.get_tensor(key)
    sums = json.loads((file.metadata() or {}).get(_SUMS, "{}"))
    if key in sums and _sum_of(tensor) != sums[key]:
        raise ValueError(
            f"{key} is not as it was saved: the disk or a copy broke it; remove this checkpoint to "
            "go on from the one before"
        )
    return tensor


def _keys(file: Any) -> list[str]:
    return list(file.keys())
