"""Reward models of other trainers begin with their own rewards."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rayrm.config.schema import ModelSection
from rayrm.data.packing import pack_pairs
from rayrm.errors import ConfigError
from rayrm.model.build import build_reward_model, check_reward_model
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.convert import convert
from tests.builders import pair_of, tiny_llama_folder, word_tokenizer
from tests.worlds import export_trained, in_world, proof_of, start_engine

PAIRS = [pair_of([10, 11, 12], [13, 14, 15, 16], [17]), pair_of([20], [21], [22, 23, 24])]
TEXTS = [[10, 11, 12, 13, 14, 15, 16], [10, 11, 12, 17], [20, 21], [20, 22, 23, 24]]
BIAS = 0.125
WEIGHT = torch.empty(1, 32).normal_(0, 0.1, generator=torch.Generator().manual_seed(5))
VALUE_HEAD = {"v_head.summary.weight": WEIGHT, "v_head.summary.bias": torch.tensor([BIAS])}


def write(folder: Path, weights: dict[str, Tensor], name: str = "model.safetensors") -> None:
    """Write weights, without the memory that tied ones share."""
    save_file(
        {key: tensor.clone() for key, tensor in weights.items()},
        folder / name,
        metadata={"format": "pt"},
    )


def openrlhf(folder: Path, **fields: Any) -> dict[str, Tensor]:
    """Give the folder OpenRLHF's configuration; return its weights under OpenRLHF's names."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["RewardModel"], "normalize_reward": False, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    return weights | {f"{fields.get('value_head_prefix', 'value_head')}.weight": WEIGHT}


def openrlhf_old(folder: Path) -> None:
    write(folder, openrlhf(folder))


def openrlhf_score(folder: Path) -> None:
    write(folder, openrlhf(folder, value_head_prefix="score"))


def openrlhf_sharded_under_a_name_of_its_own(folder: Path) -> None:
    weights = openrlhf(folder, value_head_prefix="critic_head", mean=0.5, std=2.0)
    (folder / "model.safetensors").unlink()
    names = sorted(weights, reverse=True)
    shard_of = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(shard_of.values()):
        write(folder, {name: weights[name] for name in names if shard_of[name] == shard}, shard)
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def llama_factory(folder: Path) -> None:
    write(folder, VALUE_HEAD, "value_head.safetensors")


def llama_factory_pickled(folder: Path) -> None:
    torch.save(VALUE_HEAD, folder / "value_head.bin")


def trl_value_head(folder: Path) -> None:
    write(folder, load_file(folder / "model.safetensors") | VALUE_HEAD)


def trl_value_head_pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors") | VALUE_HEAD, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


WRITERS: list[Callable[[Path], None]] = [
    openrlhf_old,
    openrlhf_score,
    openrlhf_sharded_under_a_name_of_its_own,
    llama_factory,
    llama_factory_pickled,
    trl_value_head,
    trl_value_head_pickled,
]


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("causal") / "model", word_tokenizer())


@pytest.fixture
def folder(causal: Path, tmp_path: Path) -> Path:
    """A language model to make a reward model of."""
    return Path(shutil.copytree(causal, tmp_path / "model"))


