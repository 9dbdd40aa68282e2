"""Which trials of a sweep go on: all, the better ones, or all with the better ones' weights."""

from functools import partial
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)

from rayrm.config.schema import (
    Choice,
    Distribution,
    Grid,
    LogUniform,
    RandInt,
    SearchSection,
    SweepConfig,
    Uniform,
)

_NO_LIMIT = 10**9
_BRACKETS = {"asha": 1, "hyperband": 3}
"""How many first rungs there are, each a multiple of the one before; trials are dealt out to them.

That of several is asynchronous HyperBand (Li et al., 2020): unlike the synchronous kind it never
has a trial wait for others, which may not find room beside those that wait.
"""


def scheduler_for(config: SweepConfig) -> TrialScheduler:
    """Return the scheduler that ``search.scheduler`` names; its time is a run's step."""
    search, interval = config.search, config.train.eval_steps or 1
    if search.scheduler == "none":
        return FIFOScheduler()
    if search.scheduler == "pbt":
        return PopulationBasedTraining(
            time_attr="step",
            perturbation_interval=interval,
            hyperparam_mutations={"values": {f: _domain(d) for f, d in search.space.items()}},
            custom_explore_fn=partial(within_space, search=search),
            log_config=False,
        )
    return AsyncHyperBandScheduler(
        time_attr="step",
        grace_period=interval,
        max_t=_NO_LIMIT,
        brackets=_BRACKETS[search.scheduler],
    )


def within_space(config: dict[str, Any], *, search: SearchSection) -> dict[str, Any]:
    """Bring a trial's values, which were multiplied, back to what is searched."""
    values = {field: _limited(config["values"][field], d) for field, d in search.space.items()}
    return {**config, "values": values}


def _domain(distribution: Distribution) -> Any:
    match distribution:
        case Uniform(low=low, high=high):
            return tune.uniform(low, high)
        case LogUniform(low=low, high=high):
            return tune.loguniform(low, high)
        case RandInt(low=low, high=high):
            return tune.randint(low, high)
        case Choice(values=values) | Grid(values=values):
            return list(values)


def _limited(value: Any, distribution: Distribution) -> Any:
    match distribution:
        case Uniform(low=low, high=high) | LogUniform(low=low, high=high):
            return min(max(value, low), high)
        case RandInt(low=low, high=high):
            return min(max(value, low), high - 1)
        case Choice() | Grid():
            return value
