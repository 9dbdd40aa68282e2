"""A pretrained backbone with a scalar head: one reward at the last token of each text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rayrm.data.plan import Layout
from rayrm.model.shared_prompt import IMPLEMENTATION, carries_state

PaddingSide = Literal["left", "right"]


class Float32Linear(nn.Linear):
    """A linear layer that multiplies in float32, whatever its weights are stored in.

    Near 20 bfloat16 rewards lie on a grid of 0.125, and pairs tie that should not.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in]`` to float32 ``[..., out]``."""
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(input.float(), self.weight.float(), bias)


class RewardModel(nn.Module):
    """Scores packed texts with a one-label sequence classifier (or its PEFT wrapper)."""

    layout: Layout
    """How batches for this model are packed."""
    padded_because: str | None
    """Why its prompts are not shared, if they are not."""
    padding_sides: tuple[PaddingSide, ...]
    """Where plain transformers may pad a text without moving its reward."""
    origin: str
    """Where its head is from, and which weights are new."""

    def __init__(
        self,
        classifier: nn.Module,
        *,
        backbone: PreTrainedModel,
        head: nn.Module,
        padded_because: str | None = None,
        origin: str = "",
    ) -> None:
        """``backbone`` and ``head`` are parts of ``classifier``."""
        super().__init__()
        self.classifier = classifier
        # views into `classifier`: kept out of the module tree, so that no weight is listed twice
        self._views = (backbone, head)
        self.layout = "shared_prompt" if padded_because is None else "padded"
        self.padded_because = padded_because
        self.origin = origin
        # padding on the left runs through a state before the text does
        self.padding_sides = ("right",) if carries_state(backbone) else ("right", "left")
        self._padded_attention = str(backbone.config._attn_implementation)
        if padded_because is None:
            backbone.set_attn_implementation(IMPLEMENTATION)

    def forward(self, input_ids: Tensor, last_token: Tensor, **packing: Any) -> Tensor:
        """Return float32 rewards ``[texts]``.

        Args:
            input_ids: ``[rows, tokens]``.
            last_token: flat position in ``rows * tokens`` of each text's last real token
                ``[texts]``; located by length, since any id may occur in a text.
            packing: ``position_ids`` and ``segments`` of a flat row, or the ``attention_mask`` of
                padded rows, as ``pack_pairs`` makes them.
        """
        backbone, head = self._views
        hidden = backbone(input_ids=input_ids, use_cache=False, **packing).last_hidden_state
        last_hidden = hidden.flatten(0, 1).index_select(0, last_token)
        return head(last_hidden).squeeze(-1)

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Take padded batches inside the context, as transformers computes them; forward only."""
        backbone = cast("PreTrainedModel", self._views[0])
        own = str(backbone.config._attn_implementation)
        backbone.set_attn_implementation(self._padded_attention)
        try:
            yield
        finally:
            backbone.set_attn_implementation(own)


def checkpoint_activations(classifier: Any) -> None:
    """Recompute activations in backward; not reentrant, so that adapters get their gradients."""
    classifier.activation_checkpointing_enable({"use_reentrant": False})


class EncoderRewardModel(nn.Module):
    """Scores padded texts with a bidirectional encoder, pooled as its own classifier pools."""

    layout: Layout = "padded"
    padding_sides: tuple[PaddingSide, ...] = ("right",)
    """It pools at the first token, which has to be the text's."""

    def __init__(
        self, classifier: nn.Module, *, padded_because: str | None, origin: str = ""
    ) -> None:
        super().__init__()
        self.classifier = classifier
        self.padded_because = padded_because
        self.origin = origin

    def forward(self, input_ids: Tensor, attention_mask: Tensor, last_token: Tensor) -> Tensor:
        """Return float32 rewards ``[texts]``; arguments as in ``RewardModel.forward``."""
        logits = self.classifier(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits.float().squeeze(-1)[: last_token.numel()]
