import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizer

from rayrm.data.formats import parse_line
from rayrm.data.pairs import (
    Conversation,
    ConversationPair,
    Drop,
    Message,
    Pair,
    TextPair,
    TokenPair,
)
from rayrm.data.tokenize import PairTokenizer, TokenizedPair
from tests.builders import word_tokenizer

ASK: Message = {"role": "user", "content": "Name a colour."}
BLUE: Message = {"role": "assistant", "content": "Blue."}
SEVEN: Message = {"role": "assistant", "content": "Seven."}
TEXTS = TextPair("Name a colour.", " Blue.", " Seven.")
CHAT = ConversationPair([ASK], [BLUE], [SEVEN])
HUMAN = "\n\nHuman: Name a colour.\n\nAssistant: it is "
TRANSCRIPTS = ConversationPair(
    [ASK], [BLUE], [SEVEN], transcripts=(HUMAN + "blue.", HUMAN + "seven.")
)


def outcome(
    pair: Pair, *, max_length: int = 1000, **tokenizer_options: Any
) -> TokenizedPair | Drop:
    tokenizer = PairTokenizer(word_tokenizer(**tokenizer_options), max_length=max_length)
    return tokenizer.tokenize([pair])[0]


def tokenized(pair: Pair, **options: Any) -> TokenizedPair:
    result = outcome(pair, **options)
    assert isinstance(result, TokenizedPair), result
    return result


def sides(pair: TokenizedPair) -> tuple[list[int], list[int]]:
    prompt = pair.prompt_ids.tolist()
    return prompt + pair.chosen_ids.tolist(), prompt + pair.rejected_ids.tolist()


def in_text(pair: TokenizedPair, tokenizer: Any) -> tuple[str, ...]:
    """Prompt, chosen and rejected ids as text."""
    return tuple(map(tokenizer.decode, (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)))


def test_text_is_prompt_and_reply_and_eos():
    pair = tokenized(TEXTS)
    plain = word_tokenizer()
    assert in_text(pair, plain) == ("Name a colour.", " Blue.<eos>", " Seven.<eos>")
    assert sides(pair)[0] == [*plain("Name a colour. Blue.")["input_ids"], 2]


def test_a_conversation_is_what_the_template_renders_and_nothing_else():
    pair = tokenized(CHAT)
    assert in_text(pair, word_tokenizer()) == (
        "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
        "Blue.<|im_end|>\n",
        "Seven.<|im_end|>\n",
    )
    assert pair.prompt_ids.dtype == pair.chosen_ids.dtype == np.int32


def test_lengths_and_margin():
    pair = tokenized(TokenPair([5, 6], [7], [8, 9, 10], margin=0.5))
    assert (pair.num_tokens, pair.chosen_length, pair.rejected_length) == (6, 3, 5)
    assert pair.margin == 0.5


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("Red.", {}, "Red.<eos>"),
        ("Red.<eos>", {}, "Red.<eos>"),
        ("Red.<eos> Blue.", {}, "Red.<eos> Blue.<eos>"),
        ("Red.", {"pad_token": "<eos>"}, "Red.<eos>"),
        ("Red.", {"adds": "bos"}, "<bos>Red.<eos>"),
        ("<bos>Red.", {"adds": "bos"}, "<bos>Red.<eos>"),
        ("<bos>Red.", {}, "<bos>Red.<eos>"),
        ("Red.", {"adds": "cls and sep", "bos_token": None, "eos_token": None}, "[CLS]Red.[SEP]"),
        ("Red.", {"adds": "cls and sep", "eos_token": "[SEP]"}, "[CLS]Red.[SEP]"),
    ],
)
def test_what_stands_around_plain_text(text: str, options: dict[str, Any], expected: str):
    tokenizer: Any = word_tokenizer(**options)
    (ids,) = PairTokenizer(tokenizer, max_length=1000).encode([text])
    assert not isinstance(ids, Drop)
    assert tokenizer.decode(ids) == expected


def test_a_template_that_writes_bos_gets_no_second_one():
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    pair = tokenized(CHAT, adds="bos", chat_template=template)
    assert in_text(pair, word_tokenizer()) == (
        "<bos>Name a colour.<eos>",
        "Blue.<eos>",
        "Seven.<eos>",
    )


