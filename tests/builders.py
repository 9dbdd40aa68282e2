"""Small things that tests build from nothing: no network, no files, milliseconds."""

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from rayrm.data.tokenize import TokenizedPair

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}<call>{{ call | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
"""ChatML, with tools in front and tool calls behind the content."""

_CHAT_MARKS = ["<|im_start|>", "<|im_end|>"]
_SPECIAL_TOKENS = ["<unk>", "<bos>", "<eos>", "<pad>", "[CLS]", "[SEP]", *_CHAT_MARKS]
_CORPUS = """
system user assistant tools Human: Assistant: Name a colour. Name a fruit. Blue is a colour. Red.
Green. Seven. An apple. A pear. What is the answer? The answer is yes. The answer is no, not at all.
Question: Answer: 46 $46 $7 $12 $46 $7 $12
"""


def word_tokenizer(
    *,
    bos_token: str | None = "<bos>",
    eos_token: str | None = "<eos>",
    pad_token: str | None = "<pad>",
    adds: Literal["nothing", "bos", "cls and sep"] = "nothing",
    chat_template: str | None = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of some 360 ids: it knows some words, and spells all others.

    `adds` is what it puts around plain text; `pad_token="<eos>"` makes padding and EOS one.
    """
    tokenizer = Tokenizer.from_str(_trained_tokenizer())
    if adds != "nothing":
        tokenizer.post_processor = processors.TemplateProcessing(
            single={"bos": "<bos> $A", "cls and sep": "[CLS] $A [SEP]"}[adds],
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in _SPECIAL_TOKENS],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token=bos_token,
        eos_token=eos_token,
        pad_token=pad_token,
        chat_template=chat_template,
    )


@cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer.to_str()


def with_other_template(folder: Path) -> Path:
    """Save a tokenizer whose template writes tokens that the tiny models do not have."""
    template = CHAT_TEMPLATE.replace("<|im_start|>", "<|turn|>") + "{{ eos_token }}"
    tokenizer = word_tokenizer(chat_template=template)
    tokenizer.add_tokens(["<|turn|>", "<|stop|>", "<|unused|>"], special_tokens=True)
    tokenizer.eos_token = "<|stop|>"
    tokenizer.save_pretrained(folder)
    return folder


def tiny_llama_folder(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_labels: int | None = None,
    tied: bool = False,
    hidden_size: int = 32,
    seed: int = 0,
) -> Path:
    """Save a two-layer Llama with its tokenizer, and return the folder.

    It is a language model, or a classifier where `num_labels` is given.
    """
    options: dict[str, Any] = {} if num_labels is None else {"num_labels": num_labels}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        options[name] = getattr(tokenizer, name)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        **options,
    )
    architecture = LlamaForCausalLM if num_labels is None else LlamaForSequenceClassification
    return _saved(architecture, config, folder, tokenizer, seed=seed)


def tiny_bert_folder(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Path:
    """Save a two-layer BERT with its tokenizer, as it is before a classifier is made of it."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    return _saved(BertForMaskedLM, config, folder, tokenizer, seed=seed)


def tiny_gpt2_folder(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Path:
    """Save a two-layer GPT-2, whose positions are learned, with its tokenizer."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        bos_token_id=None,  # its own lie beyond this vocabulary
        eos_token_id=None,
        initializer_range=0.2,
    )
    return _saved(GPT2LMHeadModel, config, folder, tokenizer, seed=seed)


def tiny_jamba_folder(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Path:
    """Save a Jamba of one state-space layer and one attention layer, with its tokenizer."""
    config = JambaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_state=4,
        mamba_d_conv=2,
        mamba_dt_rank=4,
        num_experts=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        initializer_range=0.2,
    )
    return _saved(JambaForCausalLM, config, folder, tokenizer, seed=seed)


def _saved(
    architecture: Callable[[Any], Any],
    config: PretrainedConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
) -> Path:
    """Save a model of random weights with its tokenizer, and return the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        architecture(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_pairs(
    rng: np.random.Generator, sizes: Iterable[Any], *, below: int = 300
) -> list[TokenizedPair]:
    """Pairs of ids from 10 on, by the ``sizes`` ``[pairs, 3]`` of prompt, chosen and rejected."""
    return [pair_of(*(rng.integers(10, below, n).tolist() for n in parts)) for parts in sizes]


def pair_of(
    prompt: list[int], chosen: list[int], rejected: list[int], margin: float = 0.0
) -> TokenizedPair:
    """A tokenized pair of lists of ids."""
    prompt_ids, chosen_ids, rejected_ids = (
        np.array(ids, dtype=np.int32) for ids in (prompt, chosen, rejected)
    )
    return TokenizedPair(prompt_ids, chosen_ids, rejected_ids, margin)
