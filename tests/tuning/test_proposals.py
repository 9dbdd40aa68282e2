"""What a sweep tries: every repeat of every configuration, and what optuna makes of the answers."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.search import Searcher

from rayrm.config.schema import SearchSection
from rayrm.config.space import Values
from rayrm.tuning.proposals import Proposals, RandomStrategy, strategy_of

SPACE = {
    "train.learning_rate": {"type": "log_uniform", "low": 1e-6, "high": 1e-1},
    "train.weight_decay": {"type": "uniform", "low": 0, "high": 1},
    "model.lora.r": {"type": "randint", "low": 2, "high": 65},
    "loss.center_rewards_coefficient": {"type": "choice", "values": [0, 1e-3, 1e-2]},
}


def section(**given: Any) -> SearchSection:
    return SearchSection.model_validate({"space": SPACE, "mode": "min", "metric": "loss"} | given)


def distance(values: Values) -> float:
    """A bowl whose lowest place is inside the space."""
    rate = np.log10(values["train.learning_rate"]) + 3
    decay = values["train.weight_decay"] - 0.2
    rank = (values["model.lora.r"] - 40) / 64
    return float(rate**2 + decay**2 + rank**2 + values["loss.center_rewards_coefficient"])


def best_of(searcher: str, *, seed: int, configurations: int = 40) -> float:
    search = section(searcher=searcher, num_samples=configurations)
    proposals = Proposals(strategy_of(search, seed=seed), configurations, search)
    found = []
    for name in map(str, range(configurations)):
        found.append(distance(proposals.suggest(name)["values"]))
        proposals.on_trial_complete(name, {"loss": found[-1]})
    return min(found)


def test_optuna_comes_nearer_to_the_best_than_as_many_random_tries():
    seeds = range(12)
    by_chance = [best_of("random", seed=seed) for seed in seeds]
    by_optuna = [best_of("optuna", seed=seed) for seed in seeds]
    assert statistics.median(by_optuna) < 0.5 * statistics.median(by_chance)
    assert sum(tpe < chance for tpe, chance in zip(by_optuna, by_chance, strict=True)) >= 9


def test_optuna_stays_within_the_space():
    search = section(searcher="optuna")
    strategy = strategy_of(search, seed=0)
    for number in range(30):
        values = strategy.ask(number)
        assert 1e-6 <= values["train.learning_rate"] <= 1e-1
        assert 2 <= values["model.lora.r"] < 65
        assert values["loss.center_rewards_coefficient"] in (0, 1e-3, 1e-2)
        strategy.tell(number, distance(values) if number % 5 else None)


def test_each_configuration_is_handed_out_with_each_repeat_and_no_more():
    search = section(repeats=2)
    proposals = Proposals(RandomStrategy([{"a.b": 1}, {"a.b": 2}]), 2, search)
    handed = [proposals.suggest(str(name)) for name in range(4)]
    assert [(one["number"], one["repeat"], one["values"]["a.b"]) for one in handed] == [
        (0, 0, 1),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert proposals.suggest("4") == Searcher.FINISHED


class Listening(RandomStrategy):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__([{}, {}, {}])
        self.told: dict[int, float | None] = {}

    def tell(self, number: int, value: float | None) -> None:
        self.told[number] = value


def test_a_configuration_is_told_by_the_mean_of_the_repeats_that_gave_a_number():
    strategy = Listening()
    proposals = Proposals(strategy, 3, section(repeats=2))
    for name in "abcdef":
        proposals.suggest(name)
    proposals.on_trial_complete("a", {"loss": 1.0})
    assert strategy.told == {}
    proposals.on_trial_complete("b", {"loss": 3.0})
    proposals.on_trial_complete("c", {"loss": float("nan")})
    proposals.on_trial_complete("d", {"loss": 5.0})
    proposals.on_trial_complete("e", error=True)
    proposals.on_trial_complete("f", None)
    assert strategy.told == {0: 2.0, 1: 5.0, 2: None}


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_what_was_saved_goes_on_as_if_it_had_not_been_stopped(searcher: str, tmp_path: Path):
    search = section(searcher=searcher, num_samples=20, repeats=2)

    def proposals_after(first: int) -> Proposals:
        proposals = Proposals(strategy_of(search, seed=1), 20, search)
        for name in map(str, range(first)):
            value = distance(proposals.suggest(name)["values"])
            proposals.on_trial_complete(name, {"loss": value})
        return proposals

    stopped = proposals_after(25)
    stopped.save(str(tmp_path / "state"))
    restored = Proposals(strategy_of(search, seed=1), 20, search)
    restored.restore(str(tmp_path / "state"))
    assert [restored.suggest(f"n{i}") for i in range(15)] == [
        stopped.suggest(f"n{i}") for i in range(15)
    ]
    assert restored.suggest("last") == Searcher.FINISHED
