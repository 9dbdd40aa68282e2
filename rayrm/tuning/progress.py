"""What is told of a sweep while it goes on."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray import tune

from rayrm.config.schema import SearchSection
from rayrm.tuning.answer import best_row, with_number
from rayrm.tuning.trial import FINISHED

logger = logging.getLogger(__name__)


class Told(tune.Callback):
    """Tells of each trial's evaluations and end, and after each how the sweep stands."""

    def __init__(self, search: SearchSection) -> None:
        self._search = search

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """A trial starts."""
        logger.info("trial %s starts (of %d so far)", trial, len(trials))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        """A trial was evaluated, or is finished."""
        metric = self._search.metric
        at = "finished" if result.get(FINISHED) else f"step {result.get('step')}"
        logger.info("trial %s %s  %s %.4g", trial, at, metric, result.get(metric, math.nan))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """A trial was trained to its end, or stopped."""
        logger.info("%s", standing(trials, self._search))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """A trial failed."""
        logger.warning("trial %s failed; the sweep goes on", trial)
        logger.info("%s", standing(trials, self._search))


def standing(trials: Sequence[Any], search: SearchSection) -> str:
    """Say how many of Tune's trials are in which state, and which finished one is the best."""
    states = Counter(_state_of(trial) for trial in trials)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    rows = [
        {"trial": trial, search.metric: trial.last_result.get(search.metric)}
        for trial in trials
        if _state_of(trial) == "finished"
    ]
    if not with_number(rows, search):
        return told
    best = best_row(rows, search)
    values = best["trial"].config["values"]
    shown = ", ".join(f"{field}={_short(value)}" for field, value in values.items())
    return f"{told}; best: {best['trial']} {search.metric} {_short(best[search.metric])} ({shown})"


def _state_of(trial: Any) -> str:
    if trial.last_result.get(FINISHED):
        return "finished"
    status = str(trial.status)
    return {"TERMINATED": "stopped", "ERROR": "failed"}.get(status, status.lower())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
