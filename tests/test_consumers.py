"""The examples of docs/after-training.md run, and every consumer gets the rewards of training."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, pipeline

from rayrm.config.schema import ModelSection
from rayrm.data.packing import pack_pairs
from rayrm.data.pairs import Conversation, Drop
from rayrm.data.tokenize import PairTokenizer
from rayrm.model.build import build_reward_model
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.convert import convert
from tests.builders import CHAT_TEMPLATE, pair_of, tiny_llama_folder, word_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "after-training.md"
NAMES = "After training: using the model"
REWARD_MEAN, REWARD_STD = -3.0, 2.0

needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")

Side = str | list[Any]  # a text or a conversation


def read_page() -> dict[str, list[str]]:
    """Return the python blocks under each heading."""
    found: dict[str, list[str]] = {}
    heading = ""
    for title, block in re.findall(
        r"^#+ ([^\n]+)$|^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    ):
        heading = title or heading
        if block:
            found.setdefault(heading, []).append(block)
    return found


BLOCKS = read_page()


@dataclass(frozen=True)
class Trained:
    """A model that rayrm trained and exported."""

    folder: Path
    rewards: Callable[[Sequence[Side]], list[float]]
    """What training computes for texts and conversations."""


def train_and_export(base: Path, folder: Path, **options: Any) -> Trained:
    """Export what is built on ``base``, with the weights of an adapter drawn at random."""
    section = ModelSection.model_validate(
        {"name_or_path": str(base), "dtype": "float32", **options}
    )
    tokenizer = load_tokenizer(section)
    model = build_reward_model(section, tokenizer, seed=0).eval()
    if section.trains_adapter:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.1)
    unproved = folder.with_name(f"{folder.name} unproved")
    classifier: Any = model.classifier
    classifier.save_pretrained(unproved)
    tokenizer.save_pretrained(unproved)
    convert(str(unproved), str(folder))

    def rewards(sides: Sequence[Side]) -> list[float]:
        encoded = PairTokenizer(tokenizer, max_length=512).encode(
            [side if isinstance(side, str) else Conversation(side) for side in sides]
        )
        pairs = []
        for ids in encoded:
            assert not isinstance(ids, Drop)
            pairs.append(pair_of(ids[:1].tolist(), ids[1:].tolist(), [9]))
        with torch.no_grad():
            return model(**pack_pairs(pairs, model.layout).inputs)[::2].tolist()

    return Trained(folder, rewards)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of a base whose padding is its EOS; its tokenizer and its template both write a BOS."""
    place = tmp_path_factory.mktemp("full")
    tokenizer = word_tokenizer(
        pad_token="<eos>", adds="bos", chat_template="{{ bos_token }}" + CHAT_TEMPLATE
    )
    base = tiny_llama_folder(place / "base", tokenizer, num_labels=1)
    config = json.loads((base / "config.json").read_text())
    moments = {"reward_mean": REWARD_MEAN, "reward_std": REWARD_STD}
    (base / "config.json").write_text(json.dumps(config | moments))
    return train_and_export(base, place / "model")


