import math

import pytest

from rayrm.errors import ConfigError
from rayrm.training.judge import checkpoint_score, judge
from rayrm.training.loop import Progress

NAN = math.nan


def verdicts(*accuracies: float) -> tuple[list[bool], Progress]:
    """Whether each evaluation is the best so far, and the progress after the last."""
    progress = Progress()
    scores = [checkpoint_score("eval_accuracy", {"eval_accuracy": x}) for x in accuracies]
    return [judge(progress, score) for score in scores], progress


def test_of_a_good_an_unknown_and_a_worse_one_the_good_is_kept():
    best, progress = verdicts(0.6, NAN, 0.55)
    assert best == [True, False, False]
    assert (progress.best_score, progress.evaluations_without_gain) == (0.6, 2)


def test_a_nan_at_the_start_never_wins_and_never_stands_in_the_way():
    best, progress = verdicts(NAN, NAN, 0.1)
    assert best == [False, False, True]
    assert (progress.best_score, progress.evaluations_without_gain) == (0.1, 0)


def test_without_a_number_there_is_no_best():
    best, progress = verdicts(NAN)
    assert best == [False]
    assert (progress.best_score, progress.evaluations_without_gain) == (None, 1)


def test_an_equal_one_is_no_gain():
    best, progress = verdicts(0.5, 0.5, 0.7, 0.7)
    assert best == [True, False, True, False]
    assert progress.evaluations_without_gain == 1


@pytest.mark.parametrize(
    ("metric", "score"),
    [
        ("eval_loss", -0.3),
        ("eval_hard_loss", -0.3),
        ("eval_accuracy", 0.9),
        ("eval_margin", -2.0),
        ("eval_unknown", -math.inf),
    ],
)
def test_a_loss_is_better_when_it_is_smaller(metric: str, score: float):
    metrics = {
        "eval_loss": 0.3,
        "eval_hard_loss": 0.3,
        "eval_accuracy": 0.9,
        "eval_margin": -2.0,
        "eval_unknown": NAN,
    }
    assert checkpoint_score(metric, metrics) == score


def test_infinite_losses_lose():
    scores = [checkpoint_score("eval_loss", {"eval_loss": x}) for x in (0.5, math.inf)]
    assert scores == [-0.5, -math.inf]


def test_without_a_metric_every_checkpoint_is_alike():
    assert checkpoint_score(None, {"eval_accuracy": 1.0}) == -math.inf


def test_a_metric_that_evaluation_does_not_give_is_refused_with_those_that_it_gives():
    with pytest.raises(ConfigError, match=r"gives no 'eval_acc'; it gives eval_a, eval_b"):
        checkpoint_score("eval_acc", {"eval_b": 1.0, "eval_a": 1.0})
