"""Trains with TRL and writes what it logs; a process of its own, for Accelerate's global state.

    python tests/trl_reference.py MODEL RUNS.json OUTPUT.json

RUNS maps a name to `{pairs, settings}`: a file of pairs and arguments of a `trl.RewardConfig`.
OUTPUT maps it to a log, a line a step.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer


def train(model: str, pairs: str, settings: dict[str, Any]) -> list[dict[str, float]]:
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
    return [line for line in trainer.state.log_history if "loss" in line]


def main(model: str, runs: str, output: str) -> None:
    wanted = json.loads(Path(runs).read_text())
    logs = {name: train(model, **run) for name, run in wanted.items()}
    Path(output).write_text(json.dumps(logs))


if __name__ == "__main__":
    main(*sys.argv[1:])
