"""Adapters that are gone on with, and those that cannot be trained here."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rayrm.config.loader import load_config
from rayrm.config.schema import ModelSection
from rayrm.data.packing import pack_pairs
from rayrm.errors import ConfigError
from rayrm.model.build import build_reward_model, check_reward_model
from rayrm.model.tokenizer import load_tokenizer
from tests.builders import pair_of, tiny_llama_folder, word_tokenizer

PAIR = pair_of([10, 11, 12], [13, 14, 15], [19])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-label classifier, which an adapter finds again by its name."""
    return tiny_llama_folder(
        tmp_path_factory.mktemp("adapters") / "base", word_tokenizer(), num_labels=1
    )


def built(base: Path, **options: Any) -> Any:
    section = ModelSection(name_or_path=str(base), dtype="float32", **options)
    return build_reward_model(section, load_tokenizer(section), seed=0).eval()


def told_before_the_start(base: Path, **options: Any) -> str:
    section = ModelSection(name_or_path=str(base), dtype="float32", **options)
    with pytest.raises(ConfigError) as error:
        check_reward_model(section, load_tokenizer(section), shared_prompt="auto")
    return str(error.value)


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """An adapter whose weights are all drawn, so that it changes every reward."""
    model = built(base, lora={"r": 2})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    model.classifier.save_pretrained(base.parent / "adapter")
    return base.parent / "adapter"


@pytest.mark.parametrize("on_top", [{}, {"lora": {"r": 3}}], ids=["gone on with", "merged below"])
def test_an_adapter_begins_with_the_rewards_it_was_saved_with(
    on_top: dict[str, Any], base: Path, adapter: Path
) -> None:
    saved: Any = AutoPeftModelForSequenceClassification.from_pretrained(adapter).eval()
    model = built(base, adapter_path=str(adapter), **on_top)
    text = torch.tensor([[10, 11, 12, 13, 14, 15]])
    with torch.no_grad():
        expected = saved(input_ids=text).logits[0].item()
        found = model(**pack_pairs([PAIR], model.layout).inputs)[0].item()
        without = built(base)(**pack_pairs([PAIR], model.layout).inputs)[0].item()
    assert found == pytest.approx(expected, abs=1e-5)
    assert found != pytest.approx(without, abs=1e-2)


def test_an_adapter_that_goes_on_trains_itself_and_the_head_alone(
    base: Path, adapter: Path
) -> None:
    model = built(base, adapter_path=str(adapter))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(trained) > 1
    assert all("lora_" in name or "score.modules_to_save" in name for name in trained)


