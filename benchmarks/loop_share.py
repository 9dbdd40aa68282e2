"""Share of the training loop's time that goes to forward, backward and optimizer.

    python benchmarks/loop_share.py MODEL TRAIN_FILE [--steps 6] [section.field=value ...]

Two runs, one after the other, on the same Ray with one worker each:

- ``rayrm.fit`` as users run it: rows stream and are tokenized while the worker trains, every step
  is written to ``metrics.jsonl`` and to an offline W&B run; no checkpoints, no evaluations. The
  clock is read outside, in this process, when the line of a step appears in the file (looked for
  every 5 ms): what counts is the time from the first line to the last.
- a bare loop over the same micro-batches of the same steps, packed and held in the worker's memory
  beforehand: nothing but forward, loss, backward and optimizer of the same engine.

Either way the first step is left out: it is slow, and warms up. ``bare / rayrm`` is the share asked
for; it also counts what the data tasks take from the worker's cores. ``in steps / rayrm`` comes
from the first run alone, and so bears a busy machine better: the time that the loop itself counts
as spent in steps (packing and statistics included) over the time outside.

On a machine with other work repeat it (``--repeats``); each side's fastest run counts.
"""

import json
import tempfile
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from common import parser_of, tell

TARGET_SHARE = 0.85


def measure(settings: dict[str, Any], overrides: list[str], *, repeats: int) -> dict[str, float]:
    """Return the shares, and the pairs a second of both loops."""
    from rayrm.cluster import ray_running
    from rayrm.config.loader import load_config
    from rayrm.preflight import with_absolute_paths

    with tempfile.TemporaryDirectory() as folder:
        settings["run"] = {"output_dir": folder}
        config = with_absolute_paths(load_config(settings, overrides))
        num_pairs = (config.train.max_steps - 1) * config.train.batch_size
        outside, inside, bare = [], [], []
        with ray_running(config.scaling):
            for number in range(repeats):
                named = load_config(config, [f"run.name=loop-{number}"])
                seconds, seconds_in_steps = _time_fit(named, Path(folder) / f"loop-{number}")
                outside.append(seconds)
                inside.append(seconds_in_steps / seconds)
                bare.append(_time_bare(named, folder))
    share = min(bare) / min(outside)
    return {
        "bare / rayrm": share,
        "share of the target": share / TARGET_SHARE,
        "in steps / rayrm": max(inside),
        "rayrm, pairs a second": num_pairs / min(outside),
        "bare, pairs a second": num_pairs / min(bare),
        "rayrm, seconds": min(outside),
        "bare, seconds": min(bare),
    }


def _time_fit(config: Any, run_dir: Path) -> tuple[float, float]:
    """Return the seconds from the first step's line to the last's, and those spent in steps."""
    from rayrm.launch import fit

    times: list[float] = []
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(run_dir / "metrics.jsonl", times, done))
    watcher.start()
    try:
        fit(config)
    finally:
        done.set()
        watcher.join()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(times) == config.train.max_steps
    in_steps = sum(config.train.batch_size / line["pairs_per_second"] for line in lines[1:])
    return times[-1] - times[0], in_steps


def _watch(path: Path, times: list[float], done: threading.Event) -> None:
    """Append the clock for each line that appears in the file."""
    while not done.wait(0.005):
        with suppress(FileNotFoundError):
            num_lines = path.read_bytes().count(b"\n")
            times += [time.perf_counter()] * (num_lines - len(times))


def _time_bare(config: Any, folder: str) -> float:
    """Return the seconds of a loop over held batches, in a worker like that of ``fit``."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from rayrm.cluster import choose_resources
    from rayrm.data.feed import Feed, FeedPlan
    from rayrm.data.intake import open_streams

    resources = choose_resources(config.scaling, ray.cluster_resources(), ray.available_resources())
    streams = open_streams(config, {}, cpus_per_task=resources.cpus_per_task)
    plan = FeedPlan(
        batch_size=config.train.batch_size,
        seed=config.run.seed if config.data.shuffle else None,
        buffer_size=config.data.shuffle_buffer_size,
    )
    trainer = TorchTrainer(
        bare_loop,
        train_loop_config={
            "config": config.model_dump(mode="json"),
            "feed": Feed.start(streams["train"], plan),
        },
        scaling_config=ScalingConfig(
            num_workers=1, use_gpu=resources.use_gpu, resources_per_worker=resources.per_worker
        ),
        run_config=RunConfig(name=f"bare-{time.time_ns()}", storage_path=folder),
    )
    seconds = trainer.fit().return_value
    assert isinstance(seconds, float)
    return seconds


def bare_loop(loop_config: dict[str, Any]) -> float:
    """Train on held batches and return the seconds of all steps but the first."""
    import os

    import torch

    from rayrm.config.schema import RunConfig
    from rayrm.model.tokenizer import load_tokenizer
    from rayrm.training.engine import Engine
    from rayrm.training.loop import Progress, pair_losses
    from rayrm.training.preparation import settle_memory

    config = RunConfig.model_validate(loop_config["config"])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    num_steps = config.train.max_steps
    engine = Engine(config, load_tokenizer(config.model), num_steps=num_steps)
    longest_pair = 2 * config.data.max_length
    settle_memory(engine, config, Progress(), longest_pair=longest_pair, workers_on_node=1)
    shard = loop_config["feed"].shard(engine.rank, engine.world_size)
    steps = [
        [
            engine.pack([share.pairs[position] for position in positions])
            for positions in share.micro_batches
        ]
        for share in islice(shard.steps(engine.cutting), num_steps)
    ]
    started = 0.0
    for number, batches in enumerate(steps):
        if number == 1:
            _finish_kernels(engine.device)
            started = time.perf_counter()
        num_pairs = sum(batch.num_pairs for batch in batches)
        for batch in batches:
            chosen, rejected = engine.score(batch)
            loss = pair_losses(chosen, rejected, batch, config.loss).sum() / num_pairs
            engine.backward(loss, ends_step=batch is batches[-1])
    _finish_kernels(engine.device)
    return time.perf_counter() - started


def _finish_kernels(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("model", metavar="MODEL", help="folder of a model")
    parser.add_argument("train_file", metavar="TRAIN_FILE", help="preference rows")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument(
        "--steps", type=int, default=6, help="optimizer steps, the first unmeasured"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="pairs a step")
    parser.add_argument("--max-length", type=int, default=512, help="data.max_length")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each loop")
    given = parser.parse_intermixed_args()
    settings = {
        "model": {"name_or_path": given.model},
        "data": {"train": given.train_file, "max_length": given.max_length},
        "train": {
            "batch_size": given.batch_size,
            "max_steps": given.steps,
            "logging_steps": 1,
            "save_steps": None,
        },
        "tracking": {"wandb": {"mode": "offline"}},
    }
    figures = measure(settings, given.overrides, repeats=given.repeats)
    tell(figures, given.output)


if __name__ == "__main__":
    main()
