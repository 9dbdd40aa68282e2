"""The flat row gives what the padded rows give: rewards, and the gradient of every parameter."""

import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from rayrm.config.schema import LoraSection, ModelSection
from rayrm.data.packing import PackedBatch, pack_pairs, pack_replies
from rayrm.data.plan import Layout
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import RayrmError
from rayrm.model.adapters import add_adapter
from rayrm.model.loss import bradley_terry_loss
from rayrm.model.reward import RewardModel, checkpoint_activations
from rayrm.model.shared_prompt import reason_against, shared_prompt_attention
from tests.builders import pair_of

VOCABULARY = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "num_labels": 1,
}
WINDOW = {"sliding_window": 7}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": WINDOW,
    "gemma2": {**WINDOW, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOW, "num_hidden_layers": 6},
    "gpt_neox": {"num_key_value_heads": 4},
    "phi3": WINDOW,
}
LENGTHS = [(0, 3, 9), (20, 3, 2), (1, 1, 1), (5, 30, 12), (40, 9, 9), (12, 1, 60), (0, 1, 1)]
"""Tokens of prompt, chosen and rejected reply."""


def classifier_of(kind: str, **options: Any) -> PreTrainedModel:
    """A tiny one-label classifier, its weights large enough for attention to matter."""
    config = AutoConfig.for_model(kind, **{**COMMON, **ARCHITECTURES.get(kind, {}), **options})
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(config).float()
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return classifier


def model_of(classifier: PreTrainedModel, *, lora: bool = False) -> RewardModel:
    backbone: Any = classifier.base_model
    head = classifier.get_submodule("score")
    wrapped: nn.Module = classifier
    if lora:
        _, wrapped, _ = add_adapter(
            classifier,
            ModelSection(lora=LoraSection(r=4)),
            head="score",
            gather=lambda parameters: nullcontext(),
        )
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        head = classifier.get_submodule("score")
    return RewardModel(wrapped, backbone=backbone, head=head).train()


def pairs_of(lengths: list[tuple[int, int, int]], *, seed: int = 0) -> list[TokenizedPair]:
    rng = np.random.default_rng(seed)
    return [
        pair_of(*(rng.integers(3, VOCABULARY, n).tolist() for n in parts), margin=rng.random())
        for parts in lengths
    ]


