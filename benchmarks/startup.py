"""Seconds from the command line to the first optimizer step, and where they go.

    python benchmarks/startup.py [--first-use] [--output FIGURES.json]

The quickstart is started as a user starts it, ``python -m rayrm.train``, in a process of its own,
with an empty folder for runs and for its model; it is cut to one step, and it logs that step. The
parent watches from outside what appears, ten times a second or more:

- ``rows``: until ``data_report.json``: imports, Ray, and one pass over all rows;
- ``workers``: until the line that a worker with its model posts on stderr (read twice a second);
- ``first step``: until the first line of ``metrics.jsonl``.

Imports are part of ``rows``; they are also timed apart, in a second process, to tell them from the
rest. With ``--first-use`` DeepSpeed has to compile its CPU communication op again, as it does once
on a new machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TARGET_SECONDS = 60.0
PATIENCE_SECONDS = 600.0


def measure(*, first_use: bool) -> dict[str, float]:
    """Return the seconds of each stage and of all of them together."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        environment = os.environ | {"RAYRM_CACHE": str(folder / "cache")}
        if first_use:
            environment["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
        run = folder / "quickstart"
        command = [sys.executable, "-m", "rayrm.train", f"run.output_dir={folder}"]
        command += ["train.max_steps=1", "train.eval_steps=null", "train.logging_steps=1"]
        errors = folder / "stderr"
        started = time.perf_counter()
        with open(errors, "w") as stderr:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr
            )
        stages: dict[str, Callable[[], bool]] = {
            "rows": (run / "data_report.json").exists,
            "workers": lambda: "training " in errors.read_text(),
            "first step": lambda: _has_text(run / "metrics.jsonl"),
        }
        seen = {name: _wait(process, stage, errors) - started for name, stage in stages.items()}
        process.wait(PATIENCE_SECONDS)
    before = [0.0, *list(seen.values())[:-1]]
    seconds = {
        name: after - earlier
        for (name, after), earlier in zip(seen.items(), before, strict=True)
    }
    return {
        "seconds to the first step": seen["first step"],
        "share of the target": seen["first step"] / TARGET_SECONDS,
        **{f"seconds, {name}": value for name, value in seconds.items()},
        "seconds, imports (part of rows)": _time_imports(),
    }


def _wait(process: "subprocess.Popen[bytes]", stage: Callable[[], bool], errors: Path) -> float:
    """Return the clock when the stage is reached."""
    deadline = time.perf_counter() + PATIENCE_SECONDS
    while not stage():
        if process.poll() not in (None, 0) or time.perf_counter() > deadline:
            process.kill()
            raise SystemExit(f"the quickstart did not get that far:\n{errors.read_text()}")
        time.sleep(0.02)
    return time.perf_counter()


def _has_text(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _time_imports() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import rayrm.launch"], check=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first-use", action="store_true", help="compile DeepSpeed's op anew")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    given = parser.parse_args()
    figures = measure(first_use=given.first_use)
    for name, figure in figures.items():
        print(f"{name:36} {figure:10.3f}")
    if given.output is not None:
        given.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
