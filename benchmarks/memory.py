"""Resident memory of the driver while data of two sizes pass through: it should not grow with them.

    python benchmarks/memory.py [--sizes 2000 50000] [--output FIGURES.json]

The driver is the process that calls ``rayrm.fit``. For each size a new one starts, with that many
generated pairs in a file and Ray of its own; it surveys all of them and trains the quickstart model
for three steps. Its peak is the largest of what ``/proc/self/status`` says every 20 ms from the
call of ``fit`` to its return:

- ``resident`` (VmRSS) is what the ratio is made of;
- ``private`` (RssAnon) leaves out files and Ray's object store, whose pages are shared;
- ``all private`` adds that of every process of its Ray: feeder, worker, data tasks. A feeder holds
  a shuffle buffer, 65,536 rows by default, so data sets are compared that are larger than one.

Needs Linux.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from common import parser_of, tell

TARGET_RATIO = 1.1
NUM_STEPS = 3
_DRIVER = "--driver"
_FIELDS = {"VmRSS": "resident", "RssAnon": "private"}


def measure(sizes: list[int]) -> dict[str, float]:
    """Return the driver's peaks in MiB for each size, and the ratio of the last to the first."""
    figures: dict[str, float] = {}
    for size in sizes:
        told = subprocess.run(
            [sys.executable, __file__, _DRIVER, str(size)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        peaks = json.loads(told.stdout.splitlines()[-1])
        figures |= {f"{name}, {size} pairs": value for name, value in peaks.items()}
    ratios = {
        f"ratio, {name}": figures[f"{name}, {sizes[-1]} pairs"]
        / figures[f"{name}, {sizes[0]} pairs"]
        for name in ("peak resident MiB", "peak private MiB", "peak all private MiB")
    }
    return {**ratios, "share of the target": ratios["ratio, peak resident MiB"] / TARGET_RATIO} | (
        figures
    )


def _drive(size: int) -> dict[str, float]:
    """Run ``fit`` on ``size`` generated pairs in this process and return its peaks."""
    from rayrm.data.synthetic import generate_pairs
    from rayrm.launch import fit

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "pairs.jsonl"
        with open(rows, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in generate_pairs("train", size))
        config = {
            "run": {"output_dir": folder},
            "model": {"dtype": "float32"},
            "data": {"train": str(rows)},
            "train": {"max_steps": NUM_STEPS},
            "tracking": {"wandb": None},
        }
        peaks: dict[str, float] = {}
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(peaks, done))
        before = _read_status()
        started = time.perf_counter()
        watcher.start()
        try:
            fit(config)
        finally:
            done.set()
            watcher.join()
    return {
        **{f"peak {name} MiB": value for name, value in peaks.items()},
        **{f"{name} MiB before fit": value for name, value in before.items()},
        "seconds": time.perf_counter() - started,
    }


def _watch(peaks: dict[str, float], done: threading.Event) -> None:
    looked_at = 0.0
    while not done.wait(0.02):
        found = _read_status()
        if time.monotonic() - looked_at > 1:
            looked_at = time.monotonic()
            found["all private"] = found["private"]
            for process in psutil.Process().children(recursive=True):
                with suppress(OSError):  # it ended since
                    found["all private"] += _read_status(process.pid).get("private", 0.0)
        for name, value in found.items():
            peaks[name] = max(value, peaks.get(name, 0.0))


def _read_status(pid: int | str = "self") -> dict[str, float]:
    """Return a process's memory in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return {
        name: int(told[field].split()[0]) / 1024 for field, name in _FIELDS.items() if field in told
    }


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 50_000], help="pairs")
    parser.add_argument(_DRIVER, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.driver is not None:
        print(json.dumps(_drive(given.driver)))
        return
    figures = measure(given.sizes)
    tell(figures, given.output)


if __name__ == "__main__":
    main()
