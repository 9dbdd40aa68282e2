"""Types that sections share: numbers, text and free arguments, read as their author means them.

YAML reads a run named 2024 as a number, and Python takes true for 1.
"""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

_SECRET_NAME = re.compile(
    r"^token$|(^|_)(api_?key|(auth|access|hf|hub|bearer)_?token|passw(or)?d|secret\w*|private_key)$",
    re.IGNORECASE,
)
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")


def is_secret_name(name: str) -> bool:
    """Whether a key of this name asks for a secret, which never belongs in a configuration."""
    return bool(_SECRET_NAME.search(name))


def secret_remedy(path: str) -> str:
    """What to do with the secret that stands at this dotted path."""
    variable = "WANDB_API_KEY" if "wandb" in path.lower() else "HF_TOKEN"
    return f"secrets never belong in a configuration; set {variable} in the environment"


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    return value


def _whole_number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _exponents_as_numbers(value: JsonValue) -> JsonValue:
    """1e-6 as a number at any depth: YAML 1.1 takes it for text unless it has a point."""
    if isinstance(value, dict):
        return {key: _exponents_as_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_exponents_as_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _refuse_secrets(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        for key, item in value.items():
            if is_secret_name(key) and item is not None:
                raise ValueError(f"{key}: {secret_remedy(key)}")
            _refuse_secrets(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_secrets(item)
    return value


NoBool = BeforeValidator(_refuse_bool)
WholeAsText = BeforeValidator(_whole_number_as_text)

Number = Annotated[float, NoBool]
WholeNumber = Annotated[int, NoBool]
PositiveInt = Annotated[int, Field(ge=1), NoBool]
PositiveFloat = Annotated[float, Field(gt=0), NoBool]
NonNegativeFloat = Annotated[float, Field(ge=0), NoBool]
Share = Annotated[float, Field(ge=0, le=1), NoBool]
Text = Annotated[str, WholeAsText]
Name = Annotated[str, Field(min_length=1), WholeAsText]
Argument = Annotated[JsonValue, AfterValidator(_exponents_as_numbers)]
Arguments = Annotated[
    dict[str, JsonValue], AfterValidator(_exponents_as_numbers), AfterValidator(_refuse_secrets)
]
