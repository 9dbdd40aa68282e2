"""The learning rate over the steps of a run, by transformers' schedules."""

from typing import Any

import torch
from transformers import get_scheduler

from rayrm.config.schema import TrainSection
from rayrm.errors import ConfigError


def build_schedule(optimizer: torch.optim.Optimizer, train: TrainSection, *, num_steps: int) -> Any:
    """Return the scheduler of ``train.lr_scheduler_type`` over ``num_steps`` optimizer steps.

    Raises:
        ConfigError: the schedule lacks an argument, or does not know one.
    """
    try:
        return get_scheduler(
            train.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=int(train.warmup_ratio * num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(train.lr_scheduler_kwargs) or None,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.lr_scheduler_kwargs: {error}") from error


def check_schedule(train: TrainSection) -> None:
    """Find what ``build_schedule`` would find wrong.

    Raises:
        ConfigError: as there.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=train.learning_rate)
    build_schedule(optimizer, train, num_steps=1)
