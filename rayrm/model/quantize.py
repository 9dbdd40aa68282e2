"""A frozen base in few bits, by bitsandbytes."""

from importlib.util import find_spec
from typing import Any

from transformers import BitsAndBytesConfig, PreTrainedModel

from rayrm.config.schema import ModelSection
from rayrm.errors import ConfigError
from rayrm.model.adapters import HEADS


def quantization_arguments(model: ModelSection) -> dict[str, Any]:
    """Return what transformers' ``BitsAndBytesConfig`` takes for this base, in plain words.

    4 bits are NF4, packed into numbers of the model's own type, which ZeRO-3 can partition.
    """
    arguments: dict[str, Any] = {f"load_in_{model.quantization}": True}
    if model.quantization == "4bit":
        arguments |= {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": model.dtype,
            "bnb_4bit_quant_storage": model.dtype,
        }
    return {**arguments, "llm_int8_skip_modules": list(HEADS)}


def quantization_options(model: ModelSection) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` by which the base is quantized; none if it isn't.

    Raises:
        ConfigError: bitsandbytes is missing.
    """
    if model.quantization is None:
        return {}
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.quantization: needs bitsandbytes: pip install 'rayrm[quantization]'"
        )
    return {"quantization_config": BitsAndBytesConfig(**quantization_arguments(model))}


def keep_packed_weights_as_they_are(classifier: PreTrainedModel) -> None:
    """Keep bitsandbytes from packing weights anew in evaluation, as it does on some CPUs.

    It replaces a weight's data, of which ZeRO-3 holds the only copy.
    """
    for module in classifier.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
