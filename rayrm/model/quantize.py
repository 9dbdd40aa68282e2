"""A frozen base in few bits, by bitsandbytes."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from rayrm.config.schema import ModelSection
from rayrm.errors import ConfigError
from rayrm.model.adapters import HEADS


def quantization_options(model: ModelSection) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` by which the base is quantized; none if it isn't.

    4 bits are NF4, packed into numbers of the model's own type, which ZeRO-3 can partition.

    Raises:
        ConfigError: bitsandbytes is missing.
    """
    if model.quantization is None:
        return {}
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.quantization: needs bitsandbytes: pip install 'rayrm[quantization]'"
        )
    if model.quantization == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(HEADS))
    else:
        dtype = getattr(torch, model.dtype)
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,
            llm_int8_skip_modules=list(HEADS),
        )
    return {"quantization_config": config}


def keep_packed_weights_as_they_are(classifier: PreTrainedModel) -> None:
    """Keep bitsandbytes from packing weights anew in evaluation, as it does on some CPUs.

    It replaces a weight's data, of which ZeRO-3 holds the only copy.
    """
    for module in classifier.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
