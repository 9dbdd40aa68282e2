"""The search section: what it takes, what it refuses, and the trials that it draws."""

from collections import Counter
from typing import Any

import pytest

from rayrm.config.loader import load_config, load_sweep
from rayrm.config.space import check_space, draw_trials, trial_config
from rayrm.errors import ConfigError


def sweep_of(space: dict[str, Any] | None = None, **search: Any) -> Any:
    section = search if space is None else {"space": space, **search}
    return load_sweep({"model": {"lora": {"r": 8, "lora_alpha": 16}}, "search": section})


def refusal(space: dict[str, Any], **search: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_space(sweep_of(space, **search))
    return str(caught.value)


def test_the_default_space_fits_and_searches_rate_centering_and_rank():
    config = sweep_of()
    check_space(config)
    for values in draw_trials(config.search, seed=0):
        trial = trial_config(config, values)
        assert 1e-6 <= trial.train.learning_rate <= 1e-3
        assert trial.loss.center_rewards_coefficient in (0, 1e-3, 1e-2, 1e-1)
        assert trial.model.lora is not None
        assert 4 <= trial.model.lora.r <= 64


def test_a_rank_keeps_the_scale_of_the_adapters_unless_that_is_searched():
    config = sweep_of()
    lora = trial_config(config, {"model.lora.r": 32}).model.lora
    assert lora is not None
    assert (lora.r, lora.lora_alpha) == (32, 64)
    both = trial_config(config, {"model.lora.r": 32, "model.lora.lora_alpha": 5}).model.lora
    assert both is not None
    assert both.lora_alpha == 5


def test_the_same_seed_draws_the_same_trials_and_another_others():
    search = sweep_of(num_samples=20).search
    assert draw_trials(search, seed=3) == draw_trials(search, seed=3)
    assert draw_trials(search, seed=3) != draw_trials(search, seed=4)


def test_numbers_are_drawn_within_their_bounds():
    space = {
        "train.weight_decay": {"type": "uniform", "low": 0, "high": 0.5},
        "train.learning_rate": {"type": "log_uniform", "low": 1e-6, "high": 1e-2},
        "train.batch_size": {"type": "randint", "low": 2, "high": 5},
    }
    drawn = draw_trials(sweep_of(space, num_samples=400).search, seed=0)
    assert {values["train.batch_size"] for values in drawn} == {2, 3, 4}
    decays = [values["train.weight_decay"] for values in drawn]
    assert 0 <= min(decays) < 0.05
    assert 0.45 < max(decays) <= 0.5
    rates = [values["train.learning_rate"] for values in drawn]
    small = sum(rate < 1e-4 for rate in rates)
    assert 160 < small < 240  # half of the logarithms


def test_a_grid_is_gone_through_and_other_fields_are_drawn_for_each_point():
    space = {
        "train.batch_size": {"type": "grid", "values": [2, 4]},
        "loss.label_smoothing": {"type": "grid", "values": [0, 0.1, 0.2]},
        "train.learning_rate": {"type": "log_uniform", "low": 1e-6, "high": 1e-2},
    }
    drawn = draw_trials(sweep_of(space, num_samples=13).search, seed=0)
    points = Counter((v["train.batch_size"], v["loss.label_smoothing"]) for v in drawn)
    assert len(points) == 6
    assert set(points.values()) == {2}
    assert len({values["train.learning_rate"] for values in drawn}) == 12


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (
            {"train.learning_rat": {"type": "uniform", "low": 1, "high": 2}},
            "search.space.train.learning_rat: 1.0: train.learning_rat: unknown key; did you mean "
            "learning_rate?",
        ),
        (
            {"train.learning_rate": {"type": "uniform", "low": 0, "high": 1}},
            "search.space.train.learning_rate: 0.0: train.learning_rate: got 0.0, expected number",
        ),
        (
            {"model.lora.r": {"type": "choice", "values": [4, 0]}},
            "search.space.model.lora.r: 0: model.lora.r: got 0, expected whole number >= 1",
        ),
        (
            {"loss.objective": {"type": "choice", "values": ["bradley_terry", "other"]}},
            "search.space.loss.objective: 'other': loss.objective",
        ),
        (
            {"search.num_samples": {"type": "randint", "low": 1, "high": 3}},
            "search.space.search.num_samples: trials differ in what they train",
        ),
        (
            {"run.name": {"type": "choice", "values": ["a", "b"]}},
            "search.space.run.name: trials differ in what they train",
        ),
        (
            {"model.lora.r": {"type": "choice", "values": [2, "two"]}},
            "search.space.model.lora.r: 'two': model.lora.r: got \"two\", expected whole number",
        ),
        (
            {"model.lora.r": {"type": "uniform", "low": 4, "high": 8}},
            "search.space.model.lora.r: a number between 4.0 and 8.0: model.lora.r: got ",
        ),
        (
            {"train.batch_size": {"type": "log_uniform", "low": 1, "high": 8}},
            "search.space.train.batch_size: a number between 1.0 and 8.0: train.batch_size: got ",
        ),
    ],
)
def test_a_field_that_cannot_be_searched_so_is_refused(space: dict[str, Any], told: str):
    assert refusal(space).startswith(told)


