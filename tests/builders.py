"""Small things that tests build from nothing: no network, no files, milliseconds."""

from functools import cache
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}<call>{{ call | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
"""ChatML, with tools in front and tool calls behind the content."""

_SPECIAL_TOKENS = [
    *("<unk>", "<bos>", "<eos>", "<pad>", "[CLS]", "[SEP]"),
    *("<|im_start|>", "<|im_end|>"),
]
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
    """A byte-level BPE tokenizer of about 400 ids: common words are one id, every text has some.

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
