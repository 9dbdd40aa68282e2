import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rayrm.config.schema import ModelSection
from rayrm.errors import ConfigError
from rayrm.model.tokenizer import load_tokenizer
from tests.builders import CHAT_TEMPLATE, word_tokenizer


def gpt2_like() -> PreTrainedTokenizerFast:
    """A tokenizer whose one special token is all of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=end, bos_token=end, eos_token=end
    )


def load(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any) -> Any:
    """The tokenizer of a folder, saved there first if one is given."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return load_tokenizer(ModelSection(name_or_path=str(folder), **options))


def refused(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, tokenizer, **options)
    return str(caught.value)


def test_a_pad_token_of_its_own_is_kept(tmp_path: Path):
    tokenizer = load(tmp_path, word_tokenizer(pad_token="[CLS]"))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("[CLS]", "<eos>")
    assert tokenizer.padding_side == "right"


@pytest.mark.parametrize("pad_token", ["<eos>", None])
def test_padding_that_is_eos_or_missing_becomes_a_token_made_for_it(
    tmp_path: Path, pad_token: str | None
):
    tokenizer = load(tmp_path, word_tokenizer(pad_token=pad_token))
    assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("<pad>", 3, 2)
    assert len(tokenizer) == len(word_tokenizer())


def test_else_it_becomes_another_special_token_that_ends_nothing(tmp_path: Path):
    # <pad> is EOS here; <unk> and <bos> have a role; the template writes <|im_end|>
    tokenizer = load(tmp_path, word_tokenizer(eos_token="<pad>", pad_token="<pad>"))
    assert tokenizer.pad_token == "<eos>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_a_token_that_the_template_writes_is_never_the_padding(tmp_path: Path):
    template = CHAT_TEMPLATE + "<pad><eos>[CLS]"
    tokenizer = word_tokenizer(eos_token="<|im_end|>", pad_token=None, chat_template=template)
    assert load(tmp_path, tokenizer).pad_token == "[SEP]"


def test_a_token_is_added_where_there_is_none_to_spare(tmp_path: Path):
    before = gpt2_like()
    tokenizer = load(tmp_path, before)
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.pad_token_id == len(before)
    assert len(tokenizer) == len(before) + 1
    assert tokenizer.eos_token_id == before.eos_token_id
    assert tokenizer("a<|endoftext|>")["input_ids"] == before("a<|endoftext|>")["input_ids"]


def test_an_added_token_is_saved(tmp_path: Path):
    load(tmp_path / "given", gpt2_like()).save_pretrained(tmp_path / "saved")
    saved: Any = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (saved.pad_token, saved.pad_token_id) == ("<|pad|>", len(gpt2_like()))
    again = load(tmp_path / "saved")
    assert (again.pad_token_id, len(again)) == (saved.pad_token_id, len(saved))


def test_a_configured_pad_token_is_taken(tmp_path: Path):
    assert load(tmp_path, word_tokenizer(), pad_token="[SEP]").pad_token == "[SEP]"


def test_a_configured_pad_token_may_be_a_plain_word_and_stays_one(tmp_path: Path):
    tokenizer = load(tmp_path, word_tokenizer(), pad_token="!")
    assert tokenizer.pad_token_id == word_tokenizer().convert_tokens_to_ids("!")
    assert tokenizer("a!")["input_ids"] == word_tokenizer()("a!")["input_ids"]
    assert len(tokenizer) == len(word_tokenizer())


def test_a_configured_pad_token_that_is_eos_is_refused(tmp_path: Path):
    message = refused(tmp_path, word_tokenizer(), pad_token="<eos>")
    assert "model.pad_token: '<eos>' is the EOS token too" in message
    message = refused(tmp_path, pad_token="[SEP]", eos_token="[SEP]")
    assert "model.pad_token: '[SEP]' is the EOS token too" in message


def test_a_configured_eos_token_ends_texts_and_is_not_the_padding(tmp_path: Path):
    tokenizer = load(tmp_path, word_tokenizer(pad_token="[SEP]"), eos_token="[SEP]")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("[SEP]", 5)
    assert tokenizer.pad_token == "<pad>"


@pytest.mark.parametrize("field", ["eos_token", "pad_token"])
def test_a_token_that_does_not_exist_is_refused(tmp_path: Path, field: str):
    message = refused(tmp_path, word_tokenizer(), **{field: "<none>"})
    assert message == f"model.{field}: '<none>' is not in the tokenizer's vocabulary"


def test_a_chat_template_is_read_from_a_file(tmp_path: Path):
    (tmp_path / "template.jinja").write_text("{{ 'ä' }}\n", encoding="utf-8")
    tokenizer = load(
        tmp_path / "model",
        word_tokenizer(),
        chat_template_path=str(tmp_path / "template.jinja"),
    )
    assert tokenizer.apply_chat_template([{"role": "user"}], tokenize=False) == "ä"


def test_a_chat_template_is_read_from_a_folder(tmp_path: Path):
    word_tokenizer(chat_template="{{ 'theirs' }}").save_pretrained(tmp_path / "theirs")
    tokenizer = load(
        tmp_path / "model", word_tokenizer(), chat_template_path=str(tmp_path / "theirs")
    )
    assert tokenizer.chat_template == "{{ 'theirs' }}"
    assert tokenizer.eos_token == "<eos>"


def test_a_chat_template_that_cannot_be_read_is_refused(tmp_path: Path):
    word_tokenizer(chat_template=None).save_pretrained(tmp_path / "without")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "broken.jinja").write_text("{{ messages }}\n{% endfor %}")
    word_tokenizer().save_pretrained(tmp_path / "model")
    for name, what in (
        ("missing.jinja", "cannot read"),
        ("broken.jinja", "broken.jinja, line 2: Encountered unknown tag 'endfor'"),
        ("binary", "cannot read"),
        ("without", "has no chat template of its own"),
        ("nothing", "no tokenizer could be loaded"),
    ):
        path = str(tmp_path / name)
        message = refused(tmp_path / "model", chat_template_path=path)
        assert message.startswith("model.chat_template_path: "), message
        assert what in message
        assert path in message


@pytest.mark.parametrize("name", ["empty", "broken"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, name: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    message = refused(tmp_path / name)
    assert message.startswith("model.name_or_path: no tokenizer could be loaded from ")
    assert str(tmp_path / name) in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["/no/such", "./no-such", "~/no-such", "some/folder/of/mine"])
def test_a_name_that_can_only_be_a_folder_is_not_looked_for_on_a_hub(name: str):
    with pytest.raises(ConfigError, match=f"^model.name_or_path: there is no folder {name}$"):
        load_tokenizer(ModelSection(name_or_path=name))


def test_the_choice_of_padding_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="rayrm"):
        load(tmp_path / "eos", word_tokenizer(pad_token="<eos>"))
        load(tmp_path / "one", gpt2_like())
        load(tmp_path / "own", word_tokenizer())
    assert [record.message for record in caplog.records] == [
        "pad token: '<pad>' (the tokenizer's, '<eos>', is its EOS too)",
        "pad token: '<|pad|>' is added, since the tokenizer has none to spare",
    ]