def test_all_faults_of_a_space_are_told_at_once():
    told = refusal(
        {
            "train.nothing": {"type": "choice", "values": [1]},
            "train.batch_size": {"type": "randint", "low": 0, "high": 3},
        }
    )
    assert [line.split(":")[0] for line in told.splitlines()] == [
        "search.space.train.nothing",
        "search.space.train.batch_size",
    ]


def test_a_field_that_fits_is_not_blamed_for_another():
    told = refusal(
        {
            "train.batch_size": {"type": "randint", "low": 2, "high": 3},
            "train.nothing": {"type": "choice", "values": [1]},
            "train.learning_rate": {"type": "uniform", "low": 0.1, "high": 0.2},
        }
    )
    assert [line.split(":")[0] for line in told.splitlines()] == ["search.space.train.nothing"]


def test_fields_that_fit_only_together_are_searched_together():
    space = {
        "train.lr_scheduler_type": {"type": "choice", "values": ["constant_with_warmup"]},
        "train.warmup_ratio": {"type": "uniform", "low": 0.1, "high": 0.2},
    }
    config = load_sweep({"train": {"lr_scheduler_type": "constant"}, "search": {"space": space}})
    check_space(config)


def test_a_rule_between_sections_is_told():
    told = refusal({"zero.stage": {"type": "choice", "values": [3, 0]}})
    assert "no float32 master weights at stage 0" in told
    other = load_sweep(
        {
            "zero": {"stage": 0},
            "model": {"dtype": "float32"},
            "search": {"space": {"model.dtype": {"type": "choice", "values": ["bfloat16"]}}},
        }
    )
    with pytest.raises(ConfigError, match="no float32 master weights at stage 0"):
        check_space(other)


def test_a_grid_that_is_too_large_is_refused_with_both_numbers():
    space = {"train.batch_size": {"type": "grid", "values": list(range(1, 30))}}
    assert "29 points, search.num_samples is 8" in refusal(space)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"space": {"a.b": {"type": "uniform", "low": 2, "high": 1}}}, "low is 2, not below high"),
        (
            {"space": {"a.b": {"type": "choice", "values": []}}},
            r"search\.space\.a\.b\.values: got \[\], expected list of any value, not empty",
        ),
        (
            {"space": {"a.b": {"type": "choice", "values": 2}}},
            r"search\.space\.a\.b\.values: got 2, expected list of any value, not empty",
        ),
        (
            {"space": {"a.b": {"type": "normal", "low": 2}}},
            r'search\.space\.a\.b\.type: got "normal", expected one of uniform, log_uniform, ',
        ),
        (
            {"space": {"a.b": {"low": 2}}},
            r"search\.space\.a\.b\.type: missing; expected one of uniform, log_uniform, randint, ",
        ),
        (
            {"space": {"a.b": {"type": "uniform", "low": "a", "high": 2}}},
            r'search\.space\.a\.b\.low: got "a", expected number',
        ),
        (
            {"space": {"a.b": {"type": "log_uniform", "low": 0, "high": 2}}},
            r"search\.space\.a\.b\.low: got 0, expected number > 0",
        ),
        (
            {"space": {"a.b": {"type": "uniform", "low": 0, "hihg": 2}}},
            r"search\.space\.a\.b\.hihg: unknown key; did you mean high\?",
        ),
        (
            {"space": {"a.b": 3}},
            r"search\.space\.a\.b: got 3, expected \{type: uniform, low, high\} or ",
        ),
        ({"space": {}}, r"search\.space: got \{\}, expected mapping of names to .*, not empty"),
        ({"num_sample": 3}, "search.num_sample: unknown key; did you mean num_samples?"),
    ],
)
def test_a_section_that_does_not_fit_is_refused_with_its_place(section: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        load_sweep({"search": section})


def test_a_sweep_without_a_search_names_the_other_command():
    with pytest.raises(ConfigError, match=r"search: missing.*python -m rayrm\.train"):
        load_sweep({})


def test_a_run_with_a_search_names_the_other_command():
    with pytest.raises(ConfigError, match=r"search: sweeps run with python -m rayrm\.tune"):
        load_config({"search": {}})


def test_fields_of_the_search_may_be_overridden():
    config = load_sweep({"search": {}}, ["search.num_samples=3", "train.batch_size=2"])
    assert (config.search.num_samples, config.train.batch_size) == (3, 2)


def test_a_grid_beside_optuna_is_refused_at_its_field():
    space = {"model.lora.r": {"type": "grid", "values": [4, 8]}}
    assert "search.space.model.lora.r: a grid is tried whole" in refusal(space, searcher="optuna")
