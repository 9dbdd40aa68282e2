"""What the driver and the workers agree on, without what only workers have to load."""

from dataclasses import dataclass
from typing import Any

from rayrm.data.feed import Feed
from rayrm.training.commits import Saved

MODEL = "model"
"""Folder of the exported model in the run's folder."""
REPORT = "data_report.json"
"""File of the account of all rows in the run's folder."""
SCORE = "checkpoint_score"
"""Reported with every checkpoint; Ray Train keeps those with the highest."""


@dataclass(frozen=True)
class Job:
    """What the driver tells every worker."""

    config: dict[str, Any]
    """The resolved configuration as plain data."""
    run_dir: str
    run_id: str
    num_steps: int
    """Optimizer steps of the whole run."""
    steps_per_epoch: int
    longest_pair: dict[str, int]
    """Most tokens that a single training pair takes, by layout."""
    train_files: tuple[str, ...]
    """Places of the training rows, by file number."""
    train_feed: Feed
    """Deals out the training pairs."""
    eval_feeds: dict[str, Feed]
    """Those of the evaluation sets, by name."""
    board: Any
    """Actor that shows progress and failures to the driver."""
    earlier: tuple[Saved, ...] = ()
    """Complete checkpoints that Ray Train has no record of, the newest last."""
