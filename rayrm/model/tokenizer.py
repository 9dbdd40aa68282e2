"""Load a tokenizer and settle what the reward model needs of it: EOS, padding, chat template."""

import logging
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rayrm.config.schema import ModelSection
from rayrm.errors import ConfigError

logger = logging.getLogger(__name__)

_SPARE_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>",
                 "<|reserved_special_token_0|>", "<unused0>", "<|endoftext|>")  # fmt: skip
_NEW_PAD_TOKEN = "<|pad|>"


def resolve_name_or_path(model: ModelSection) -> str:
    """Return the folder or hub name to load from; 'quickstart' is built where it is missing.

    Raises:
        ConfigError: it can only be a folder, and there is none.
    """
    if model.name_or_path == "quickstart":
        # imported here, since it loads whole model classes that no other tokenizer needs
        from rayrm.model.quickstart import quickstart_folder

        return str(quickstart_folder())
    name = model.name_or_path
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        raise ConfigError(f"model.name_or_path: there is no folder {name}")
    check_is_no_run(name, field="model.name_or_path")
    return name


def check_is_no_run(folder: str, *, field: str) -> None:
    """Refuse the folder of a run where that of its model is meant.

    Raises:
        ConfigError: with the model's folder.
    """
    place = Path(folder)
    if (place / "result.json").is_file() and (place / "model").is_dir():
        raise ConfigError(f"{field}: {folder} is the folder of a run; give {place / 'model'}")


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``model`` with its EOS, pad token and chat template settled.

    The pad token always differs from EOS: transformers' classifiers read the reward at the last
    token that is not padding, and would overlook an EOS that is the padding as well.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or a token or template named in the
            configuration does not exist.
    """
    tokenizer = _from_pretrained(
        resolve_name_or_path(model),
        field="model.name_or_path",
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
    if model.chat_template_path is not None:
        _take_chat_template(tokenizer, model.chat_template_path)
        _check_template(tokenizer, model.chat_template_path)
    if model.eos_token is not None:
        tokenizer.eos_token = _known_token(tokenizer, model.eos_token, "model.eos_token")
    pad_token = _choose_pad_token(tokenizer, model.pad_token)
    if pad_token not in tokenizer.get_vocab():
        tokenizer.add_tokens(pad_token, special_tokens=True)  # else its id is that of <unk>
    tokenizer.pad_token = pad_token
    tokenizer.padding_side = "right"
    return tokenizer


def template_brings_tokens(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes tokens that the model was never trained on."""
    if model.chat_template_path is None or not Path(model.chat_template_path).is_dir():
        return False
    own = _from_pretrained(
        resolve_name_or_path(model),
        field="model.name_or_path",
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
    added = tokenizer.get_vocab().keys() - own.get_vocab().keys()
    return bool(added - {str(tokenizer.pad_token)})


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the pad token that ``load_tokenizer`` settled."""
    found = tokenizer.convert_tokens_to_ids(str(tokenizer.pad_token))
    assert isinstance(found, int)
    return found


def _from_pretrained(path: str, *, field: str, **options: Any) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{field}: no tokenizer could be loaded from {path!r} ({first_line}); give a "
            "folder that has one, or the name of a hub model"
        ) from error


def _known_token(tokenizer: PreTrainedTokenizerBase, token: str, field: str) -> str:
    if token not in tokenizer.get_vocab():
        raise ConfigError(f"{field}: {token!r} is not in the tokenizer's vocabulary")
    return token


def _take_chat_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Take the template of a file; or that of a tokenizer, with the special tokens it writes."""
    place = Path(path)
    if not place.is_dir():
        try:
            tokenizer.chat_template = place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template_path: cannot read {path} ({error})") from error
        return
    other = _from_pretrained(path, field="model.chat_template_path")
    template = other.chat_template
    if not isinstance(template, str):
        raise ConfigError(f"model.chat_template_path: {path} has no chat template of its own")
    tokenizer.chat_template = template
    roles = [role for role in ("bos_token", "eos_token") if role in template]
    named = [str(getattr(other, role)) for role in roles]
    known = tokenizer.get_vocab()
    brought = [
        token
        for _, token in sorted(other.added_tokens_decoder.items())
        if token.content not in known and (token.content in template or token.content in named)
    ]
    if brought:
        tokenizer.add_tokens(brought)
        names = ", ".join(token.content for token in brought)
        logger.info("tokens added for the chat template of %s: %s", path, names)
    for role in roles:
        setattr(tokenizer, role, getattr(other, role))


def _check_template(tokenizer: Any, path: str) -> None:
    """Have it compiled; what a template may refuse of a conversation is no fault of its own."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"model.chat_template_path: {path}, line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # it wants roles or arguments that the rows may have
        return


def _choose_pad_token(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> str:
    if wanted is not None:
        if wanted == tokenizer.eos_token:
            raise ConfigError(
                f"model.pad_token: {wanted!r} is the EOS token too, so that saved models would "
                "read the reward before it; name another token, or leave the field out"
            )
        return _known_token(tokenizer, wanted, "model.pad_token")
    current = tokenizer.pad_token
    if current is not None and current != tokenizer.eos_token:
        return str(current)
    vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    spare = [token for token in _SPARE_TOKENS if token in vocabulary]
    spare += [
        token.content
        for _, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token.content not in tokenizer.special_tokens_map.values()
    ]
    for token in spare:
        if token not in (tokenizer.eos_token, tokenizer.bos_token) and token not in template:
            logger.info("pad token: %r (the tokenizer's, %r, is its EOS too)", token, current)
            return token
    logger.info("pad token: %r is added, since the tokenizer has none to spare", _NEW_PAD_TOKEN)
    return _NEW_PAD_TOKEN
