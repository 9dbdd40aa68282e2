from typing import Any

import pytest

from rayrm.config.schema import ZeroSection
from rayrm.training.zero import deepspeed_config, state_bytes


def config_of(dtype: str = "float32", **section: Any) -> dict[str, Any]:
    return deepspeed_config(ZeroSection(**section), dtype=dtype, max_grad_norm=0.7)


def test_the_default_is_stage_three_without_offload():
    assert config_of() == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.7,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 20_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": 2**31 - 1,
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_settings_of_stage_three_are_left_out_below(stage: int):
    bucket = {"reduce_bucket_size": 20_000_000}
    assert config_of(stage=stage)["zero_optimization"] == {"stage": stage, **bucket}


def test_bfloat16_weights_add_their_gradients_in_float32():
    plain, added = config_of("float32"), config_of("bfloat16")
    for key, value in plain.items():
        assert added.pop(key) == value
    assert added == {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def test_offload_names_its_device():
    optimization = config_of(offload_optimizer="cpu", offload_param="cpu")["zero_optimization"]
    assert optimization["offload_optimizer"] == {"device": "cpu"}
    assert optimization["offload_param"] == {"device": "cpu"}
    assert "offload_param" not in config_of(offload_optimizer="cpu")["zero_optimization"]


def test_extra_settings_are_laid_over_key_by_key():
    extra = {
        "zero_optimization": {"overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": 0},
        "steps_per_print": 5,
        "flops_profiler": {"enabled": True},
    }
    config = config_of(extra=extra)
    assert config["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 20_000_000,
        "stage3_gather_16bit_weights_on_model_save": 0,
        "overlap_comm": True,
    }
    assert (config["steps_per_print"], config["flops_profiler"]) == (5, {"enabled": True})
    assert config["gradient_clipping"] == 0.7


def test_a_value_takes_the_place_of_a_section_and_a_section_that_of_a_value():
    config = config_of(extra={"zero_optimization": False, "steps_per_print": {"max": 1}})
    assert config["zero_optimization"] is False
    assert config["steps_per_print"] == {"max": 1}


def test_neither_the_section_nor_another_config_is_changed():
    extra: dict[str, Any] = {"zero_optimization": {"sub_group_size": 5}}
    section = ZeroSection(extra=extra)
    first = deepspeed_config(section, dtype="float32", max_grad_norm=1.0)
    first["zero_optimization"]["stage"] = 0
    second = deepspeed_config(section, dtype="float32", max_grad_norm=1.0)
    assert second["zero_optimization"]["stage"] == 3
    assert extra == {"zero_optimization": {"sub_group_size": 5}}


def test_each_stage_divides_one_thing_more_among_the_ranks() -> None:
    told = [
        state_bytes(10, 10, stage=stage, dtype="bfloat16", world_size=2) for stage in (0, 1, 2, 3)
    ]
    assert [(x.parameters, x.gradients, x.optimizer) for x in told] == [
        (20, 40, 80),
        (20, 40, 60),
        (20, 20, 60),
        (10, 20, 60),
    ]


def test_frozen_parameters_have_neither_gradients_nor_moments() -> None:
    told = state_bytes(1000, 10, stage=3, dtype="float32", world_size=4)
    assert (told.parameters, told.gradients, told.optimizer) == (1000, 10, 30)
    assert told.total == 1040