@pytest.mark.parametrize(
    ("pair", "options", "remedy"),
    [
        (TEXTS, {"eos_token": None}, "model.eos_token"),
        (TEXTS, {"eos_token": None, "adds": "bos"}, "model.eos_token"),
        (CHAT, {"chat_template": None}, "model.chat_template_path"),
        (TEXTS, {"max_length": 3}, "data.max_length (3)"),
        (CHAT, {"max_length": 3}, "data.max_length (3)"),
    ],
)
def test_what_can_be_remedied_says_how(pair: Pair, options: dict[str, Any], remedy: str):
    drop = outcome(pair, **options)
    assert isinstance(drop, Drop)
    assert drop.detail.startswith("chosen: ")
    assert remedy in drop.detail


def test_no_eos_concerns_plain_text_only():
    assert isinstance(outcome(CHAT, eos_token=None), TokenizedPair)
    drop = outcome(TEXTS, eos_token=None)
    assert isinstance(drop, Drop)
    assert drop.reason == "no_eos"


def test_transcripts_use_the_template_or_else_their_text():
    assert sides(tokenized(TRANSCRIPTS)) == sides(tokenized(CHAT))
    pair = tokenized(TRANSCRIPTS, chat_template=None)
    assert in_text(pair, word_tokenizer()) == (HUMAN, "blue.<eos>", "seven.<eos>")


@pytest.mark.parametrize("pair", [TEXTS, CHAT, TRANSCRIPTS, TokenPair([1], [2, 3], [4])])
def test_a_pair_may_be_as_long_as_max_length(pair: Pair):
    whole = tokenized(pair)
    longest = max(whole.chosen_length, whole.rejected_length)
    assert isinstance(outcome(pair, max_length=longest), TokenizedPair)
    drop = outcome(pair, max_length=longest - 1)
    assert isinstance(drop, Drop)
    assert drop.reason == "too_long"
    assert f"{longest} tokens" in drop.detail


def test_the_shared_prompt_ends_where_the_ids_differ():
    tokenizer: Any = word_tokenizer()
    prompt, answer = tokenizer(["Answer: ", "Answer: $46"])["input_ids"]
    assert answer[: len(prompt)] != prompt
    pair = tokenized(TextPair("Answer: ", "$46", "$7"))
    assert in_text(pair, tokenizer) == ("Answer: $", "46<eos>", "7<eos>")
    assert sides(pair)[0] == [*answer, 2]


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [
        ([5, 6, 7], [5, 6, 8], 2),
        ([5, 6], [7, 6], 0),
        ([5], [6], 0),
        ([5, 6], [5, 6, 7], 1),
        ([5, 6, 7], [5], 0),
        ([5, 6, 7, 8], [5, 6], 1),
    ],
)
def test_each_reply_keeps_a_token_of_its_own(chosen: list[int], rejected: list[int], shared: int):
    pair = tokenized(TokenPair([], chosen, rejected))
    assert len(pair.prompt_ids) == shared
    assert sides(pair) == (chosen, rejected)


def test_a_quoted_end_mark_moves_neither_end():
    quote: Message = {
        "role": "assistant",
        "content": "ChatML ends turns with <|im_end|> and a newline.",
    }
    tokenizer: Any = word_tokenizer()
    pair = tokenized(ConversationPair([ASK], [quote], [SEVEN]))
    rendered = tokenizer.apply_chat_template([ASK, quote], tokenize=False)
    assert sides(pair)[0] == tokenizer(rendered)["input_ids"]
    end, newline = tokenizer("<|im_end|>\n")["input_ids"]
    assert pair.chosen_ids.tolist().count(end) == 2
    assert pair.chosen_ids[-2:].tolist() == [end, newline]


