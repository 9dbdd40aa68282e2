"""Pairs a second of rayrm and of TRL's ``RewardTrainer``, in turn in one run.

    python benchmarks/throughput.py MODEL DATA_FILE [--batch-size 8] [--steps 3] [--lora]

Both train the same weights on the same pairs (tokenized once, by rayrm) in the same order, with the
same optimizer and effective batch. Each side is a process of its own, and goes through all batches
twice (``--warm-up``) before those that count: a kernel charges for memory that is touched for the
first time, and a process takes some steps to have all that it needs. Batches differ in length, so
their times are added up. The sides:

- ``trl``: TRL's defaults, which recompute activations in backward;
- ``trl, no checkpointing``: the same without;
- ``rayrm, off``: ``rayrm.fit`` with ``train.shared_prompt: off``, that is, padded rows;
- ``rayrm``: ``rayrm.fit`` as it is, on one worker, or on more (``--workers``);
- ``bare, packed`` and ``bare, shared``: the same tensors without Ray, DeepSpeed and logging, each
  prompt computed twice, and once;
- ``bare, dense``: forward, backward and optimizer on as many tokens as ``rayrm`` computes, as a
  rectangle of random ids: the limit.

The clock counts forward, backward and optimizer, and on rayrm's side everything else in the loop.
Memory is the peak of the process that trains, its weights included.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from common import parser_of, training_workers

TRL, TRL_PLAIN, OFF, RAYRM = "trl", "trl, no checkpointing", "rayrm, off", "rayrm"
PACKED, SHARED, DENSE = "bare, packed", "bare, shared", "bare, dense"
SIDES = (TRL, TRL_PLAIN, OFF, RAYRM, PACKED, SHARED, DENSE)
LEARNING_RATE = 1e-5
MAX_TRL_ROWS = 8
"""Pairs of one forward of TRL without checkpointing: more do not fit into a small machine."""


def read_steps(given: argparse.Namespace) -> list[list[Any]]:
    """Return the tokenized pairs of the steps that warm up and of each step that counts."""
    from rayrm.config.schema import ModelSection
    from rayrm.data.formats import parse_line
    from rayrm.data.sources import list_files, read_rows
    from rayrm.data.tokenize import PairTokenizer, TokenizedPair
    from rayrm.model.tokenizer import load_tokenizer

    wanted = given.steps * given.batch_size
    pairs: list[TokenizedPair] = []
    tokenizer = load_tokenizer(ModelSection(name_or_path=given.model))
    encode = PairTokenizer(tokenizer, max_length=given.max_length).tokenize
    (file,) = list_files(given.data, label="data", field="DATA_FILE")
    rows = (text.decode() for _, text in read_rows(file))
    while len(pairs) < wanted and (part := list(islice(rows, 64))):
        found = encode([parse_line(row, {}) for row in part])
        pairs += [pair for pair in found if isinstance(pair, TokenizedPair)]
    pairs = pairs[:wanted]
    starts = range(0, wanted, given.batch_size)
    steps = [pairs[start : start + given.batch_size] for start in starts]
    return [*steps * given.warm_up, *steps]


def count_tokens(steps: list[list[Any]]) -> dict[str, int]:
    """Return what padded rows, two full copies, and a prompt computed once take."""
    return {
        "padded": sum(
            2 * len(step) * max(max(p.chosen_length, p.rejected_length) for p in step)
            for step in steps
        ),
        "real": sum(p.chosen_length + p.rejected_length for step in steps for p in step),
        "unique": sum(p.num_tokens for step in steps for p in step),
    }


def write_rows(steps: list[list[Any]], path: Path) -> None:
    """Write pairs as rows of ids, which both sides read."""
    with path.open("w") as file:
        for pair in (pair for step in steps for pair in step):
            row = {
                "chosen_ids": [*pair.prompt_ids.tolist(), *pair.chosen_ids.tolist()],
                "rejected_ids": [*pair.prompt_ids.tolist(), *pair.rejected_ids.tolist()],
            }
            file.write(json.dumps(row) + "\n")


def run_trl(spec: dict[str, Any]) -> dict[str, float]:
    """Train with TRL and return the seconds of the steps that count."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.started)

    rows = [json.loads(line) for line in Path(spec["rows"]).read_text().splitlines()]
    clock = Clock()
    checkpointing = spec["side"] == TRL
    per_forward = spec["batch_size"] if checkpointing else min(spec["batch_size"], MAX_TRL_ROWS)
    lora = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(
                spec["model"], dtype=spec["dtype"], num_labels=1
            ),
            args=RewardConfig(
                output_dir=folder,
                bf16=spec["dtype"] == "bfloat16",
                gradient_checkpointing=checkpointing,
                use_cpu=not torch.cuda.is_available(),
                per_device_train_batch_size=per_forward,
                gradient_accumulation_steps=spec["batch_size"] // per_forward,
                learning_rate=LEARNING_RATE,
                max_length=None,
                num_train_epochs=1,
                logging_steps=1000,
                report_to="none",
                save_strategy="no",
                train_sampling_strategy="sequential",
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(spec["model"]),
            callbacks=[clock],
            peft_config=lora if spec["lora"] else None,
        )
        trainer.train()
    return {"seconds": sum(clock.seconds[-spec["steps"] :]), "peak_memory": _peak_memory()}


