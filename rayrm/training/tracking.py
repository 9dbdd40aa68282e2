"""Metrics out of the first worker: metrics.jsonl always, W&B where it is configured."""

import json
import logging
import netrc
import os
import shutil
from collections.abc import Iterable, Mapping
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from rayrm.config.schema import WandbSection
from rayrm.data.report import RowId
from rayrm.training.storage import RunFolder

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
SKIPPED = "skipped_steps.jsonl"
"""Steps whose update was not applied, with their rows."""
_TABLE_ROWS = 100


class RowLog:
    """One worker's account of the rows that it trained on, step by step."""

    def __init__(self, folder: RunFolder, rank: int, world_size: int, *, step: int) -> None:
        """Go on at ``step``: what was noted after the restored checkpoint will come again.

        The first worker sees to the files of workers that are no longer there, too.
        """
        self._folder = folder
        self._name = _row_file(rank)
        folder.cut_lines(self._name, after_step=step)
        gone = world_size
        while rank == 0 and folder.exists(_row_file(gone)):
            folder.cut_lines(_row_file(gone), after_step=step)
            gone += 1

    def add(self, step: int, row_ids: Iterable[RowId]) -> None:
        """Note the file number and row of each pair of this worker's share of a step."""
        rows = [list(row_id) for row_id in row_ids]
        self._folder.append_json(self._name, {"step": step, "rows": rows})

    def sync(self) -> None:
        """Bring the file behind a URL up to date."""
        self._folder.sync()


def _row_file(rank: int) -> str:
    return f"rows/worker-{rank}.jsonl"


class Tracker:
    """Writes what happens at each step; ``metrics.jsonl`` is the truth that survives a kill."""

    def __init__(
        self,
        folder: RunFolder,
        wandb_section: WandbSection | None,
        *,
        config: dict[str, Any],
        run_id: str,
        step: int,
    ) -> None:
        """Go on at ``step``: lines written after the restored checkpoint are cut."""
        self._folder = folder
        for name in (METRICS, SKIPPED):
            folder.cut_lines(name, after_step=step)
        self._wandb_run = None
        if wandb_section is not None:
            self._wandb_run = _start_wandb(folder, wandb_section, config, run_id, resumed=step > 0)

    @property
    def notice(self) -> str | None:
        """What to tell the user about a W&B run that is not online."""
        run = self._wandb_run
        if run is None or not run.offline:
            return None
        return f"W&B is offline; send the run with: wandb sync {Path(run.dir).parent}"

    @property
    def wandb_run_id(self) -> str | None:
        """Id of the W&B run, if there is one."""
        return None if self._wandb_run is None else self._wandb_run.id

    def log_skipped(self, line: dict[str, Any]) -> None:
        """Write one step whose update was not applied."""
        self._folder.append_json(SKIPPED, line)

    def log(self, line: dict[str, Any]) -> None:
        """Write one line of metrics; it holds its ``step``."""
        self._folder.append_json(METRICS, line)
        if self._wandb_run is not None:
            self._wandb_run.log(dict(line), step=int(line["step"]))

    def log_evaluation(self, line: dict[str, Any], rewards: Mapping[str, np.ndarray]) -> None:
        """Write an evaluation's line; by set, rewards ``[pairs, 2]`` as table and histograms."""
        self._folder.append_json(METRICS, line)
        if self._wandb_run is not None:
            media = {
                k: v for name, array in rewards.items() for k, v in _media(name, array).items()
            }
            self._wandb_run.log({**line, **media}, step=int(line["step"]))

    def sync(self) -> None:
        """Bring the metrics file of a remote run folder up to date."""
        self._folder.sync()

    def finish(self) -> None:
        """Close the W&B run and the metrics file."""
        if self._wandb_run is not None:
            self._wandb_run.finish()
        self._folder.sync()


def _media(name: str, rewards: np.ndarray) -> dict[str, Any]:
    import wandb

    chosen, rejected = rewards[:, 0], rewards[:, 1]
    table = wandb.Table(
        columns=["pair", "chosen_reward", "rejected_reward", "margin"],
        data=[[i, float(c), float(r), float(c - r)]
              for i, (c, r) in enumerate(rewards[:_TABLE_ROWS])],
    )  # fmt: skip
    histograms = {
        f"{name}_chosen_rewards": wandb.Histogram(chosen.tolist()),
        f"{name}_rejected_rewards": wandb.Histogram(rejected.tolist()),
        f"{name}_margins": wandb.Histogram((chosen - rejected).tolist()),
    }
    return {f"{name}_rewards": table, **(histograms if len(rewards) else {})}


def choose_mode(section: WandbSection) -> str:
    """Return online or offline: W&B itself would ask for a key and wait."""
    if section.mode != "auto":
        return section.mode
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether a W&B key is in the environment or in a login."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        logins = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in logins)


def _start_wandb(
    folder: RunFolder, section: WandbSection, config: dict[str, Any], run_id: str, *, resumed: bool
) -> Any:
    import wandb

    place = Path(folder.local_path("wandb")).parent
    mode = choose_mode(section)
    options: dict[str, Any] = {
        "project": section.project,
        "entity": section.entity,
        "group": section.group,
        "tags": list(section.tags),
        "name": config["run"]["name"],
        "id": run_id,
        "dir": str(place),
        "config": config,
    }
    if mode == "online":
        try:
            return wandb.init(
                mode="online", resume="allow", settings=wandb.Settings(init_timeout=60), **options
            )
        except Exception as error:  # whatever the network does, training goes on
            logger.warning("W&B cannot be reached: %s", error)
            mode = "offline"
    # A killed process leaves an offline run without its last records: write it anew from the truth.
    for part in glob(str(place / "wandb" / f"offline-run-*-{run_id}")):
        shutil.rmtree(part)
    run = wandb.init(mode="disabled" if mode == "disabled" else "offline", **options)
    if resumed:
        for line in folder.read_lines(METRICS):
            run.log(json.loads(line), step=int(json.loads(line)["step"]))
    return run
