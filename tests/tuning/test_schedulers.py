"""Values that pbt multiplies stay among those that are searched."""

import pytest

from rayrm.config.schema import Choice, LogUniform, RandInt, SearchSection
from rayrm.tuning.schedulers import within_space

SPACE = SearchSection(
    space={
        "train.learning_rate": LogUniform(type="log_uniform", low=1e-5, high=1e-3),
        "train.batch_size": RandInt(type="randint", low=2, high=9),
        "train.weight_decay": Choice(type="choice", values=(0.0, 0.1)),
    }
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [((5e-3, 12, 0.1), (1e-3, 8, 0.1)), ((1e-6, 1, 0.0), (1e-5, 2, 0.0)), ((1e-4, 4, 0.0),) * 2],
)
def test_a_value_beyond_an_end_becomes_that_end(
    given: tuple[float, ...], expected: tuple[float, ...]
):
    config = {"number": 3, "values": dict(zip(SPACE.space, given, strict=True))}
    limited = within_space(config, search=SPACE)
    assert limited == {"number": 3, "values": dict(zip(SPACE.space, expected, strict=True))}
