import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from rayrm.config.schema import LoraSection, ModelSection
from rayrm.data.packing import pack_pairs
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import ConfigError
from rayrm.model.build import build_reward_model, load_config
from rayrm.model.reward import (
    EncoderRewardModel,
    Float32Linear,
    RewardModel,
    checkpoint_activations,
)
from rayrm.model.tokenizer import load_tokenizer
from tests.builders import (
    pair_of,
    tiny_bert_folder,
    tiny_llama_folder,
    with_other_template,
    word_tokenizer,
)

PAD = 3
PAIRS = [
    pair_of([10, 11, 12], [13, 14, 15, 16], [17]),
    pair_of([20], [21], [22, 23, 24]),
    pair_of([], [30, 31], [32, 33]),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model."""
    return tiny_llama_folder(tmp_path_factory.mktemp("llama"), word_tokenizer())


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a one-label classifier."""
    return tiny_llama_folder(tmp_path_factory.mktemp("scorer"), word_tokenizer(), num_labels=1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a masked language model."""
    return tiny_bert_folder(tmp_path_factory.mktemp("bert"), word_tokenizer())


def build(folder: Path, *, seed: int = 1, **options: Any) -> RewardModel | EncoderRewardModel:
    section = ModelSection(name_or_path=str(folder), **{"dtype": "float32", **options})
    return build_reward_model(section, load_tokenizer(section), seed=seed)


def weights(model: nn.Module, *names: str) -> list[Tensor]:
    """The weights whose names end so, or all of them."""
    return [x for name, x in model.named_parameters() if name.endswith(names or "")]


def head_of(model: nn.Module) -> Tensor:
    (head,) = weights(model, "score.weight")
    return head


def rewards_of(model: RewardModel | EncoderRewardModel, pairs: list[TokenizedPair]) -> Tensor:
    """Rewards of all chosen and all rejected sides."""
    with torch.no_grad():
        return model.eval()(**pack_pairs(pairs, model.layout).inputs)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    """What seed 1 gives with the folders' initializer_range."""
    generator = torch.Generator().manual_seed(1)
    return [torch.empty(shape).normal_(0.0, 0.2, generator=generator) for shape in shapes]


def test_a_new_head_is_drawn_from_the_seed_and_nothing_else(llama: Path):
    torch.manual_seed(123)
    first = build(llama)
    torch.manual_seed(456)
    torch.randn(7)
    second = build(llama)
    assert same(weights(first), weights(second))
    assert not torch.equal(head_of(build(llama, seed=2)), head_of(first))
    assert same([head_of(first)], drawn((1, 32)))


def test_the_backbone_is_that_of_the_folder_for_any_seed(llama: Path):
    backbones = [weights(build(llama, seed=seed), "proj.weight") for seed in (1, 2)]
    assert len(backbones[0]) == 14
    assert same(*backbones)


def test_all_new_weights_of_an_encoder_are_drawn_from_the_seed(
    bert: Path, caplog: pytest.LogCaptureFixture
):
    torch.manual_seed(123)
    first = build(bert)
    torch.manual_seed(456)
    second = build(bert)
    new = ("pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias")
    assert same(weights(first), weights(second))
    assert same(weights(first, *new[::2]), drawn((32, 32), (1, 32)))
    assert same(weights(first, *new[1::2]), [torch.zeros(32), torch.zeros(1)])
    assert first.origin.startswith("new weights, drawn from run.seed: ")
    assert all(name in first.origin for name in new)


def test_the_scale_of_a_norm_that_the_folder_lacks_begins_at_one(llama: Path, tmp_path: Path):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert same(weights(build(tmp_path), "model.norm.weight"), [torch.ones(32)])


def test_a_head_that_the_folder_has_is_kept(scorer: Path):
    model = build(scorer, seed=9)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    assert torch.equal(head_of(model), plain.score.weight)
    assert model.origin == "head: kept"


def test_a_classifier_with_several_labels_is_refused(tmp_path: Path):
    tiny_llama_folder(tmp_path, word_tokenizer(), num_labels=2)
    with pytest.raises(ConfigError, match=r"with 2 labels; .* start from its backbone"):
        build(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.name_or_path: cannot load "):
        build(tmp_path)


def test_a_folder_without_weights_is_refused(llama: Path, tmp_path: Path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    with pytest.raises(ConfigError, match="as a sequence classifier"):
        build(tmp_path)


def test_an_argument_that_the_model_does_not_take_is_named(llama: Path):
    with pytest.raises(ConfigError, match=r"^model\.model_init_kwargs\.foo: .*; leave it out"):
        build(llama, model_init_kwargs={"foo": 1})


def test_the_config_is_that_of_a_one_label_classifier_with_padding(llama: Path):
    section = ModelSection(name_or_path=str(llama), eos_token="[SEP]")
    config: Any = load_config(section, load_tokenizer(section))
    assert (config.num_labels, list(config.id2label)) == (1, [0])
    assert (config.pad_token_id, config.eos_token_id) == (PAD, 5)


def test_rewards_are_those_of_plain_transformers_on_padded_batches(scorer: Path):
    model = build(scorer)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    inputs = pack_pairs(PAIRS, "padded").inputs
    padded = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, PAD)
    with torch.no_grad():
        logits = plain.eval()(input_ids=padded, attention_mask=inputs["attention_mask"]).logits
    rewards = rewards_of(model, PAIRS)
    torch.testing.assert_close(rewards, logits[:, 0], rtol=1e-5, atol=1e-5)
    assert rewards.unique().numel() == 6


def test_rewards_do_not_move_with_the_batch(scorer: Path):
    model = build(scorer)
    together = rewards_of(model, PAIRS).view(-1, 2)
    alone = torch.stack([rewards_of(model, [pair]) for pair in PAIRS])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)


def test_a_reward_is_read_at_the_last_token_even_if_that_is_the_pad_id(scorer: Path):
    model = build(scorer)
    assert isinstance(model, RewardModel)
    sides = [[10, PAD, PAD], [10, PAD, 11, PAD, PAD, 12], [PAD]]
    for side in sides:
        (reward, _) = rewards_of(model, [pair_of([], side, [1] * 9)]).tolist()
        backbone: Any = model.classifier.get_submodule("model")
        with torch.no_grad(), model.padded():
            hidden = backbone(input_ids=torch.tensor([side])).last_hidden_state[0, -1]
        expected = (head_of(model) @ hidden).item()
        assert reward == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("folder", ["scorer", "bert"])
def test_no_pairs_are_a_forward_without_rewards(folder: str, request: pytest.FixtureRequest):
    model = build(request.getfixturevalue(folder))
    rewards = model(**pack_pairs([], model.layout).inputs)
    assert (rewards.shape, rewards.dtype) == ((0,), torch.float32)
    rewards.sum().backward()  # every rank has to run it under ZeRO-3


def test_bfloat16_weights_give_float32_rewards_off_the_bfloat16_grid(scorer: Path):
    model = build(scorer, dtype="bfloat16")
    assert {x.dtype for x in weights(model)} == {torch.bfloat16}
    rewards = rewards_of(model, PAIRS)
    assert rewards.dtype == torch.float32
    assert (rewards != rewards.bfloat16()).all()
    torch.testing.assert_close(rewards, rewards_of(build(scorer), PAIRS), rtol=0.05, atol=0.05)


def test_the_float32_head_is_a_linear_layer():
    layer = Float32Linear(2, 1).to(torch.bfloat16)
    layer.weight.data = torch.tensor([[2.0, -1.0]]).bfloat16()
    layer.bias.data = torch.tensor([0.5]).bfloat16()
    rewards = layer(torch.tensor([[20.0, 0.126]]).bfloat16())
    assert rewards.item() == pytest.approx(40.5 - 0.126, abs=1e-3)  # bfloat16 would say 40.25
    assert isinstance(layer, nn.Linear)


@pytest.fixture
def dropping(llama: Path, tmp_path: Path) -> Path:
    """A folder whose model drops half of its attention in training."""
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    return tmp_path


def is_random(model: RewardModel | EncoderRewardModel) -> bool:
    """Whether two forwards in training differ."""
    inputs = pack_pairs(PAIRS, model.layout).inputs
    return not torch.equal(model.train()(**inputs), model.train()(**inputs))


def test_dropout_of_the_backbone_is_switched_off_or_left(dropping: Path):
    assert not is_random(build(dropping))
    assert is_random(build(dropping, disable_dropout=False))


def test_disable_dropout_leaves_lora_dropout_alone(dropping: Path):
    model = build(dropping, lora=LoraSection(lora_dropout=0.3))
    found = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert found == {0.3}
    assert not is_random(build(dropping, lora=LoraSection()))


@pytest.mark.parametrize(
    ("targets", "num_adapted"),
    [
        pytest.param("all-linear", 14, id="all linear layers but the head"),
        pytest.param(("q_proj", "v_proj"), 4, id="named layers"),
        pytest.param(("q_proj", "score"), 2, id="the head is spared where it is named"),
        pytest.param(r".*\.layers\.0\..*_proj", 7, id="regular expression"),
    ],
)
def test_lora_trains_adapters_and_the_whole_head(
    llama: Path, targets: str | tuple[str, ...], num_adapted: int
):
    model = build(llama, lora=LoraSection(r=4, target_modules=targets))
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    heads = [name for name in trained if "score" in name]
    adapters = [name for name in trained if "lora_" in name]
    assert len(adapters) == 2 * num_adapted
    assert len(heads) == 1
    assert sorted([*heads, *adapters]) == sorted(trained)
    assert not [name for name in adapters if "score" in name]


def test_fresh_lora_scores_as_its_base(llama: Path):
    adapted = rewards_of(build(llama, lora=LoraSection()), PAIRS)
    torch.testing.assert_close(adapted, rewards_of(build(llama), PAIRS), rtol=1e-5, atol=1e-5)


def test_lora_is_drawn_from_the_seed(llama: Path):
    torch.manual_seed(123)
    first = build(llama, lora=LoraSection())
    torch.manual_seed(456)
    assert same(weights(first), weights(build(llama, lora=LoraSection())))


def test_the_trained_head_of_lora_moves_the_rewards(llama: Path):
    model = build(llama, lora=LoraSection())
    before = rewards_of(model, PAIRS)
    model(**pack_pairs(PAIRS, model.layout).inputs).sum().backward()
    (head,) = [x for x in weights(model, "score.modules_to_save.default.weight")]
    assert head.grad is not None
    with torch.no_grad():
        head.mul_(2)
    torch.testing.assert_close(rewards_of(model, PAIRS), 2 * before, rtol=1e-5, atol=1e-5)


def test_lora_on_bfloat16_stays_in_one_type(llama: Path):
    model = build(llama, dtype="bfloat16", lora=LoraSection())
    assert {x.dtype for x in weights(model)} == {torch.bfloat16}
    assert rewards_of(model, PAIRS).dtype == torch.float32


def test_lora_on_layers_that_do_not_exist_is_refused(llama: Path):
    with pytest.raises(ConfigError, match=r"^model\.lora\.target_modules: no_proj is no module"):
        build(llama, lora=LoraSection(target_modules=("no_proj",)))


def test_gradient_checkpointing_changes_no_gradient(llama: Path):
    gradients: list[list[Tensor]] = []
    for checkpointing in (False, True):
        for lora in (None, LoraSection()):
            model = build(llama, lora=lora).train()
            if checkpointing:
                checkpoint_activations(model.classifier)
            forwards = Mock(return_value=None)
            (norm,) = [m for name, m in model.named_modules() if name.endswith("0.input_layernorm")]
            norm.register_forward_hook(forwards)
            model(**pack_pairs(PAIRS, model.layout).inputs).sum().backward()
            assert forwards.call_count == (2 if checkpointing else 1)
            gradients.append([x.grad for x in weights(model) if x.grad is not None])
    assert (len(gradients[0]), len(gradients[1])) == (21, 29)
    torch.testing.assert_close(gradients[2:], gradients[:2], rtol=1e-5, atol=1e-6)


def test_an_encoder_is_pooled_as_its_own_classifier_pools(bert: Path):
    model = build(bert)
    assert isinstance(model, EncoderRewardModel)
    rewards = rewards_of(model, PAIRS)
    assert (rewards.shape, rewards.dtype) == ((6,), torch.float32)
    classifier: Any = model.classifier
    with torch.no_grad():
        alone = classifier(input_ids=torch.tensor([[20, 22, 23, 24]])).logits.item()
    assert rewards[3].item() == pytest.approx(alone, abs=1e-5)


def test_an_encoder_takes_lora(bert: Path):
    model = build(bert, lora=LoraSection())
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    assert {name.split(".")[-1] for name in trained if "classifier.modules_to_save" in name} == {
        "weight",
        "bias",
    }
    assert not [name for name in trained if "classifier.modules_to_save" in name and "lora" in name]
    assert any("query.lora_A" in name for name in trained)


def without_spare_token(folder: Path) -> Path:
    """A folder of a model whose tokenizer has no token to spare for padding."""
    template = "{{ messages }}<pad>[CLS][SEP]<|im_start|><|im_end|>"
    tokenizer = word_tokenizer(pad_token=None, chat_template=template)
    return tiny_llama_folder(folder, tokenizer)


def test_a_token_added_for_padding_gets_an_embedding(tmp_path: Path):
    folder = without_spare_token(tmp_path)
    model: Any = build(folder)
    size = len(word_tokenizer()) + 1
    embeddings = model.classifier.get_input_embeddings().weight
    assert embeddings.shape == (size, 32)
    assert model.classifier.config.vocab_size == size
    assert model.classifier.config.pad_token_id == size - 1
    torch.manual_seed(456)
    assert same(weights(model), weights(build(folder)))
    assert rewards_of(model, [pair_of([10], [size - 1], [11])]).isfinite().all()


def test_a_token_added_for_padding_is_not_trained_by_an_adapter(tmp_path: Path):
    model = build(without_spare_token(tmp_path), lora=LoraSection())
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    assert not [name for name in trained if "embed_tokens" in name]


def test_tokens_of_another_tokenizers_template_get_embeddings_that_an_adapter_trains(
    tmp_path: Path,
):
    folder = tiny_llama_folder(tmp_path / "base", word_tokenizer())
    section: dict[str, Any] = {
        "chat_template_path": str(with_other_template(tmp_path / "other")),
        "lora": LoraSection(),
    }
    model: Any = build(folder, **section)
    size = len(word_tokenizer())
    assert model.classifier.get_input_embeddings().weight.shape[0] == size + 2
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    assert [name for name in trained if "embed_tokens.modules_to_save" in name]
    tokenizer: Any = load_tokenizer(ModelSection(name_or_path=str(folder), **section))
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert (ids[0], ids[-1]) == (size, size + 1)
    assert tokenizer.eos_token == "<|stop|>"
