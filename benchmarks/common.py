"""What the benchmarks share: their command line, their workers, and how they tell figures."""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints a benchmark's docstring as its help and takes ``--output``."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    return parser


def tell(figures: Mapping[str, float], output: Path | None, *, decimals: int = 3) -> None:
    """Print the figures, and write them where that was asked for."""
    for name, figure in figures.items():
        print(f"{name:48} {figure:12.{decimals}f}")
    if output is not None:
        output.write_text(json.dumps(figures, indent=2) + "\n")


def training_workers() -> Iterator[psutil.Process]:
    """Yield the processes of this process's Ray that train."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended since
            if "RayTrainWorker" in " ".join(process.cmdline()):
                yield process