@pytest.fixture(scope="module")
def adapter(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward adapter as LLaMA-Factory writes it: that of a language model, the head beside it."""
    model: Any = AutoModelForCausalLM.from_pretrained(causal, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=2)  # a mild one: merging rounds
    adapted = get_peft_model(model, config)
    torch.manual_seed(3)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    place = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(str(place))
    llama_factory(place)
    return place


def by_hand(language_model: Any) -> list[float]:
    """The head on the last hidden state of each text, without a bias."""
    rewards: list[float] = []
    for text in TEXTS:
        with torch.no_grad():
            ran = language_model.eval()(torch.tensor([text]), output_hidden_states=True)
        rewards.append((WEIGHT[0] @ ran.hidden_states[-1][0, -1]).item())
    return rewards


@pytest.fixture(scope="module")
def expected(causal: Path) -> list[float]:
    return by_hand(AutoModelForCausalLM.from_pretrained(causal, dtype=torch.float32))


@pytest.fixture(scope="module")
def expected_of_adapter(causal: Path, adapter: Path) -> list[float]:
    from peft import PeftModel

    base: Any = AutoModelForCausalLM.from_pretrained(causal, dtype=torch.float32)
    return by_hand(PeftModel.from_pretrained(base, str(adapter)))


def built(folder: Path, **options: Any) -> Any:
    section = ModelSection(name_or_path=str(folder), dtype="float32", **options)
    check_reward_model(section, load_tokenizer(section), shared_prompt="on")
    return build_reward_model(section, load_tokenizer(section), seed=0, shared_prompt="on").eval()


def rewards_of(model: Any) -> list[float]:
    with torch.no_grad():
        return model(**pack_pairs(PAIRS, model.layout).inputs).tolist()


def refused(folder: Path, **options: Any) -> str:
    section = ModelSection(name_or_path=str(folder), dtype="float32", **options)
    with pytest.raises(ConfigError) as before_the_start:
        check_reward_model(section, load_tokenizer(section), shared_prompt="auto")
    return str(before_the_start.value)


@pytest.mark.parametrize("write_as", WRITERS)
def test_a_model_of_another_trainer_scores_with_its_own_head(
    write_as: Callable[[Path], None], folder: Path, expected: list[float]
) -> None:
    write_as(folder)
    model = built(folder)
    assert rewards_of(model) == pytest.approx(expected, abs=1e-6)
    assert "drawn" not in model.origin
    for file in folder.glob("value_head.*"):
        assert model.origin == (
            f"head: v_head.summary of {file}, without its bias: rewards are lower by 0.125"
        )


@pytest.mark.parametrize("on_top", [{}, {"lora": {"r": 3}}], ids=["gone on with", "merged below"])
def test_an_adapter_of_llama_factory_scores_with_the_head_beside_it(
    on_top: dict[str, Any], causal: Path, adapter: Path, expected_of_adapter: list[float]
) -> None:
    model = built(causal, adapter_path=str(adapter), **on_top)
    assert rewards_of(model) == pytest.approx(expected_of_adapter, abs=1e-6)
    assert model.origin.startswith(f"head: v_head.summary of {adapter}/value_head.safetensors")
    assert "drawn" not in model.origin
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert sum("score" in name for name in trained) == 1


@pytest.mark.parametrize("write_as", [llama_factory, trl_value_head, openrlhf_old])
def test_lora_goes_on_from_the_head(
    write_as: Callable[[Path], None], folder: Path, expected: list[float]
) -> None:
    write_as(folder)
    assert rewards_of(built(folder, lora={"r": 2})) == pytest.approx(expected, abs=1e-6)


def test_a_head_of_its_own_goes_before_one_beside_it(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path, word_tokenizer(), num_labels=1)
    without = rewards_of(built(folder))
    llama_factory(folder)
    assert rewards_of(built(folder)) == without
    assert built(folder).origin == "head: kept"


def test_the_head_of_a_language_model_is_told_to_be_new(folder: Path) -> None:
    assert built(folder).origin == "new weights, drawn from run.seed: score.weight"


@pytest.mark.parametrize("write_as", WRITERS)
def test_an_export_scores_the_same_with_transformers_alone(
    write_as: Callable[[Path], None], folder: Path, tmp_path: Path, expected: list[float]
) -> None:
    write_as(folder)
    convert(str(folder), str(tmp_path / "out"))
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        found = [plain(torch.tensor([text])).logits.item() for text in TEXTS]
    assert found == pytest.approx(expected, abs=1e-6)
    config: Any = AutoConfig.from_pretrained(tmp_path / "out")
    assert getattr(config, "value_head_prefix", "score") == "score"  # OpenRLHF finds it again
    if write_as is openrlhf_sharded_under_a_name_of_its_own:
        assert (config.reward_mean, config.reward_std) == (0.5, 2.0)
        assert not hasattr(config, "mean")


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_of_llama_factory_is_exported(
    merge: bool, adapter: Path, tmp_path: Path, expected_of_adapter: list[float]
) -> None:
    from peft import AutoPeftModelForSequenceClassification

    convert(str(adapter), str(tmp_path / "out"), merge=merge)
    kind = AutoModelForSequenceClassification if merge else AutoPeftModelForSequenceClassification
    plain: Any = kind.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = [plain.eval()(input_ids=torch.tensor([text])).logits.item() for text in TEXTS]
    assert found == pytest.approx(expected_of_adapter, abs=1e-5)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((1, 48), "takes a hidden size of 48, the model has 32; copy model and head from one"),
        ((2, 32), "has the shape [2, 32], that of a reward model [1, hidden]"),
        ((32,), "has the shape [32], that of a reward model [1, hidden]"),
    ],
)
def test_a_head_of_another_shape_is_refused_with_its_file(
    shape: tuple[int, ...], told: str, folder: Path, causal: Path, adapter: Path, tmp_path: Path
) -> None:
    both = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    for place in (folder, both):
        write(place, {"v_head.summary.weight": torch.ones(shape)}, "value_head.safetensors")
    found = refused(folder)
    assert found.startswith(
        f"model.name_or_path: v_head.summary of {folder}/value_head.safetensors {told}"
    )
    with pytest.raises(ConfigError, match=re.escape(told)):
        convert(str(folder), str(tmp_path / "out"))
    found = refused(causal, adapter_path=str(both))
    assert found.startswith(
        f"model.adapter_path: v_head.summary of {both}/value_head.safetensors {told}"
    )


@pytest.mark.parametrize("name", ["value_head.safetensors", "value_head.bin"])
def test_a_broken_head_is_refused_with_its_file(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b"no weights")
    assert refused(folder).startswith(f"model.name_or_path: {name} of {folder} cannot be read")


def test_a_pickled_head_that_would_run_code_is_refused(folder: Path, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"v_head.summary.weight": Touch()}, folder / "value_head.bin")
    assert f"value_head.bin of {folder} cannot be read" in refused(folder)
    assert not (tmp_path / "ran").exists()


def score_under_zero(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Score with each of the models under ZeRO-3, export it, and return rewards and origin."""
    from rayrm.config.schema import RunConfig

    told: list[dict[str, Any]] = []
    for name, section in job.items():
        config = RunConfig.model_validate({"model": section})
        engine, tokenizer = start_engine(config, num_steps=1)
        proof = proof_of(engine, PAIRS)
        rewards = proof.rewards.view(2, -1).T.flatten()  # chosen and rejected in turn
        told.append({"rewards": rewards.tolist(), "origin": engine.model.origin})
        export_trained(engine, tokenizer, config.model, Path(name), proof)
    return told


@pytest.mark.deepspeed
def test_partitioned_models_score_with_their_heads(
    folder: Path,
    causal: Path,
    adapter: Path,
    tmp_path: Path,
    expected: list[float],
    expected_of_adapter: list[float],
) -> None:
    openrlhf_sharded_under_a_name_of_its_own(folder)
    trl = Path(shutil.copytree(causal, tmp_path / "trl"))
    trl_value_head(trl)
    on_adapter = {"name_or_path": str(causal), "adapter_path": str(adapter)}
    sections: list[dict[str, Any]] = [
        {"name_or_path": str(folder)},
        {"name_or_path": str(trl), "lora": {"r": 2}},
        on_adapter,
        {**on_adapter, "lora": {"r": 2}},
    ]
    job = {
        str(tmp_path / f"saved {number}"): {"dtype": "float32", **section}
        for number, section in enumerate(sections)
    }
    told = in_world(score_under_zero, job, num_ranks=2, folder=tmp_path)
    for one, rewards in zip(told, [expected] * 2 + [expected_of_adapter] * 2, strict=True):
        assert one["rewards"] == pytest.approx(rewards, abs=1e-6)
        assert one["origin"].startswith("head: ")
        assert "drawn" not in one["origin"]
