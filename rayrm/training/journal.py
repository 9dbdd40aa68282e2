"""The log of a run: steps added up between lines, written by the first worker."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayrm.data.report import RowId
from rayrm.model.metrics import PairStats
from rayrm.training.engine import Engine
from rayrm.training.evaluate import reduce_stats
from rayrm.training.loop import Progress, StepResult
from rayrm.training.tracking import SKIPPED, RowLog, Tracker


class Journal:
    """Adds up steps between log lines and writes them, on rank 0, to the tracker and the board."""

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        tracker: Tracker | None,
        *,
        board: Any,
        steps_per_epoch: int,
        files: Sequence[str],
        row_log: RowLog | None,
    ) -> None:
        """``tracker`` is null on all ranks but the first; ``board`` shows lines to the driver.

        ``files`` are the places of the training rows.
        """
        self._files = files
        self._row_log = row_log
        self._engine = engine
        self._progress = progress
        self._tracker = tracker
        self._board = board
        self._steps_per_epoch = steps_per_epoch
        self._stats = PairStats.zero(engine.device)
        self._seconds = 0.0
        self._learning_rate = 0.0

    @property
    def wandb_run_id(self) -> str | None:
        """Id of the W&B run, if there is one."""
        return None if self._tracker is None else self._tracker.wandb_run_id

    def add(self, step: StepResult) -> None:
        """Take a step into the current line."""
        self._stats = self._stats + step.stats
        self._seconds += step.seconds
        self._learning_rate = step.learning_rate
        if self._row_log is not None:
            self._row_log.add(self._progress.step, step.share.row_ids)
        if step.rows_without_update is not None and self._tracker is not None:
            self._write_skipped(step.rows_without_update)

    def _write_skipped(self, row_ids: Sequence[RowId]) -> None:
        assert self._tracker is not None
        rows = [{"source": self._files[file], "row": row} for file, row in row_ids]
        self._tracker.log_skipped({"step": self._progress.step, "rows": rows})
        first = ", ".join(f"{row['source']} row {row['row']}" for row in rows[:3])
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        self._board.note.remote(
            f"step {self._progress.step}: no update, since its loss or gradient is not finite; its "
            f"rows are {first}{more} (all in {SKIPPED})"
        )

    def write_line(self) -> None:
        """Reduce the steps since the last line over all ranks and write them; collective."""
        stats = reduce_stats(self._engine, self._stats)
        seconds = max(self._seconds, 1e-9)
        line = {
            "step": self._progress.step,
            "epoch": self._progress.epoch + self._progress.step_in_epoch / self._steps_per_epoch,
            **stats.compute(),
            "learning_rate": self._learning_rate,
            "grad_norm": self._engine.grad_norm,
            "num_tokens": self._progress.num_tokens,
            "pairs_per_second": stats.num_pairs / seconds,
            "tokens_per_second": stats.num_tokens / seconds,
            "skipped_steps": self._progress.skipped_steps,
        }
        self._progress.metrics |= line
        self._stats, self._seconds = PairStats.zero(self._engine.device), 0.0
        if self._tracker is not None:
            self._tracker.log(line)
            self._board.update.remote(line)

    def write_evaluation(self, metrics: dict[str, float], rewards: dict[str, np.ndarray]) -> None:
        """Write an evaluation of all sets."""
        self._progress.metrics |= metrics
        if self._tracker is not None:
            line = {"step": self._progress.step, **metrics}
            self._tracker.log_evaluation(line, rewards)
            self._board.update.remote(line)

    def sync(self) -> None:
        """Bring files behind a URL up to date with the checkpoint that follows."""
        if self._tracker is not None:
            self._tracker.sync()
        elif self._row_log is not None:
            self._row_log.sync()

    def finish_training(self) -> None:
        """Close the tracker; what follows is export."""
        if self._tracker is not None:
            self._tracker.finish()
        elif self._row_log is not None:
            self._row_log.sync()
