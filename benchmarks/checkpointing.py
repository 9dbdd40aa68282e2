"""What faults cost: checkpoints, a restart, and the record of progress.

    python benchmarks/checkpointing.py MODEL TRAIN_FILE [--save-steps 50] [section.field=value ...]

One run of ``rayrm.fit`` with one worker trains LoRA adapters and writes two checkpoints, each after
``--save-steps`` steps. The clock is read outside, in this process, when a step's line appears in
``metrics.jsonl``; the line tells the time that the loop counts as spent in the step. What passes
between two lines and is in no step is what the loop waits for.

- ``checkpoint share``: that wait after a step with a checkpoint, less the median wait after the
  others, over the time of the steps from one checkpoint to the next. The upload goes on beside the
  steps and is not in it.
- ``restart, seconds``: the worker is killed (``kill -9``) four steps after the first checkpoint;
  from there to the line of the first step that is taken again.
- ``record, bytes`` and ``record, seconds``: a checkpoint's ``progress.json`` and the marks of a
  data set of ten million rows, and the time to find in them where an epoch goes on.

Needs Linux.
"""

import json
import pickle
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import parser_of, tell, training_workers

STEPS_BEFORE_THE_KILL = 4
NUM_ROWS = 10_000_000


class Watcher:
    """Notes when each step's line appears, and kills the worker once."""

    def __init__(self, metrics: Path, *, kill_at: int) -> None:
        self.lines: list[tuple[float, dict[str, Any]]] = []
        self.killed_at = 0.0
        self._metrics = metrics
        self._kill_at = kill_at
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = ""
        while not self._done.wait(0.005):
            with suppress(FileNotFoundError):
                text = self._metrics.read_text()
                if text == seen or not text.endswith("\n"):
                    continue
                now = time.perf_counter()
                # a restarted run cuts the lines of steps that it takes again
                new = text.removeprefix(seen) if text.startswith(seen) else ""
                self.lines += [(now, json.loads(line)) for line in new.splitlines()]
                seen = text
                if not self.killed_at and self.lines[-1][1]["step"] >= self._kill_at:
                    for worker in training_workers():
                        worker.kill()
                    self.killed_at = time.perf_counter()


def measure(model: str, data: str, save_steps: int, overrides: list[str]) -> dict[str, float]:
    """Train, and return what checkpoints and a restart cost."""
    from rayrm.launch import fit

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "run": {"name": "run", "output_dir": folder},
            "model": {"name_or_path": model, "lora": {"r": 16}},
            "data": {"train": data},
            "train": {
                "batch_size": 4,
                "max_steps": 2 * save_steps + 2,
                "logging_steps": 1,
                "save_steps": save_steps,
            },
            "scaling": {"num_workers": 1},
            "tracking": {"wandb": None},
        }
        run = Path(folder, "run")
        with Watcher(run / "metrics.jsonl", kill_at=save_steps + STEPS_BEFORE_THE_KILL) as watched:
            fit(config, overrides)
        record = next(run.glob("checkpoints/*/progress.json")).stat().st_size
    lines, batch_size = watched.lines, config["train"]["batch_size"]
    waits: dict[bool, list[float]] = {True: [], False: []}
    for (before, line), (now, next_line) in pairwise(lines):
        in_step = batch_size / next_line["pairs_per_second"]
        if next_line["step"] == line["step"] + 1:
            waits[line["step"] % save_steps == 0].append(now - before - in_step)
    in_steps = sum(batch_size / line["pairs_per_second"] for _, line in lines[-save_steps:])
    wait = statistics.mean(waits[True]) - statistics.median(waits[False])
    again = next(now for now, _ in lines if now > watched.killed_at)
    return {
        "checkpoint share": wait / in_steps,
        "checkpoint, seconds of waiting": wait,
        "steps from one checkpoint to the next, seconds": in_steps,
        "restart, seconds": again - watched.killed_at,
        **measure_record(record),
    }


def measure_record(progress_bytes: int) -> dict[str, float]:
    """Return size and time of finding one's place in a data set of ten million rows."""
    from rayrm.data.feed import FeedPlan
    from rayrm.data.report import Mark

    rows_a_mark = FeedPlan(batch_size=32).rows_a_mark
    starts = range(0, NUM_ROWS, rows_a_mark)
    marks = tuple(Mark((0, start), rows_a_mark) for start in starts)
    plan = FeedPlan(batch_size=32, marks=marks)
    started = time.perf_counter()
    place, _ = plan.entry(NUM_ROWS // 32 - 1)
    seconds = time.perf_counter() - started
    assert place[1] == starts[-1]
    return {"record, bytes": progress_bytes + len(pickle.dumps(marks)), "record, seconds": seconds}


def main() -> None:
    """Read the command line, measure, print the figures and write them."""
    parser = parser_of(__doc__)
    parser.add_argument("model", metavar="MODEL", help="folder of a model")
    parser.add_argument("data", metavar="TRAIN_FILE", help="preference rows")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--save-steps", type=int, default=50)
    given = parser.parse_intermixed_args()
    figures = measure(given.model, given.data, given.save_steps, given.overrides)
    tell(figures, given.output, decimals=5)


if __name__ == "__main__":
    main()
