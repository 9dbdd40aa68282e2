"""What a sweep tries: distributions over fields, and the configuration of one trial."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import exp, log, prod
from typing import Any

import numpy as np

from rayrm.config.loader import with_values
from rayrm.config.schema import (
    Choice,
    Distribution,
    Grid,
    LogUniform,
    LoraSection,
    RandInt,
    RunConfig,
    SearchSection,
    SweepConfig,
    Uniform,
)
from rayrm.errors import ConfigError

Values = dict[str, Any]
"""A trial's values by dotted field."""

_NOT_TRAINED = ("run.", "tracking.", "scaling.", "search.")
_GOLDEN = 0.381966
"""Share of a range at which there is hardly a whole number."""
_RANK, _ALPHA = "model.lora.r", "model.lora.lora_alpha"


def trial_config(config: SweepConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a trial.

    Where the rank of LoRA is searched and ``lora_alpha`` is not, their ratio stays as it is
    without the search, so that a rank changes no scale.

    Raises:
        ConfigError: the values do not fit the schema, or each other.
    """
    placed = dict(values)
    if isinstance(placed.get(_RANK), int) and _ALPHA not in placed:
        lora = config.model.lora or LoraSection()
        placed[_ALPHA] = placed[_RANK] * lora.lora_alpha / lora.r
    return with_values(config, placed)


def check_space(config: SweepConfig) -> None:
    """Try the ends of each distribution on the configuration, before anything is started.

    Raises:
        ConfigError: a line a field that is unknown, or whose values do not fit.
    """
    space = config.search.space
    first = {field: next(_ends(given)) for field, given in space.items()}
    faults: list[str] = []
    others: list[str] = []
    for field, distribution in space.items():
        if field.startswith(_NOT_TRAINED):
            faults.append(
                f"search.space.{field}: trials differ in what they train, not in {field}; "
                "leave it out"
            )
            continue
        for value in _ends(distribution):
            lines = _faults_of_trial(config, {**first, field: value})
            if own := [line for line in lines if _is_about(line, field)]:
                faults.append(f"search.space.{field}: {_named(value, distribution)}: {own[0]}")
                break
            others += lines
    faults = faults or [f"search.space: {line}" for line in dict.fromkeys(others)]
    if config.search.searcher == "optuna":
        faults += [
            f"search.space.{field}: a grid is tried whole, which optuna does not; take choice, "
            "or search.searcher=random"
            for field, given in space.items()
            if isinstance(given, Grid)
        ]
    size = grid_size(config.search)
    if size > config.search.num_samples:
        faults.append(
            f"search.space: its grids have {size:,} points, search.num_samples is "
            f"{config.search.num_samples}; raise it, or take choice in place of grid"
        )
    if faults:
        raise ConfigError("\n".join(faults))


def _faults_of_trial(config: SweepConfig, values: Values) -> list[str]:
    try:
        trial_config(config, values)
    except ConfigError as error:
        return str(error).split("\n  ")[1:] or [str(error)]
    return []


def _is_about(line: str, field: str) -> bool:
    """Whether a fault is told at the field, at a part of it, or at the section that it is in."""
    place = line.partition(":")[0]
    return f"{place}.".startswith(f"{field}.") or f"{field}.".startswith(f"{place}.")


def _ends(distribution: Distribution) -> Iterator[Any]:
    """Yield the values that are as likely to be refused as any."""
    match distribution:
        case Choice(values=values) | Grid(values=values):
            yield from values
        case RandInt(low=low, high=high):
            yield from (low, high - 1)
        case Uniform(low=low, high=high) | LogUniform(low=low, high=high):
            yield from (low, high, low + _GOLDEN * (high - low))


def _named(value: Any, distribution: Distribution) -> str:
    if isinstance(distribution, Uniform | LogUniform):
        low, high = distribution.low, distribution.high
        if value not in (low, high):
            return f"a number between {low!r} and {high!r}"
    return repr(value)


def grid_size(search: SearchSection) -> int:
    """Return how many points all grids have together; 1 without a grid."""
    return prod(len(given.values) for given in search.space.values() if isinstance(given, Grid))


def draw_trials(search: SearchSection, *, seed: int) -> list[Values]:
    """Draw the values of a random search: each point of the grids equally often.

    There are ``num_samples``, or the next lower multiple of the number of points.
    """
    grids = {field: given for field, given in search.space.items() if isinstance(given, Grid)}
    points = [
        dict(zip(grids, point, strict=True))
        for point in product(*(grid.values for grid in grids.values()))
    ]
    generator = np.random.default_rng(seed)
    return [
        {
            field: point[field] if field in point else _draw(given, generator)
            for field, given in search.space.items()
        }
        for _ in range(search.num_samples // len(points))
        for point in points
    ]


def _draw(distribution: Distribution, generator: np.random.Generator) -> Any:
    match distribution:
        case Choice(values=values):
            return values[int(generator.integers(len(values)))]
        case RandInt(low=low, high=high):
            return int(generator.integers(low, high))
        case Uniform(low=low, high=high):
            return float(generator.uniform(low, high))
        case LogUniform(low=low, high=high):
            return exp(generator.uniform(log(low), log(high)))
        case Grid():
            raise AssertionError("points of a grid are not drawn")