def test_an_adapter_of_another_base_is_refused_with_the_base_that_it_fits(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(word_tokenizer()),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    told = told_before_the_start(tmp_path, adapter_path=str(adapter))
    assert told.startswith(f"model.adapter_path: the adapter at {adapter} does not fit this model")
    assert told.endswith(f"it was trained on {base}: give that as model.name_or_path")


def test_a_folder_without_an_adapter_is_refused(base: Path) -> None:
    told = told_before_the_start(base, adapter_path=str(base))
    assert told == (f"model.adapter_path: {base} holds no adapter (adapter_config.json is missing)")


def test_a_broken_adapter_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert str(broken) in told_before_the_start(base, adapter_path=str(broken))
    (broken / "adapter_config.json").write_text("{")
    told = told_before_the_start(base, adapter_path=str(broken))
    assert told.startswith(f"model.adapter_path: cannot read {broken}")


def test_an_adapter_as_the_model_is_refused_with_the_two_fields(adapter: Path, base: Path) -> None:
    word_tokenizer().save_pretrained(adapter)
    told = told_before_the_start(adapter)
    assert f"{adapter} is an adapter; give it as model.adapter_path" in told
    assert str(base) in told


def test_an_adapter_without_a_head_trains_that_of_the_model(base: Path, tmp_path: Path) -> None:
    causal: Any = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(causal, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.save_pretrained(str(tmp_path))
    model = built(base, adapter_path=str(tmp_path))
    head = dict(model.classifier.named_parameters())
    head = {name: w for name, w in head.items() if "score.modules_to_save" in name}
    assert len(head) == 1
    (weight,) = head.values()
    assert weight.requires_grad
    assert torch.equal(weight, built(base).classifier.score.weight)  # that of the base


def test_an_adapter_of_a_base_with_another_name_is_gone_on_with_and_told(
    base: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built(base, adapter_path=str(adapter))
    assert "was trained on" not in caplog.text
    other = tiny_llama_folder(tmp_path / "other", word_tokenizer(), seed=1, num_labels=1)
    built(other, adapter_path=str(adapter))
    assert f"was trained on {base}" in caplog.text
    assert str(other) in caplog.text


@pytest.mark.parametrize(
    ("peft", "told"),
    [
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}, "PROMPT_TUNING puts vectors"),
        ({"peft_type": "ADALORA", "total_step": 10}, "ADALORA does not train here"),
        ({"peft_type": "LORAX"}, "peft_type LORAX is none of"),
        ({"peft_type": "LORA", "rank": 4}, "'rank'"),
        ({"peft_type": "LORA", "task_type": "CAUSAL_LM"}, "task_type is CAUSAL_LM"),
        ({"peft_type": "LOHA", "r": "four"}, 'r: got "four", expected int'),
        ({"peft_type": "LORA", "use_rslora": "no"}, 'use_rslora: got "no", expected bool'),
        ({"peft_type": "LOHA", "target_modules": 3}, "target_modules: got 3, expected"),
        ({"peft_type": "LORA", "target_modules": "*_proj"}, "no regular expression"),
        ({"peft_type": "LOHA", "modules_to_save": 7}, "modules_to_save: got 7, expected"),
        ({"peft_type": "LORA", "inference_mode": True}, "inference_mode: true trains nothing"),
        ({"peft_type": "LORA", "trainable_token_indices": [5]}, "trainable_token_indices: "),
        ({"peft_type": "LORA", "init_lora_weights": "pissa"}, "init_lora_weights: pissa changes"),
        ({"peft_type": "LORA", "init_lora_weights": "olora"}, "init_lora_weights: olora changes"),
        ({"peft_type": "LORA", "init_lora_weights": "eva"}, "init_lora_weights: eva "),
    ],
)
def test_a_method_that_does_not_work_is_refused_before_the_start(
    peft: dict[str, Any], told: str, base: Path
) -> None:
    found = told_before_the_start(base, peft=peft)
    assert found.startswith(("model.peft: ", "model.peft."))
    assert told in found


@pytest.mark.parametrize(
    "options",
    [
        {"lora": {"target_modules": ["no_proj"]}},
        {"lora": {"target_modules": ["q_proj", "no_proj"]}},
        {"lora": {"target_modules": ".*no_proj"}},
        {"lora": {"modules_to_save": ["no_proj"]}},
        {"peft": {"peft_type": "LOHA", "target_modules": ["no_proj"]}},
        {"peft": {"peft_type": "IA3", "modules_to_save": ["embed_tokens", "no_proj"]}},
    ],
)
def test_a_name_that_no_module_has_is_refused_with_those_there_are(
    options: dict[str, Any], base: Path
) -> None:
    told = told_before_the_start(base, **options)
    ((field, _),) = options.items()
    assert told.startswith((f"model.{field}.target_modules: ", f"model.{field}.modules_to_save: "))
    assert "no_proj" in told
    assert "gate_proj" in told
    assert "q_proj" in told


@pytest.mark.parametrize(
    "options",
    [
        {"lora": {"target_modules": ["layers.1.self_attn.q_proj"]}},
        {"lora": {"target_modules": ".*layers.0.*_proj", "modules_to_save": ["score"]}},
        {"peft": {"peft_type": "LORA", "modules_to_save": ["embed_tokens", "model.norm"]}},
        {"peft": {"peft_type": "LOKR", "target_modules": "all-linear", "alpha": 2}},
        {"peft": {"peft_type": "LORA", "init_lora_weights": "orthogonal"}},
    ],
)
def test_any_spelling_of_a_module_that_peft_knows_is_taken(
    options: dict[str, Any], base: Path
) -> None:
    trained = [name for name, p in built(base, **options).named_parameters() if p.requires_grad]
    assert any("score" in name for name in trained)
    assert len(trained) > 1


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.lora={r: 4}", "model.peft={peft_type: LOHA}"], "lora and peft are both set"),
        (["model.peft={r: 4}"], "peft needs peft_type"),
    ],
)
def test_an_unclear_choice_of_adapters_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({}, overrides)