THINKING = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if loop.last %}<think>
{{ message['content'] }}{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}
<|im_end|>
{% endfor %}"""


def test_prompt_and_reply_are_the_full_rendering_whatever_the_template_does():
    tokenizer: Any = word_tokenizer(chat_template=THINKING)
    thought: Message = {"role": "assistant", "content": "It is warm.</think>Red."}
    prompt = [ASK, thought, ASK]
    pair = tokenized(ConversationPair(prompt, [BLUE], [thought]), chat_template=THINKING)
    for ids, reply in zip(sides(pair), (BLUE, thought), strict=True):
        rendered = tokenizer.apply_chat_template([*prompt, reply], tokenize=False)
        assert tokenizer.decode(ids) == rendered
        assert ids == tokenizer.apply_chat_template([*prompt, reply])["input_ids"]
    assert "Red." not in in_text(pair, tokenizer)[1]


def test_each_row_has_its_own_tools_and_template_arguments():
    template = (
        "{{ tools | tojson if tools else 'no tools' }} {{ mood | default('calm') }}"
        "{% for message in messages %} {{ message['content'] }}{% endfor %}"
    )
    tokenizer: Any = word_tokenizer(chat_template=template)
    pairs = [
        ConversationPair([ASK], [BLUE], [SEVEN], tools=[{"name": "f"}]),
        ConversationPair([ASK], [BLUE], [SEVEN], chat_template_kwargs={"mood": "glad"}),
        CHAT,
    ]
    results = PairTokenizer(tokenizer, max_length=1000).tokenize(pairs)
    starts = [in_text(pair, tokenizer)[0] for pair in results if isinstance(pair, TokenizedPair)]
    assert starts == [
        '[{"name": "f"}] calm Name a colour.',
        "no tools glad Name a colour.",
        "no tools calm Name a colour.",
    ]


@pytest.mark.parametrize(
    ("template", "kwargs", "detail"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            {},
            "TemplateError: roles must alternate",
        ),
        ("{{ messages[0]['content'] + 1 }}", {}, "TypeError: can only concatenate str"),
        ("{{ messages[9]['content'].strip() }}", {}, "UndefinedError: "),
        ("{% for %}", {}, "TemplateSyntaxError: "),
        ("{{ 1 }}", {"tokenize": True}, "multiple values for keyword argument 'tokenize'"),
    ],
)
def test_a_template_that_fails_costs_its_row(template: str, kwargs: dict[str, Any], detail: str):
    pair = ConversationPair([ASK], [BLUE], [SEVEN], chat_template_kwargs=kwargs)
    tokenizer = PairTokenizer(word_tokenizer(chat_template=template), max_length=1000)
    failed, kept = tokenizer.tokenize([pair, TEXTS])
    assert isinstance(failed, Drop)
    assert failed.reason == "template_error"
    assert detail in failed.detail
    assert isinstance(kept, TokenizedPair)


@pytest.mark.parametrize("content", ["", "I call it."])
def test_a_reply_whose_tool_call_the_template_leaves_out_is_dropped(content: str):
    called = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "f"}}]}
    pair = ConversationPair([ASK], [called], [SEVEN])
    texts = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    calls = texts.replace("{{ eos", "{{ m.get('tool_calls') or '' }}{{ eos")
    (dropped,) = PairTokenizer(word_tokenizer(chat_template=texts), max_length=99).tokenize([pair])
    assert isinstance(dropped, Drop)
    assert dropped.reason == "template_error"
    assert "leaves out the tool calls" in dropped.detail
    assert "model.chat_template_path" in dropped.detail
    (kept,) = PairTokenizer(word_tokenizer(chat_template=calls), max_length=99).tokenize([pair])
    assert isinstance(kept, TokenizedPair)


@pytest.mark.parametrize(
    ("pair", "template", "reason"),
    [
        (CHAT, "{{ messages[0]['content'] }}", "identical_pair"),
        (CHAT, "{{ messages[9] }}", "empty_response"),
        (TokenPair([], [1, 2], [1, 2]), None, "identical_pair"),
        (TokenPair([], [1], [10**12]), None, "wrong_type"),
        (TokenPair([], [1], [len(word_tokenizer())]), None, "wrong_type"),
    ],
)
def test_what_only_the_ids_show(pair: Pair, template: str | None, reason: str):
    drop = outcome(pair, chat_template=template)
    assert isinstance(drop, Drop)
    assert drop.reason == reason


def test_drops_stay_in_their_places():
    tie, missing = Drop("tie", "the vote is a tie"), Drop("missing_field", "there is no chosen")
    tokenizer = PairTokenizer(word_tokenizer(), max_length=1000)
    results = tokenizer.tokenize([tie, TEXTS, missing, CHAT, TokenPair([], [1], [2])])
    assert (results[0], results[2]) == (tie, missing)
    kept = [sides(pair) for pair in results if isinstance(pair, TokenizedPair)]
    assert kept == [sides(tokenized(TEXTS)), sides(tokenized(CHAT)), ([1], [2])]
    assert tokenizer.tokenize([]) == []


def test_a_batch_is_encoded_as_each_of_its_members():
    inputs = ["Red.", Conversation([ASK, BLUE]), [7, 8], "Name a fruit. A pear.", "Red."]
    tokenizer = PairTokenizer(word_tokenizer(adds="bos"), max_length=1000)
    together = tokenizer.encode(inputs)
    alone = [tokenizer.encode([item])[0] for item in inputs]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(deadline=None)
@given(prompt=TEXT, chosen=TEXT, rejected=TEXT)
@pytest.mark.parametrize("adds", ["nothing", "bos"])
def test_prompt_and_reply_equal_the_plain_encoding(
    adds: Any, prompt: str, chosen: str, rejected: str
):
    tokenizer: Any = word_tokenizer(adds=adds)
    result = outcome(TextPair(prompt, chosen, rejected), adds=adds)
    expected = [[*tokenizer(prompt + reply)["input_ids"], 2] for reply in (chosen, rejected)]
    if isinstance(result, Drop):
        assert result.reason == "identical_pair"
        assert expected[0] == expected[1]
    else:
        assert list(sides(result)) == expected
        assert min(len(result.chosen_ids), len(result.rejected_ids)) > 0


def test_cuts_and_paddings_set_on_the_tokenizer_have_no_effect():
    tokenizer: Any = word_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    (pair,) = PairTokenizer(tokenizer, max_length=1000).tokenize([CHAT])
    assert isinstance(pair, TokenizedPair)
    assert sides(pair) == sides(tokenized(CHAT))


class LetterTokenizer(PreTrainedTokenizer):
    """A tokenizer written in Python: an id a letter."""

    def __init__(self, **options: Any):
        self._letters = {
            letter: place for place, letter in enumerate(" .abcdefghijklmnopqrstuvwxyz")
        }
        super().__init__(eos_token="<eos>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._letters)

    def get_vocab(self) -> dict[str, int]:
        return {**self._letters, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._letters[token]


def test_tokenizers_written_in_python_work_as_well():
    tokenizer = LetterTokenizer()
    (pair,) = PairTokenizer(tokenizer, max_length=9).tokenize([TextPair("ab", "c", "d")])
    assert isinstance(pair, TokenizedPair)
    assert sides(pair) == ([2, 3, 4, 28], [2, 3, 5, 28])


def test_it_travels_to_other_processes():
    tokenizer = PairTokenizer(word_tokenizer(adds="bos"), max_length=1000)
    copy = pickle.loads(pickle.dumps(tokenizer))
    for one, other in zip(tokenizer.encode(["Red."]), copy.encode(["Red."]), strict=True):
        np.testing.assert_array_equal(one, other)
    (pair,) = pickle.loads(pickle.dumps(tokenizer.tokenize([TEXTS])))
    assert sides(pair) == sides(tokenized(TEXTS, adds="bos"))


def test_reading_rows_needs_neither_torch_nor_transformers():
    code = "import sys, rayrm.data.tokenize, rayrm.data.formats; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "ray"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ('{"prompt": "Name a fruit.", "chosen": " An apple.", "rejected": " Seven."}', None),
        ('{"prompt": "Q", "chosen": " A pear.", "rejected": " A pear."}', "identical_pair"),
        ('{"prompt": "Q", "chosen": " A pear.", "rejected": " A pear.\\n"}', "identical_pair"),
        ('{"prompt": "Name a fruit.", "chosen": "", "rejected": " Seven."}', "empty_response"),
        ('{"prompt": "Name a fruit.", "chosen": " A pear.", "rejected": "\\t"}', "empty_response"),
        ('{"prompt": "", "chosen": "A pear.", "rejected": "Seven."}', None),
        ('{"prompt": "Name a fruit.", "chosen": null, "rejected": " Seven."}', "wrong_type"),
        ('{"prompt": "Is it red?", "chosen": true, "rejected": "It is blue."}', "wrong_type"),
        ('{"prompt": "Name a fruit.", "chosen": 42, "rejected": " Seven."}', "wrong_type"),
        ('{"prompt": "Name a fruit.", "chosen": " A pear."}', "missing_field"),
        ('{"chosen": "A pear.", "rejected": "Seven.", "margin": NaN}', "bad_margin"),
        ('{"chosen": "A pear.", "rejected": "Seven.", "margin": "0.5"}', "bad_margin"),
        ('{"chosen": "A pear.", "rejected": "Seven.", "margin": -1.0}', None),
        ('{"prompt": "' + "It is red. " * 40 + '", "chosen": "Yes", "rejected": "No"}', "too_long"),
        ('{"prompt": "Name a fruit.", "chosen": " A pear.", "rej', "unparsable"),
    ],
)  # fmt: skip
def test_each_known_defect_gets_its_reason(raw: str, reason: str | None):
    tokenizer = PairTokenizer(word_tokenizer(), max_length=64)
    (result,) = tokenizer.tokenize([parse_line(raw, {})])
    assert (result.reason if isinstance(result, Drop) else None) == reason