def outcome(
    model: RewardModel, batches: list[PackedBatch], num_pairs: int
) -> tuple[Tensor, list[Tensor]]:
    """Loss of a step, and the gradient of every trained parameter."""
    model.zero_grad()
    losses: list[Tensor] = []
    for batch in batches:
        chosen, rejected = model(**batch.inputs).view(-1, 2).unbind(1)
        loss = bradley_terry_loss(chosen, rejected, batch.margin).sum() / num_pairs
        loss.backward()
        losses.append(loss.detach())
    gradients = [x.grad for x in model.parameters() if x.requires_grad and x.grad is not None]
    return torch.stack(losses).sum(), [gradient.clone() for gradient in gradients]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare to 1e-5 of the largest number: a gradient that is zero in theory is noise."""
    assert len(found) == len(expected) > 0
    scale = max(tensor.abs().max().item() for tensor in expected)
    assert scale > 1e-3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_rewards_and_gradients_are_those_of_padded_rows(kind: str, lora: bool, checkpointing: bool):
    classifier = classifier_of(kind)
    assert reason_against(classifier) is None
    if checkpointing:
        checkpoint_activations(classifier)
    model = model_of(classifier, lora=lora)
    pairs = pairs_of(LENGTHS)
    padded = pack_pairs(pairs, "padded")
    with model.padded():
        expected_rewards = model(**padded.inputs).detach()
        expected_loss, expected = outcome(model, [padded], len(pairs))
    for layout in ("shared_prompt", "packed"):
        batch = pack_pairs(pairs, layout)
        rewards = model(**batch.inputs).detach()
        torch.testing.assert_close(rewards, expected_rewards, rtol=1e-5, atol=1e-5)
        loss, gradients = outcome(model, [batch], len(pairs))
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
        assert_alike(gradients, expected)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 30)),
        min_size=1,
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    layout=st.sampled_from(["shared_prompt", "packed"]),
)
def test_no_cutting_moves_a_steps_loss_or_gradient(
    lengths: list[tuple[int, int, int]], cuts: list[int], layout: Layout
):
    model, pairs = LLAMA, pairs_of(lengths, seed=len(lengths))
    with model.padded():
        expected_loss, expected = outcome(model, [pack_pairs(pairs, "padded")], len(pairs))
    parts = [
        [pair for pair, cut in zip(pairs, cuts, strict=False) if cut == part] for part in range(4)
    ]
    loss, gradients = outcome(model, [pack_pairs(part, layout) for part in parts], len(pairs))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert_alike(gradients, expected)


LLAMA = model_of(classifier_of("llama"))


def test_several_replies_to_one_prompt_score_as_each_alone():
    model = model_of(classifier_of("llama")).eval()
    rng = np.random.default_rng(1)
    lengths = (15, 3, 40, 1, 9, 12)
    prompt, *replies = (rng.integers(3, VOCABULARY, n, dtype=np.int32) for n in lengths)
    with torch.no_grad():
        together = model(**pack_replies([prompt], [replies]))
        alone = [model(**pack_replies([prompt], [[reply]])) for reply in replies]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_bfloat16_rewards_lie_as_near_to_the_truth_as_those_of_padded_rows():
    pairs = pairs_of(LENGTHS)
    exact = model_of(classifier_of("llama")).eval()
    model = model_of(classifier_of("llama").bfloat16()).eval()
    with torch.no_grad():
        truth = exact(**pack_pairs(pairs, "shared_prompt").inputs)
        shared = model(**pack_pairs(pairs, "shared_prompt").inputs).float()
        with model.padded():
            padded = model(**pack_pairs(pairs, "padded").inputs).float()
    assert (shared - truth).abs().max() <= 1.5 * (padded - truth).abs().max()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("bloom", {"hidden_size": 32, "n_head": 4}, "does not take its attention function"),
        (
            "gpt_oss",
            {"num_local_experts": 2, "num_experts_per_tok": 1, **WINDOW},
            "has attention sinks",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends in both directions"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_models_that_cannot_be_computed_so_are_told_from_those_that_can(
    kind: str, options: dict[str, Any], reason: str
):
    assert reason in str(reason_against(classifier_of(kind, **options)))


def test_an_argument_that_is_not_served_is_refused_and_not_passed_over():
    query = torch.zeros(1, 4, 3, 8)
    segments = pack_pairs(pairs_of([(1, 1, 1)]), "shared_prompt").inputs["segments"]
    with pytest.raises(RayrmError, match=r"needs s_aux, .* set train\.shared_prompt: off"):
        shared_prompt_attention(
            nn.Identity(), query, query, query, None, segments=segments, s_aux=torch.zeros(4)
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_kernels_of_a_gpu_give_the_rewards_of_the_cpu(kind: str):
    pairs = pairs_of([*LENGTHS, (200, 90, 30)])
    exact = model_of(classifier_of(kind)).eval()
    model = model_of(classifier_of(kind).bfloat16()).to("cuda").eval()
    with torch.no_grad():
        expected = exact(**pack_pairs(pairs, "shared_prompt").inputs)
        batch = pack_pairs(pairs, "shared_prompt").to(torch.device("cuda"))
        rewards = model(**batch.inputs).float().cpu()
        padded = pack_pairs(pairs, "padded").to(torch.device("cuda"))
        with model.padded():
            plain = model(**padded.inputs).float().cpu()
    assert (rewards - expected).abs().max() <= 2 * (plain - expected).abs().max()
    logging.getLogger(__name__).info("largest difference %s", (rewards - expected).abs().max())
