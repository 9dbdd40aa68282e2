"""LoRA on a reward model: the head is trained and saved with the adapter, never adapted itself."""

from typing import cast

from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import PreTrainedModel

from rayrm.config.schema import LoraSection
from rayrm.errors import ConfigError


def add_lora(classifier: PreTrainedModel, lora: LoraSection, *, head: str) -> PeftModel:
    """Wrap a classifier in LoRA; the module named ``head`` is trained in full.

    Adapters keep the type of the weights they sit on: DeepSpeed refuses mixed types in one
    parameter group, and holds float32 master copies of whatever is trained.

    Raises:
        ConfigError: ``target_modules`` names nothing in this model.
    """
    targets = lora.target_modules
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=lora.r,
        lora_alpha=cast("int", lora.lora_alpha),
        lora_dropout=lora.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=[head],
        modules_to_save=list(lora.modules_to_save) or None,  # peft adds the head itself
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )
    try:
        return cast("PeftModel", get_peft_model(classifier, config, autocast_adapter_dtype=False))
    except ValueError as error:
        raise ConfigError(f"model.lora: {error}") from error
