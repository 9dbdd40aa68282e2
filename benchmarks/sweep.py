"""A sweep of LoRA trials beside as many runs of ``trl reward`` with the same values.

    python benchmarks/sweep.py MODEL TRAIN_FILE EVAL_FILE [--trials 8] [--steps 8]

One side after the other, each as a user starts it: ``python -m rayrm.tune`` with a random search
over learning rate, centering and rank, whose trials are all trained (``all``) or stopped by ASHA
(``asha``); and ``trl reward`` once for each configuration that the sweep drew (``trl``). Both have
the same pairs a step, steps, evaluations and longest pair. Figures are the seconds of each side,
and:

- ``a trial beside its steps``: the mean time from the end of one trial of ``all`` to that of the
  next, less what the latter's steps took: start-up, evaluations and export;
- ``trials trained to the end`` of ``asha``.
"""

import csv
import gzip
import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from common import parser_of, tell

PAIRS_A_STEP = 4
MAX_LENGTH = 512


def sweep_config(given: Namespace, folder: Path, *, scheduler: str) -> dict[str, Any]:
    """Return the configuration of a sweep."""
    return {
        "run": {"name": f"sweep-{scheduler}", "output_dir": str(folder)},
        "model": {"name_or_path": given.model, "lora": {"r": 16, "lora_alpha": 32}},
        "data": {
            "train": {"path": given.train_file, "limit": given.steps * PAIRS_A_STEP},
            "eval": {"path": given.eval_file, "limit": given.eval_pairs},
            "max_length": MAX_LENGTH,
        },
        "train": {
            "batch_size": PAIRS_A_STEP,
            "max_steps": given.steps,
            "eval_steps": max(given.steps // 4, 1),
            "save_steps": None,
        },
        "tracking": {"wandb": None},
        "search": {
            "num_samples": given.trials,
            "scheduler": scheduler,
            "metric": "eval_loss",
            "mode": "min",
            "space": {
                "train.learning_rate": {"type": "log_uniform", "low": 1e-5, "high": 1e-3},
                "loss.center_rewards_coefficient": {"type": "choice", "values": [0, 0.01, 0.1]},
                "model.lora.r": {"type": "choice", "values": [4, 8, 16]},
            },
        },
    }


def time_sweep(given: Namespace, folder: Path, *, scheduler: str) -> tuple[float, Path]:
    """Run a sweep; return its seconds and its folder."""
    config = sweep_config(given, folder, scheduler=scheduler)
    file = folder / f"{scheduler}.yaml"
    file.write_text(json.dumps(config))
    seconds = _time([sys.executable, "-m", "rayrm.tune", str(file)], folder)
    return seconds, folder / config["run"]["name"]


def time_trl(given: Namespace, folder: Path, trials: list[dict[str, str]]) -> float:
    """Run ``trl reward`` with the values of each trial; return the seconds of all."""
    rows = folder / "rows"
    rows.mkdir()
    _head(Path(given.train_file), rows / "train.jsonl", given.steps * PAIRS_A_STEP)
    _head(Path(given.eval_file), rows / "test.jsonl", given.eval_pairs)
    total = 0.0
    for trial in trials:
        rank = int(trial["model.lora.r"])
        options = {
            "model_name_or_path": given.model,
            "dataset_name": rows,
            "output_dir": folder / f"trl-{trial['trial']}",
            "learning_rate": trial["train.learning_rate"],
            "center_rewards_coefficient": trial["loss.center_rewards_coefficient"],
            "use_peft": True,
            "lora_task_type": "SEQ_CLS",
            "lora_r": rank,
            "lora_alpha": 2 * rank,
            "lora_target_modules": "all-linear",
            "per_device_train_batch_size": PAIRS_A_STEP,
            "per_device_eval_batch_size": PAIRS_A_STEP,
            "max_length": MAX_LENGTH,
            "max_steps": given.steps,
            "eval_strategy": "steps",
            "eval_steps": max(given.steps // 4, 1),
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": not given.gpu,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        total += _time([str(Path(sys.executable).with_name("trl")), "reward", *words], folder)
    return total


def beside_steps(trials: list[dict[str, str]]) -> float:
    """Return the mean time from one finished trial to the next, less the steps of the latter."""
    finished = [trial for trial in trials if trial["status"] == "finished"]
    ends = {Path(t["run_dir"], "result.json").stat().st_mtime: t for t in finished}
    ordered = sorted(ends)
    gaps = [later - before - float(ends[later]["seconds"]) for before, later in pairwise(ordered)]
    return sum(gaps) / len(gaps) if gaps else float("nan")


def _head(source: Path, target: Path, number: int) -> None:
    with (gzip.open if source.suffix == ".gz" else open)(source, "rt") as file:
        target.write_text("".join(islice(file, number)))


def _time(command: list[str], folder: Path) -> float:
    began = time.perf_counter()
    with open(folder / "log", "a") as log:
        ended = subprocess.run(command, stdout=log, stderr=log, check=False)
    if ended.returncode:
        raise SystemExit((folder / "log").read_text()[-3000:])
    return time.perf_counter() - began


def _trials_of(sweep: Path) -> list[dict[str, str]]:
    with open(sweep / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Time each side and tell the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("train_file")
    parser.add_argument("eval_file")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--eval-pairs", type=int, default=16)
    parser.add_argument("--gpu", action="store_true", help="let trl take a GPU, as rayrm does")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        figures: dict[str, float] = {}
        figures["seconds, all"], sweep = time_sweep(given, folder, scheduler="none")
        trials = _trials_of(sweep)
        figures["a trial beside its steps, seconds"] = beside_steps(trials)
        figures["seconds, asha"], stopping = time_sweep(given, folder, scheduler="asha")
        finished = [trial for trial in _trials_of(stopping) if trial["status"] == "finished"]
        figures["trials trained to the end, asha"] = len(finished)
        figures["seconds, trl"] = time_trl(given, folder, trials)
        for side in ("all", "asha"):
            figures[f"trl / {side}"] = figures["seconds, trl"] / figures[f"seconds, {side}"]
    tell(figures, given.output)


if __name__ == "__main__":
    main()
