"""The checkpoints of a run, judged by their files: half of one counts for nothing.

Ray Train keeps a record of what it committed. A kill can leave folders that are not in it, and a
kill or a full disk the record itself cut short, since it is written in place.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rayrm.errors import CheckpointError
from rayrm.training.storage import RunFolder

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the run's folder."""
ASIDE = "part_"
"""Begins the name of a checkpoint on its way into that folder."""
PROGRESS = "progress.json"
SCHEDULE = "schedule.json"
WEIGHT = "weight"
"""Begins the key of a trained weight in a state file; its parameter's name follows."""
_RECORD = f"{CHECKPOINTS}/checkpoint_manager_snapshot.json"


def state_file(rank: int, world_size: int) -> str:
    """Return the name of the file with one rank's share of the training state."""
    return f"state-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint."""

    name: str
    step: int
    score: float
    """Of its weights, higher is better; minus infinity where they were not evaluated."""


def complete_checkpoints(folder: RunFolder) -> list[Saved]:
    """Return what a run can go on from, the newest last; reads no more than the files' headers."""
    return _complete(_inspect(folder, name) for name in _names(folder))


def settle_checkpoints(folder: RunFolder) -> tuple[Saved, ...]:
    """Bring folders and Ray Train's record to agree, before it reads either.

    What was never committed is removed. Where a committed checkpoint is broken, or the record is,
    Ray Train begins a new record, and has to be told what to go on from.

    Returns:
        The complete checkpoints that Ray Train knows nothing of, the newest last; normally none.

    Raises:
        CheckpointError: something was committed and nothing complete is left.
    """
    for name in folder.entries(CHECKPOINTS):
        if name.startswith(ASIDE):
            folder.delete(f"{CHECKPOINTS}/{name}")
    there = set(_names(folder))
    recorded = _read_record(folder)
    found = {name: _inspect(folder, name) for name in there.union(recorded or [])}
    complete = _complete(found.values())
    listed = sorted(there) if recorded is None else recorded
    broken = [told for name in listed if isinstance(told := found[name], str)]
    if recorded is not None and not broken:
        for name in there - set(recorded):
            folder.delete(f"{CHECKPOINTS}/{name}")
        return ()
    if not complete and folder.exists(_RECORD):
        told = "; ".join(broken) or f"{folder.path(_RECORD)} cannot be read"
        raise CheckpointError(
            f"{told}: no complete checkpoint is left in {folder.path(CHECKPOINTS)}; bring it back, "
            "or remove the folder of the run to begin anew"
        )
    for told in broken if complete else []:
        logger.warning("%s; going on from step %d instead", told, complete[-1].step)
    for name in there - {saved.name for saved in complete}:
        folder.delete(f"{CHECKPOINTS}/{name}")
    folder.delete(_RECORD)
    return tuple(complete)


def _names(folder: RunFolder) -> list[str]:
    names = folder.entries(CHECKPOINTS)
    return [name for name in names if name.startswith("checkpoint_") and not name.endswith(".json")]


def _complete(found: Iterable[Saved | str]) -> list[Saved]:
    return sorted((x for x in found if isinstance(x, Saved)), key=lambda saved: saved.step)


def _read_record(folder: RunFolder) -> list[str] | None:
    """Return the names that Ray Train committed, or None where there is no telling."""
    try:
        record = folder.read_json(_RECORD)
        return [entry["checkpoint_dir_name"] for entry in record["checkpoint_results"]]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _inspect(folder: RunFolder, name: str) -> Saved | str:
    """Return a complete checkpoint, or what is wrong with it."""
    place = f"{CHECKPOINTS}/{name}"
    try:
        state, schedule = (folder.read_json(f"{place}/{file}") for file in (PROGRESS, SCHEDULE))
        for file, value in ((PROGRESS, state), (SCHEDULE, schedule)):
            if value is None:
                raise ValueError(f"{file} is missing")
        saved = Saved(name, state["step"], state["score"])
        for rank in range(state["world_size"]):
            _check_whole(folder, f"{place}/{state_file(rank, state['world_size'])}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{folder.path(place)} is not complete ({type(error).__name__}: {error})"
    return saved


def _check_whole(folder: RunFolder, name: str) -> None:
    """Compare a safetensors file's size with the one that its header gives."""
    with folder.open_file(name) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < file.size():
            raise ValueError(f"{name} was cut short")
        header: dict[str, Any] = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        if file.size() != 8 + length + max(ends, default=0):
            raise ValueError(f"{name} was cut short")