def run_rayrm(spec: dict[str, Any]) -> dict[str, float]:
    """Train with ``rayrm.fit`` and return the seconds of the steps that count."""
    import rayrm

    done = threading.Event()
    peak: list[float] = []
    watcher = threading.Thread(target=_watch_workers, args=(peak, done))
    watcher.start()
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            "run": {"output_dir": folder},
            "model": {
                "name_or_path": spec["model"],
                "dtype": spec["dtype"],
                "lora": {"r": 16, "lora_alpha": 32} if spec["lora"] else None,
            },
            "data": {"train": spec["rows"], "shuffle": False, "max_length": 100_000},
            "train": {
                "batch_size": spec["batch_size"],
                "learning_rate": LEARNING_RATE,
                "logging_steps": 1,
                "save_steps": None,
                "shared_prompt": "off" if spec["side"] == OFF else "on",
            },
            "scaling": {"num_workers": spec["workers"]},
            "tracking": {"wandb": None},
        }
        try:
            result = rayrm.fit(config, spec["overrides"])
        finally:
            done.set()
            watcher.join()
        text = Path(result.run_dir, "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
    rates = [line["pairs_per_second"] for line in lines if "loss" in line]
    seconds = sum(spec["batch_size"] / rate for rate in rates[-spec["steps"] :])
    return {"seconds": seconds, "peak_memory": max(peak, default=0.0)}


def _watch_workers(peak: list[float], done: threading.Event) -> None:
    while not done.wait(2):
        for process in training_workers():
            with suppress(psutil.Error):
                peak.append(process.memory_info().rss)


def run_bare(spec: dict[str, Any]) -> dict[str, float]:
    """Run forward, backward and optimizer on held tensors; return the seconds that count."""
    import torch

    from rayrm.config.schema import LoraSection, ModelSection
    from rayrm.data.packing import pack_pairs
    from rayrm.data.plan import Cutting, PairLengths, plan_step
    from rayrm.data.tokenize import TokenizedPair
    from rayrm.model.build import build_reward_model
    from rayrm.model.loss import bradley_terry_loss
    from rayrm.model.reward import RewardModel
    from rayrm.model.tokenizer import load_tokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    section = ModelSection(
        name_or_path=spec["model"],
        dtype=spec["dtype"],
        lora=LoraSection(r=16, lora_alpha=32) if spec["lora"] else None,
    )
    model = build_reward_model(section, load_tokenizer(section), seed=0).train().to(device)
    assert isinstance(model, RewardModel)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    layout = "packed" if spec["side"] == PACKED else "shared_prompt"
    forwards: list[list[list[TokenizedPair]]] = []
    for step in read_steps(argparse.Namespace(**spec)):
        cutting = Cutting(layout, spec["max_tokens"])
        (plan,) = plan_step(PairLengths.of(step), cutting, num_ranks=1)
        forwards.append([[step[position] for position in part] for part in plan])

    def loss_of(pairs: list[TokenizedPair], num_pairs: int) -> torch.Tensor:
        batch = pack_pairs(pairs, layout).to(device)
        chosen, rejected = model(**batch.inputs).view(-1, 2).unbind(1)
        return bradley_terry_loss(chosen, rejected, batch.margin).sum() / num_pairs

    def dense_loss(pairs: list[TokenizedPair], num_pairs: int) -> torch.Tensor:
        width = sum(pair.num_tokens for pair in pairs) // len(pairs)
        input_ids = torch.randint(5, 1000, (len(pairs), width), device=device)
        last_token = torch.arange(len(pairs), device=device) * width + width - 1
        rewards = model(input_ids, last_token, attention_mask=torch.ones_like(input_ids))
        return rewards.sum() / num_pairs

    if spec["side"] == DENSE:
        with model.padded():
            seconds = _time_steps(forwards, dense_loss, optimizer)
    else:
        seconds = _time_steps(forwards, loss_of, optimizer)
    return {"seconds": sum(seconds[-spec["steps"] :]), "peak_memory": _peak_memory()}


def _time_steps(
    steps: list[list[list[Any]]], loss_of: Callable[[list[Any], int], Any], optimizer: Any
) -> list[float]:
    import torch

    seconds: list[float] = []
    for forwards in steps:
        started = time.perf_counter()
        num_pairs = sum(map(len, forwards))
        for pairs in forwards:
            loss_of(pairs, num_pairs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def _peak_memory() -> float:
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def run_side(spec: dict[str, Any]) -> dict[str, float]:
    """Measure one side in this process."""
    side = spec["side"]
    measure = run_trl if side.startswith("trl") else run_bare if "bare" in side else run_rayrm
    return measure(spec)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turn, and return their fastest times with the ratios to TRL."""
    from rayrm.cluster import KEEP_FREED_MEMORY

    steps = read_steps(given)
    tokens = count_tokens(steps[-given.steps :])
    num_pairs = given.steps * given.batch_size
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        write_rows(steps, rows)
        for _ in range(given.repeats):
            for side in given.sides:
                spec = {**vars(given), "side": side, "rows": str(rows), "output": None}
                outcome = Path(folder, "outcome.json")
                command = [sys.executable, __file__, "--spec", json.dumps(spec), str(outcome)]
                environment = dict(os.environ)
                if "bare" in side:  # the limit is that of the same memory
                    environment |= KEEP_FREED_MEMORY
                subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
                found = json.loads(outcome.read_text())
                print(f"{side}: {found['seconds']:.1f} s", file=sys.stderr, flush=True)
                if side not in best or found["seconds"] < best[side]["seconds"]:
                    best[side] = found
    computed = {side: tokens["unique"] for side in (RAYRM, SHARED, DENSE)}
    computed |= dict.fromkeys((TRL, TRL_PLAIN, OFF), tokens["padded"]) | {PACKED: tokens["real"]}
    return {
        "pairs": num_pairs,
        "tokens": tokens,
        "sides": {
            side: {
                **found,
                "pairs_per_second": num_pairs / found["seconds"],
                "computed_tokens": computed[side],
                **({"against_trl": best[TRL]["seconds"] / found["seconds"]} if TRL in best else {}),
            }
            for side, found in best.items()
        },
    }


def main() -> None:
    """Measure, print a table, and write what was asked for."""
    if sys.argv[1:2] == ["--spec"]:
        spec, outcome = sys.argv[2:]
        Path(outcome).write_text(json.dumps(run_side(json.loads(spec))))
        return
    parser = parser_of(__doc__)
    parser.add_argument("model", metavar="MODEL", help="folder of a model")
    parser.add_argument(
        "data", metavar="DATA_FILE", help="preference rows, as data.train takes them"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for rayrm")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs a step")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--warm-up", type=int, default=2, help="passes over the steps before")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side; the best counts")
    parser.add_argument("--max-length", type=int, default=1024, help="longer pairs are left out")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens a forward, bare sides")
    parser.add_argument("--workers", type=int, default=1, help="workers of rayrm")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 16")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    given = parser.parse_intermixed_args()
    figures = measure(given)
    tokens = figures["tokens"]
    padding = 1 - tokens["real"] / tokens["padded"]
    print(
        f"{figures['pairs']} pairs; tokens: {tokens['padded']:,} padded ({padding:.0%} padding), "
    )
    print(f"{tokens['real']:,} real, {tokens['unique']:,} with each prompt once")
    print(f"{'side':24}{'pairs/s':>10}{'computed':>10}{'GB':>8}{'x TRL':>8}")
    for side, found in figures["sides"].items():
        print(
            f"{side:24}{found['pairs_per_second']:10.3f}{found['computed_tokens']:10,}"
            f"{found['peak_memory'] / 1e9:8.1f}{found.get('against_trl', float('nan')):8.2f}"
        )
    if given.output:
        given.output.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
