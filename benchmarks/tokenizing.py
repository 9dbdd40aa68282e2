"""Rows a second and core that the data path handles, against the bare tokenizer on the same texts.

    python benchmarks/tokenizing.py TOKENIZER_DIR FILE [--rows 20000] [--output FIGURES.json]

FILE (jsonl, also .gz) is repeated to ``--rows`` rows and written to one file. Then, in turns:

- ``rayrm``: ``PairStream.survey`` on a local Ray with ``--num-cpus`` logical CPUs: read, parse,
  render, tokenize, find the shared prompt, filter, count. Rows a second, divided by the CPUs.
- ``bare``: ``tokenizer(texts)`` in batches of 1,000, with one thread, in a process without Ray,
  over the texts that the survey tokenizes, rendered beforehand: two a row.

A first, unmeasured survey starts Ray's processes and loads their tokenizers. Each side is timed
``--repeats`` times and its fastest run counts, since other work on the machine only ever slows one
down. Processor time is told beside the clock: on a busy machine two processes wait for a core where
one does not. It is that of all processes, Ray's own and the driver among them. A ratio can exceed
1, since rayrm leaves out the offsets that the tokenizer's own call makes.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
from common import parser_of, tell

TARGET_RATIO = 0.5
_BARE = "--bare"


def measure(
    tokenizer: str, file: Path, *, num_rows: int, num_cpus: int, max_length: int, repeats: int
) -> dict[str, float]:
    """Return rows a second and core of both sides, and their ratio."""
    import ray
    import ray.data  # sets up its logger, which ray_running then makes quiet

    from rayrm.cluster import ray_running
    from rayrm.config.schema import ScalingSection

    rows = _read_lines(file)
    with tempfile.TemporaryDirectory() as place:
        few, many, texts = (
            Path(place) / name for name in ("few.jsonl", "many.jsonl", "texts.json")
        )
        few.write_text("\n".join(rows) + "\n")
        many.write_text("\n".join(islice(cycle(rows), num_rows)) + "\n")
        num_texts = _write_texts(tokenizer, rows, num_rows, texts)
        # the bare side's priority: Ray's workers are the lowest on a machine with other work
        os.environ.update(RAY_worker_niceness="0")
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
        try:
            with ray_running(ScalingSection()):  # it is there already: this keeps it quiet
                _time_survey(tokenizer, few, max_length)
                surveys, bare = [], []
                for _ in range(repeats):
                    surveys.append(_time_survey(tokenizer, many, max_length))
                    bare.append(_time_bare(tokenizer, texts))
        finally:
            ray.shutdown()
    ours, our_cpu = (min(seconds) for seconds in zip(*surveys, strict=True))
    theirs, their_cpu = (min(seconds) for seconds in zip(*bare, strict=True))
    num_bare = num_texts / 2
    ratio = (num_rows / ours / num_cpus) / (num_bare / theirs)
    return {
        "ratio per core, by the clock": ratio,
        "ratio per core, by processor time": (num_rows / our_cpu) / (num_bare / their_cpu),
        "share of the target": ratio / TARGET_RATIO,
        "rayrm, rows a second and core": num_rows / ours / num_cpus,
        "bare, rows a second and core": num_bare / theirs,
        "rayrm, seconds": ours,
        "rayrm, processor seconds": our_cpu,
        "bare, seconds": theirs,
        "bare, processor seconds": their_cpu,
    }


def _read_lines(file: Path) -> list[str]:
    if file.suffix == ".gz":
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            text = stream.read()
    else:
        text = file.read_text(encoding="utf-8")
    return [line for line in text.split("\n") if line.strip()]


def _write_texts(tokenizer: str, rows: list[str], num_rows: int, path: Path) -> int:
    """Write the texts of the usable rows among ``num_rows``, as the survey renders them."""
    from rayrm.config.schema import ModelSection
    from rayrm.data.formats import parse_line
    from rayrm.data.pairs import Conversation, Drop
    from rayrm.model.tokenizer import load_tokenizer

    loaded: Any = load_tokenizer(ModelSection(name_or_path=tokenizer))

    def render(side: Any) -> str:
        if not isinstance(side, Conversation):
            return side
        return loaded.apply_chat_template(side.messages, tools=side.tools or None, tokenize=False)

    pairs = [pair for pair in (parse_line(row, {}) for row in rows) if not isinstance(pair, Drop)]
    rendered = [[render(side) for side in pair.sides] for pair in pairs]
    num_usable = num_rows * len(pairs) // len(rows)
    texts = [text for sides in islice(cycle(rendered), num_usable) for text in sides]
    path.write_text(json.dumps(texts))
    return len(texts)


def _time_survey(tokenizer: str, file: Path, max_length: int) -> tuple[float, float]:
    """Return the seconds of one survey, and the processor seconds of all that took part."""
    from rayrm.config.schema import DataSection, ModelSection, Source
    from rayrm.data.pipeline import tokenize_rows
    from rayrm.data.sources import open_sources

    started, cpu_before = time.perf_counter(), _cpu_seconds()
    stream = tokenize_rows(
        open_sources([("rows", Source(path=str(file)))], field="FILE"),
        model=ModelSection(name_or_path=tokenizer),
        data=DataSection(max_length=max_length),
    )
    report = stream.survey()
    seconds = time.perf_counter() - started
    print(f"{report.num_pairs} of {report.num_rows} rows in {seconds:.1f} s", file=sys.stderr)
    return seconds, _cpu_seconds() - cpu_before


def _cpu_seconds() -> float:
    """Return the processor time so far of this process and all that it started."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.cpu_times().user + process.cpu_times().system
    return total


def _time_bare(tokenizer: str, texts: Path) -> tuple[float, float]:
    """Return the seconds and processor seconds of the bare tokenizer in a process of its own."""
    told = subprocess.run(
        [sys.executable, __file__, tokenizer, str(texts), _BARE],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, cpu_seconds = map(float, told.stdout.split())
    return seconds, cpu_seconds


def _run_bare(tokenizer: str, path: Path) -> tuple[float, float]:
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    texts = json.loads(path.read_text())
    loaded(texts[:1000], verbose=False)
    started, cpu_before = time.perf_counter(), time.process_time()
    for start in range(0, len(texts), 1000):
        loaded(texts[start : start + 1000], verbose=False)
    return time.perf_counter() - started, time.process_time() - cpu_before


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("tokenizer", metavar="TOKENIZER_DIR", help="folder of a tokenizer")
    parser.add_argument("file", type=Path, metavar="FILE", help="preference rows, jsonl or .gz")
    parser.add_argument("--rows", type=int, default=20_000, help="rows to repeat FILE to")
    parser.add_argument("--num-cpus", type=int, default=2, help="logical CPUs of Ray")
    parser.add_argument("--max-length", type=int, default=1024, help="data.max_length")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each side")
    parser.add_argument(_BARE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        print(*_run_bare(given.tokenizer, given.file))
        return
    figures = measure(
        os.path.abspath(given.tokenizer),
        given.file,
        num_rows=given.rows,
        num_cpus=given.num_cpus,
        max_length=given.max_length,
        repeats=given.repeats,
    )
    tell(figures, given.output)


if __name__ == "__main__":
    main()
