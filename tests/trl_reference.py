"""Trains with TRL and writes what it logs; a process of its own, for Accelerate's global state.

    python tests/trl_reference.py MODEL RUNS.json OUTPUT.json

RUNS maps a name to `{pairs, settings}`: a file of pairs and arguments of a `trl.RewardConfig`; with
`save`, a folder, the model goes there with its rewards of the pairs, `rewards.json`.
OUTPUT maps it to a log, a line a step.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer


def train(
    model: str, pairs: str, settings: dict[str, Any], save: str | None = None
) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(model, dtype="float32"),
            args=RewardConfig(
                output_dir=folder,
                bf16=False,
                gradient_checkpointing=False,
                disable_dropout=True,
                use_cpu=True,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                train_sampling_strategy="sequential",
                **settings,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.train()
    if save is not None:
        trainer.save_model(save)
        Path(save, "rewards.json").write_text(json.dumps(rewards_of(trainer)))
    return [line for line in trainer.state.log_history if "loss" in line]


def rewards_of(trainer: Any) -> list[list[float]]:
    """Return the rewards of chosen and rejected, pair by pair, as the trainer computes them."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    with torch.no_grad():
        logits = trainer.model.eval()(batch["input_ids"], batch["attention_mask"]).logits
    return logits.view(2, -1).T.tolist()


def main(model: str, runs: str, output: str) -> None:
    wanted = json.loads(Path(runs).read_text())
    logs = {name: train(model, **run) for name, run in wanted.items()}
    Path(output).write_text(json.dumps(logs))


if __name__ == "__main__":
    main(*sys.argv[1:])
