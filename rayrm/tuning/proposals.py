"""What a sweep tries next: drawn at random, or by optuna from what was found so far."""

import math
import pickle
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ray.tune.search import Searcher

from rayrm.config.schema import Choice, Distribution, LogUniform, RandInt, SearchSection, Uniform
from rayrm.config.space import Values, draw_trials
from rayrm.errors import ConfigError

if TYPE_CHECKING:
    import optuna


class Strategy(Protocol):
    """Gives the values of one configuration after another, and is told what became of them."""

    def ask(self, number: int) -> Values:
        """Return the values of the configuration with this number, from 0 upwards."""
        ...

    def tell(self, number: int, value: float | None) -> None:
        """Take the metric's mean over a configuration's repeats; nothing if it has none."""
        ...


class RandomStrategy:
    """The configurations of ``draw_trials``, whatever becomes of them."""

    def __init__(self, draws: Iterable[Values]) -> None:
        self._draws = tuple(draws)

    def ask(self, number: int) -> Values:
        """Return the values of the configuration with this number."""
        return self._draws[number]

    def tell(self, number: int, value: float | None) -> None:
        """Take no notice."""


class OptunaStrategy:
    """Optuna's tree-structured Parzen estimator (Bergstra et al., 2011), independent by field.

    Configurations in training are taken as bad ones (optuna's ``constant_liar``), so that those
    tried at a time differ.

    Raises:
        ConfigError: optuna is not installed.
    """

    def __init__(self, search: SearchSection, *, seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(
                "search.searcher: optuna is not installed; pip install 'rayrm[tune]', "
                "or take search.searcher=random"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = "maximize" if search.mode == "max" else "minimize"
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler, direction=direction)
        self._space = search.space
        self._trials: dict[int, optuna.Trial] = {}

    def ask(self, number: int) -> Values:
        """Return the values that promise most by what was told so far."""
        trial = self._study.ask()
        self._trials[number] = trial
        return {field: _suggest(trial, field, given) for field, given in self._space.items()}

    def tell(self, number: int, value: float | None) -> None:
        """Let later configurations know how good this one was."""
        from optuna.trial import TrialState

        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(self._trials.pop(number), value, state=state)


def _suggest(trial: "optuna.Trial", field: str, distribution: Distribution) -> Any:
    match distribution:
        case Uniform(low=low, high=high):
            return trial.suggest_float(field, low, high)
        case LogUniform(low=low, high=high):
            return trial.suggest_float(field, low, high, log=True)
        case RandInt(low=low, high=high):
            return trial.suggest_int(field, low, high - 1)
        case Choice(values=values):  # by place, since optuna takes no lists or mappings
            return values[trial.suggest_categorical(field, range(len(values)))]
        case _:
            raise AssertionError("check_space refuses a grid here")


def strategy_of(search: SearchSection, *, seed: int) -> Strategy:
    """Return the strategy that ``search.searcher`` names."""
    if search.searcher == "optuna":
        return OptunaStrategy(search, seed=seed)
    return RandomStrategy(draw_trials(search, seed=seed))


class Proposals(Searcher):
    """Hands Tune each configuration of a strategy ``repeats`` times, as trials of their own.

    A trial's config is ``{"number", "repeat", "values"}``. The strategy is told of a
    configuration when the last of its repeats has ended.
    """

    def __init__(self, strategy: Strategy, configurations: int, search: SearchSection) -> None:
        super().__init__(metric=search.metric, mode=search.mode)
        self._strategy = strategy
        self._repeats = search.repeats
        self._left = [(n, r) for n in range(configurations) for r in range(search.repeats)]
        self._values: dict[int, Values] = {}
        self._running: dict[str, int] = {}
        self._ended: dict[int, list[float | None]] = {}

    def suggest(self, trial_id: str) -> Any:
        """Return the config of the next trial."""
        if not self._left:
            return Searcher.FINISHED
        number, repeat = self._left.pop(0)
        if number not in self._values:
            self._values[number] = self._strategy.ask(number)
        self._running[trial_id] = number
        return {"number": number, "repeat": repeat, "values": self._values[number]}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Take the last value of a trial that ended, was stopped or failed."""
        number = self._running.pop(trial_id)
        value = None if error or result is None else result.get(self.metric)
        ended = self._ended.setdefault(number, [])
        ended.append(value if value is not None and math.isfinite(value) else None)
        if len(ended) == self._repeats:
            values = [one for one in ended if one is not None]
            self._strategy.tell(number, statistics.fmean(values) if values else None)

    def save(self, checkpoint_path: str) -> None:
        """Keep what was handed out and found, for a sweep that goes on after a kill."""
        Path(checkpoint_path).write_bytes(pickle.dumps(self.__dict__))

    def restore(self, checkpoint_path: str) -> None:
        """Go on from what ``save`` kept."""
        self.__dict__.update(pickle.loads(Path(checkpoint_path).read_bytes()))
