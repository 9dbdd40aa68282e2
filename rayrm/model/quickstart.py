"""A tiny Llama made from scratch, so that the quickstart needs neither a download nor a GPU."""

import hashlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rayrm.data import synthetic

_BOS, _PAD, _TURN_START, _TURN_END = "<|bos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
_MAX_LENGTH = 2048
_VOCAB_SIZE = 1024
_CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def quickstart_folder() -> Path:
    """Return the folder of the quickstart model, built at first use and kept in the user's cache.

    The cache is ``$RAYRM_CACHE``, else ``rayrm`` in ``$XDG_CACHE_HOME``, else ``~/.cache/rayrm``.
    The folder's name tells what it was built from, so a newer rayrm or transformers builds its own.
    """
    folder = _cache_folder() / f"quickstart-{_recipe_hash()}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".quickstart-") as aside:
        build_quickstart_model(Path(aside) / "model")
        try:
            (Path(aside) / "model").rename(folder)
        except OSError:
            if not folder.exists():
                raise
            # another process built the same folder meanwhile; theirs is as good
    return folder


def build_quickstart_model(folder: Path, *, seed: int = 0) -> None:
    """Write a tiny decoder with random weights and its tokenizer as a Hugging Face folder.

    The same seed writes the same bytes; the random state of the caller is left alone.
    """
    tokenizer = _build_tokenizer()
    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_MAX_LENGTH,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=ids[_BOS],
        eos_token_id=ids[_TURN_END],
        pad_token_id=ids[_PAD],
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE: the quickstart's words are one token each, any text can be said."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (
            f"{message['role']}\n{message['content']}"
            for row in synthetic.generate_pairs("train")
            for side in row.values()
            for message in side
        ),
        trainers.BpeTrainer(
            vocab_size=_VOCAB_SIZE,
            special_tokens=[_PAD, _BOS, _TURN_START, _TURN_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bos_id = tokenizer.token_to_id(_BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", pair=f"{_BOS} $A $B", special_tokens=[(_BOS, bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BOS,
        eos_token=_TURN_END,
        pad_token=_PAD,
        model_max_length=_MAX_LENGTH,
        chat_template=_CHAT_TEMPLATE,
    )


def _cache_folder() -> Path:
    if own := os.environ.get("RAYRM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rayrm"


def _recipe_hash() -> str:
    recipe = Path(__file__).read_bytes() + Path(synthetic.__file__).read_bytes()
    libraries = " ".join(version(name) for name in ("torch", "transformers", "tokenizers"))
    return hashlib.sha256(recipe + libraries.encode()).hexdigest()[:12]
