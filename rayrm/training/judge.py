"""Which evaluation is the best so far, and when waiting for a better one is over."""

import math

from rayrm.errors import ConfigError
from rayrm.training.loop import Progress


def checkpoint_score(metric: str | None, metrics: dict[str, float]) -> float:
    """Return a number that is higher for better checkpoints; one that is unknown never wins.

    As in transformers, a metric whose name ends in ``loss`` is better when it is smaller.

    Raises:
        ConfigError: evaluation does not produce this metric.
    """
    if metric is None:
        return -math.inf
    if metric not in metrics:
        raise ConfigError(
            f"train.metric_for_best_model: evaluation gives no {metric!r}; it gives "
            + ", ".join(sorted(metrics))
        )
    value = metrics[metric]
    if math.isnan(value):
        return -math.inf
    return -value if metric.endswith("loss") else value


def judge(progress: Progress, score: float) -> bool:
    """Note an evaluation's score in ``progress`` and return whether it is the best so far."""
    is_best = score > (-math.inf if progress.best_score is None else progress.best_score)
    progress.best_score = score if is_best else progress.best_score
    progress.evaluations_without_gain = 0 if is_best else progress.evaluations_without_gain + 1
    return is_best