@pytest.fixture(scope="module")
def adapter(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of a language model that ends messages with its EOS, which is its padding, too."""
    return train_and_export(base_model, tmp_path_factory.mktemp("lora") / "model", lora={"r": 2})


@pytest.fixture(scope="module")
def names(full: Trained, adapter: Trained) -> dict[str, Any]:
    """The page's names, with folders that are there."""
    namespace: dict[str, Any] = {}
    exec(BLOCKS[NAMES][0], namespace)
    del namespace["__builtins__"]
    return namespace | {"FOLDER": str(full.folder), "ADAPTER": str(adapter.folder)}


@pytest.fixture(scope="module")
def page(names: dict[str, Any]) -> dict[str, Any]:
    """What a reader has who ran the page's first example."""
    namespace = dict(names)
    run_blocks("Transformers", namespace)
    return namespace


def run_blocks(heading: str, namespace: dict[str, Any]) -> None:
    for block in BLOCKS[heading]:
        exec(compile(block, f"{PAGE.name}, {heading}", "exec"), namespace)


def same(rewards: Sequence[float]) -> Any:
    return pytest.approx(list(rewards), rel=1e-5, abs=1e-5)


def test_the_example_conversations_tell_models_inputs_and_mistakes_apart(
    full: Trained, adapter: Trained, names: dict[str, Any]
) -> None:
    sides = [names[name] for name in ("CONVERSATION", "OTHER", "TEXT", "TEXT_PROMPT")]
    rewards = [*full.rewards(sides), *adapter.rewards(sides)]
    assert min(abs(a - b) for i, a in enumerate(rewards) for b in rewards[:i]) > 1e-2


def test_no_example_stands_under_a_heading_that_nothing_runs() -> None:
    assert list(BLOCKS) == [
        NAMES, "Transformers", "Normalising", "Pipeline", "LoRA", "GRPO with TRL", "PPO"
    ]  # fmt: skip


def test_transformers_gives_one_text_a_conversation_and_a_batch_their_rewards(
    full: Trained, page: dict[str, Any]
) -> None:
    expected = full.rewards([page["CONVERSATION"], page["OTHER"], page["TEXT"]])
    assert [*page["rewards"], page["text_reward"]] == same(expected)
    assert page["reward"] == pytest.approx(expected[0], abs=1e-5)


def test_the_folder_knows_how_to_normalise(full: Trained, page: dict[str, Any]) -> None:
    run_blocks("Normalising", page)
    expected = (full.rewards([page["CONVERSATION"]])[0] - REWARD_MEAN) / REWARD_STD
    assert page["normalised"] == pytest.approx(expected, abs=1e-5)


def test_the_pipeline_gives_the_rewards_singly_and_in_padded_batches(
    full: Trained, page: dict[str, Any]
) -> None:
    run_blocks("Pipeline", page)
    expected = full.rewards([page["CONVERSATION"], page["OTHER"], page["TEXT"]])
    assert [*page["many"], page["plain"]] == same(expected)
    assert page["one"] == pytest.approx(expected[0], abs=1e-5)


def test_the_pipeline_needs_not_be_told_to_leave_rewards_as_they_are(
    full: Trained, page: dict[str, Any]
) -> None:
    scorer = pipeline("text-classification", model=str(full.folder))
    found = scorer(page["texts"][0], add_special_tokens=False)[0]["score"]
    assert found == pytest.approx(full.rewards([page["CONVERSATION"]])[0], abs=1e-5)


def test_an_adapter_gives_its_rewards_as_it_is_and_merged(
    adapter: Trained, page: dict[str, Any], tmp_path: Path
) -> None:
    namespace = dict(page)
    run_blocks("LoRA", namespace)
    expected = adapter.rewards([page["CONVERSATION"], page["OTHER"]])
    assert namespace["adapted_rewards"] == same(expected)
    assert namespace["merged_rewards"] == same(expected)
    convert(str(adapter.folder), str(tmp_path / "merged"), merge=True)
    namespace["FOLDER"] = str(tmp_path / "merged")
    run_blocks("Transformers", namespace)
    assert namespace["rewards"] == same(expected)


def test_an_adapter_is_never_scored_without_its_adapter(adapter: Trained) -> None:
    with pytest.raises(OSError, match="no file named model"):
        AutoModelForSequenceClassification.from_pretrained(adapter.folder)


def test_backbone_and_score_give_the_rewards_at_the_last_token(
    full: Trained, page: dict[str, Any]
) -> None:
    run_blocks("PPO", page)
    expected = full.rewards([page["CONVERSATION"], page["OTHER"]])
    assert page["last_rewards"] == same(expected)


@needs_trl
def test_trl_finds_the_rewards_of_responses_behind_padded_queries(
    full: Trained, page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.utils import get_reward

    prompts = ["Question: Name a colour.", "Name a fruit. Question: Name a colour. Answer:"]
    replies = [" Blue is a colour.", " Red."]
    tokenizer = page["tokenizer"]
    queries = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").input_ids
    responses = tokenizer(
        [reply + tokenizer.eos_token for reply in replies],
        add_special_tokens=False,
        padding=True,
        return_tensors="pt",
    ).input_ids
    ids = torch.cat([queries, responses], dim=1)
    with torch.no_grad():
        _, found, _ = get_reward(page["model"], ids, tokenizer.pad_token_id, queries.shape[1])
    # a tokenizer joins no word to the one before it here, so that the parts are those of the whole
    expected = full.rewards([p + r for p, r in zip(prompts, replies, strict=True)])
    assert found.tolist() == same(expected)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The policy's own tokenizer: other ids and another template than the reward model's."""
    special = ["<s>", "</s>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}",
    )


READ_COMPLETIONS = """
import pandas
def completions():
    return json.loads(pandas.read_parquet("grpo/completions").to_json(orient="records"))
"""
ON_TEXT = """
trainer = GRPOTrainer(
    model=POLICY, reward_funcs=[FOLDER, reward_of_text], args=config,
    train_dataset=Dataset.from_list([{"prompt": TEXT_PROMPT}]),
)
trainer.train()
"""


@pytest.fixture(scope="module")
def grpo(names: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What GRPO logs, in a process of its own, for Accelerate's global state."""
    place = tmp_path_factory.mktemp("grpo")
    policy = tiny_llama_folder(place / "policy", byte_tokenizer())
    on_messages, of_merged, on_text = BLOCKS["GRPO with TRL"]
    script = [
        "import json, sys",
        "globals().update(json.load(sys.stdin))",
        READ_COMPLETIONS,
        *BLOCKS["Transformers"],
        *BLOCKS["LoRA"],
        on_messages,
        "found = {'mean_reward': mean_reward, 'messages': completions()}",
        of_merged,
        "found |= {'merged_mean_reward': merged_mean_reward, 'merged': completions()}",
        on_text,
        "found['text'] = completions()",
        ON_TEXT,
        "found['both'] = completions()",
        "json.dump(found, open('found.json', 'w'))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)],
        input=json.dumps(names | {"POLICY": str(policy)}),
        text=True,
        capture_output=True,
        cwd=place,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((place / "found.json").read_text())


@needs_trl
def test_grpo_gives_conversations_the_rewards_of_training(
    full: Trained, names: dict[str, Any], grpo: dict[str, Any]
) -> None:
    rows = grpo["messages"]
    expected = full.rewards([names["PROMPT"] + row["completion"] for row in rows])
    assert len(rows) == 4
    assert [row["model"] for row in rows] == same(expected)
    assert grpo["mean_reward"] == pytest.approx(sum(expected) / 4, abs=1e-5)


@needs_trl
def test_grpo_gives_conversations_the_rewards_of_a_merged_adapter(
    adapter: Trained, names: dict[str, Any], grpo: dict[str, Any]
) -> None:
    expected = adapter.rewards([names["PROMPT"] + row["completion"] for row in grpo["merged"]])
    assert [row["base"] for row in grpo["merged"]] == same(expected)
    assert grpo["merged_mean_reward"] == pytest.approx(sum(expected) / 4, abs=1e-5)


@needs_trl
def test_grpo_gives_texts_the_rewards_of_training_through_the_function_of_the_page(
    full: Trained, grpo: dict[str, Any]
) -> None:
    rows = grpo["text"]
    expected = full.rewards([row["prompt"] + row["completion"] for row in rows])
    assert [row["reward_of_text"] for row in rows] == same(expected)


@needs_trl
def test_grpo_scores_texts_without_their_bos_and_eos_where_it_is_given_the_folder(
    page: dict[str, Any], grpo: dict[str, Any]
) -> None:
    for row in grpo["both"]:
        bare = page["tokenizer"](
            row["prompt"] + row["completion"], add_special_tokens=False, return_tensors="pt"
        )
        with torch.no_grad():
            assert row["model"] == pytest.approx(page["model"](**bare).logits.item(), abs=1e-5)
        assert abs(row["model"] - row["reward_of_text"]) > 1e-3
