"""Seconds from the command line to the first optimizer step, and where they go.

    python benchmarks/startup.py [--output FIGURES.json]

The quickstart is started as a user starts it, ``python -m rayrm.train``, in a process of its own,
with an empty folder for runs and for its model; it is cut to one step, and it logs that step. The
parent watches from outside what appears, fifty times a second:

- ``rows``: until ``data_report.json``: imports, Ray, and one pass over all rows;
- ``workers``: until the line that a worker with its model posts on stderr (read twice a second);
- ``first step``: until the first line of ``metrics.jsonl``.

The processor time of all processes up to the first step is told as well, by kind of process: on a
busy machine it says more than the clock, and divided by the number of cores it is the least that
the clock can show. ``imports`` is what ``import rayrm.launch`` takes in a process of its own; it is
part of ``rows``.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from common import parser_of, tell

TARGET_SECONDS = 60.0
PATIENCE_SECONDS = 600.0


def measure() -> dict[str, float]:
    """Return the seconds of each stage and of all of them together."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        environment = os.environ | {"RAYRM_CACHE": str(folder / "cache")}
        run, errors = folder / "quickstart", folder / "stderr"
        command = [sys.executable, "-m", "rayrm.train", f"run.output_dir={folder}"]
        command += ["train.max_steps=1", "train.num_train_epochs=1", "train.eval_steps=null"]
        command += ["train.logging_steps=1"]
        stages: dict[str, Callable[[], bool]] = {
            "rows": (run / "data_report.json").exists,
            "workers": lambda: "training " in errors.read_text(),
            "first step": lambda: _has_text(run / "metrics.jsonl"),
        }
        started = time.perf_counter()
        with open(errors, "w") as stderr:
            process = psutil.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr
            )
        processors: dict[int, tuple[str, float]] = {}
        figures: dict[str, float] = {}
        before = 0.0
        for name, is_reached in stages.items():
            _wait(process, is_reached, errors, processors)
            seconds = time.perf_counter() - started
            figures[f"seconds, {name}"], before = seconds - before, seconds
        total = sum(seconds for _, seconds in processors.values())
        kinds: dict[str, float] = {}
        for kind, seconds in processors.values():
            kinds[kind] = kinds.get(kind, 0.0) + seconds
        largest = sorted(kinds.items(), key=lambda item: -item[1])[:10]
        process.wait(PATIENCE_SECONDS)
    return {
        "seconds to the first step": before,
        "share of the target": before / TARGET_SECONDS,
        **figures,
        "seconds, imports (part of rows)": _time_imports(),
        "processor seconds to the first step": total,
        **{f"processor seconds, {kind}": seconds for kind, seconds in largest},
    }


def _wait(
    process: psutil.Popen,
    is_reached: Callable[[], bool],
    errors: Path,
    processors: dict[int, tuple[str, float]],
) -> None:
    """Return when the stage is reached; note the processor time of every process meanwhile."""
    deadline = time.perf_counter() + PATIENCE_SECONDS
    number = 0
    while not is_reached():
        if process.poll() not in (None, 0) or time.perf_counter() > deadline:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            raise SystemExit(f"the quickstart did not get that far:\n{errors.read_text()}")
        if number % 10 == 0:
            _note_processors(process, processors)
        number += 1
        time.sleep(0.02)
    _note_processors(process, processors)


def _note_processors(process: psutil.Popen, processors: dict[int, tuple[str, float]]) -> None:
    """Write kind and processor seconds of each process of the tree over what was known of it."""
    with suppress(psutil.NoSuchProcess):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                kind = _kind(each.cmdline())
                if kind == "ray::IDLE" and each.pid in processors:
                    kind = processors[each.pid][0]  # a title lasts as long as its task
                processors[each.pid] = (kind, times.user + times.system)


def _kind(command: list[str]) -> str:
    """Return a short name: Ray's title of a worker, or what the command runs."""
    if command and command[0].startswith("ray::"):
        return command[0].split(".")[0].split("(")[0].strip()
    return "driver" if "rayrm.train" in command else "ray's own processes"


def _has_text(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _time_imports() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import rayrm.launch"], check=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = parser_of(__doc__)
    given = parser.parse_args()
    figures = measure()
    tell(figures, given.output)


if __name__ == "__main__":
    main()
