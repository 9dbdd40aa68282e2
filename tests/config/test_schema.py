import json
from typing import Any

import pytest
from pydantic import ValidationError

from rayrm.config.schema import (
    DataSection,
    LoraSection,
    ModelSection,
    RunConfig,
    RunSection,
    ScalingSection,
    Source,
    TrainSection,
    ZeroSection,
)


def test_a_config_cannot_be_changed():
    config = RunConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.batch_size = 8  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        config.train = TrainSection()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"train": {"max_steps": 7}},
        {"model": {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}},
        {"data": {"train": ["a.jsonl", "hub:b"], "eval": "c.jsonl"}},
        {"data": {"eval": {"held_out": {"path": "hub:c", "split": "test"}}}},
        {"tracking": {"wandb": None}},
    ],
)
def test_a_config_survives_json(values: dict[str, Any]):
    config = RunConfig.model_validate(values)
    assert RunConfig.model_validate_json(json.dumps(config.model_dump(mode="json"))) == config


def test_a_source_is_a_path_or_a_mapping():
    named = DataSection.model_validate({"train": "a.jsonl", "eval": {"path": "b.jsonl"}})
    assert named.train == (Source(path="a.jsonl"),)
    assert named.eval == {"": Source(path="b.jsonl")}


def test_evaluation_may_be_null_or_named():
    assert DataSection.model_validate({"eval": None}).eval == {}
    sets = DataSection.model_validate({"eval": {"one": "a.jsonl", "two": "b.jsonl"}}).eval
    assert sets == {"one": Source(path="a.jsonl"), "two": Source(path="b.jsonl")}


def test_training_data_may_be_an_empty_list():
    assert DataSection.model_validate({"train": []}).train == ()


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        (TrainSection, {"max_steps": 5, "num_train_epochs": 2}, "num_train_epochs has no effect"),
        (TrainSection, {"max_steps": 0}, "max_steps is 0"),
        (TrainSection, {"early_stopping_patience": 2}, "needs metric_for_best_model"),
        (TrainSection, {"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "warmup_ratio has"),
        (ModelSection, {"quantization": "4bit"}, "set lora, peft or adapter_path, too"),
        (
            ModelSection,
            {"quantization": "8bit", "adapter_path": "a", "lora": {}},
            "adapter_path cannot be merged into weights of few bits; merge it first",
        ),
        (
            ModelSection,
            {"quantization": "4bit", "lora": {"use_dora": True}},
            "quantization: does not go with use_dora",
        ),
        (ZeroSection, {"stage": 2, "offload_param": "cpu"}, "offload_param needs stage: 3"),
        (ZeroSection, {"stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer needs stage"),
        (ZeroSection, {"extra": {"fp16": {}}}, "extra: fp16 is set by model.dtype"),
        (ZeroSection, {"extra": {"train_batch_size": 3}}, "is set by train.batch_size"),
        (ZeroSection, {"extra": {"zero_optimization": {"stage": 2}}}, "is set by zero.stage"),
        (DataSection, {"shuffle": False, "shuffle_buffer_size": 9}, "shuffle_buffer_size has no"),
        (ScalingSection, {"use_gpu": False, "resources_per_worker": {"GPU": 1}}, "asks for a GPU"),
        (ScalingSection, {"resources_per_worker": {"cpu": 1}}, "cpu: did you mean CPU?"),
        (ScalingSection, {"resources_per_worker": {"CPU": 0}}, "a worker needs something"),
        (Source, {"path": "a.jsonl", "split": "test"}, "split applies to 'hub:NAME'"),
    ],
)
def test_a_setting_without_effect_is_refused(section: type, values: dict[str, Any], says: str):
    with pytest.raises(ValidationError, match=says):
        section(**values)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (TrainSection, {"batch_size": True}),
        (TrainSection, {"learning_rate": True}),
        (TrainSection, {"learning_rate": float("nan")}),
        (LoraSection, {"lora_dropout": 1.0}),
        (ZeroSection, {"stage": True}),
        (RunSection, {"name": "a/b"}),
        (RunSection, {"name": ".."}),
        (RunSection, {"name": 1.5}),
        (ModelSection, {"eos_token": 2}),
    ],
)
def test_a_value_out_of_its_type_or_range_is_refused(section: type, values: dict[str, Any]):
    with pytest.raises(ValidationError):
        section(**values)


def test_a_whole_number_names_a_run():
    assert RunSection.model_validate({"name": 2024}).name == "2024"


def test_exponents_in_free_arguments_become_numbers():
    extra = {"aio": {"params": {"eps": "1e-8", "names": ["2E3", "e5", "1e-8b"]}}}
    params = {"eps": 1e-8, "names": [2000.0, "e5", "1e-8b"]}
    assert ZeroSection.model_validate({"extra": extra}).extra == {"aio": {"params": params}}


@pytest.mark.parametrize("key", ["token", "hf_token", "api_key", "WANDB_API_KEY", "password"])
def test_free_arguments_take_no_secret(key: str):
    with pytest.raises(ValidationError, match="secrets never belong") as caught:
        ModelSection(model_init_kwargs={"deep": [{key: "hunter2"}]})
    assert "hunter2" not in str(caught.value)
