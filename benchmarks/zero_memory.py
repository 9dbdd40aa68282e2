"""What ZeRO-3's state takes on each rank, and what an export takes on top, against the theory.

    python benchmarks/zero_memory.py MODEL [--workers 1 2] [--output FIGURES.json]

For all weights and for LoRA (r 16, every linear layer), in bfloat16, each number of workers takes
two optimizer steps on two short pairs. All is private memory (RssAnon of ``/proc/self/status``),
with freed pages given back to the system before a look:

- ``state, rank R``: what a rank holds after the steps, less what it held before the model was
  loaded, over ``rayrm.training.zero.state_bytes``: parameters, gradients and optimizer. Buckets of
  gradients and what threads and libraries keep are in it, too;
- ``export, rank R``: the peak from the gathering of the weights to the end of the proof, less what
  was held before, over the bytes of the exported weights in their type: the whole model, or with
  LoRA the base that the proof loads.

Needs Linux.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import parser_of, tell

_RANK = "--rank"
CASES: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora": {"r": 16}}}


def measure(model: str, workers: list[int]) -> dict[str, float]:
    """Return both ratios for every case, number of workers and rank."""
    figures: dict[str, float] = {}
    for name in CASES:
        for num_ranks in workers:
            with tempfile.TemporaryDirectory() as folder:
                launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                ranks = [f"--nproc-per-node={num_ranks}", __file__, _RANK, model, name, folder]
                subprocess.run([*launcher, *ranks], check=True)
                for rank in range(num_ranks):
                    told = json.loads(Path(folder, f"{rank}.json").read_text())
                    for what, figure in told.items():
                        figures[f"{name}, {num_ranks} workers: {what}, rank {rank}"] = figure
    return figures


def _run_rank(model: str, name: str, folder: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    rank = dist.get_rank()
    told = _train(rank, model, name, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


def _train(rank: int, model: str, name: str, folder: str) -> dict[str, float]:
    import numpy as np

    from rayrm.config.schema import RunConfig
    from rayrm.data.plan import Cutting
    from rayrm.data.tokenize import TokenizedPair
    from rayrm.model.tokenizer import load_tokenizer
    from rayrm.training.engine import Engine
    from rayrm.training.export import export_model, take_proof
    from rayrm.training.zero import state_bytes

    config = RunConfig.model_validate({"model": {"name_or_path": model, **CASES[name]}})
    tokenizer = load_tokenizer(config.model)
    before = _private()
    engine = Engine(config, tokenizer, num_steps=4)
    engine.cutting = Cutting(engine.cutting.layout, 1000)
    ids = np.arange(100, 130, dtype=np.int32)
    pairs = [TokenizedPair(ids, ids[:5], ids[5:9], 0.0), TokenizedPair(ids, ids[7:], ids[:9], 0.0)]
    for _ in range(2):
        engine.backward(torch.cat(engine.score(engine.pack(pairs))).sum() / 4, ends_step=True)
    held = _private() - before
    trained, total = engine.num_parameters()
    theory = state_bytes(
        total, trained, stage=3, dtype=config.model.dtype, world_size=engine.world_size
    )
    with engine.evaluating():
        proof = take_proof(lambda part: engine.score(engine.pack(part)), pairs)
    held_before = _private()
    with _peak() as peak:
        state = engine.gather_state(trained_only=config.model.trains_adapter)
        engine.leave_zero()
        if rank == 0:
            place = f"{folder}/model"
            os.mkdir(place)
            export_model(
                engine.model,
                state,
                tokenizer,
                config.model,
                folder=place,
                final_path=place,
                proof=proof,
            )
        engine.gather_objects(None)
    itemsize = getattr(torch, config.model.dtype).itemsize
    return {
        "state": held / theory.total,
        "export": max(peak[0] - held_before, 0.0) / (itemsize * total),
    }


def _private() -> float:
    """Return this process's private bytes, once freed pages are given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _read()


def _read() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")


@contextmanager
def _peak() -> Iterator[list[float]]:
    """Yield a list whose one number is the peak while the context was open."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _read())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def main() -> None:
    """Read the command line, measure, print the figures and write them."""
    if sys.argv[1:2] == [_RANK]:
        return _run_rank(*sys.argv[2:])
    parser = parser_of(__doc__)
    parser.add_argument("model", metavar="MODEL", help="folder of a model")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    tell(measure(given.model, given.workers), given.output)


if __name__ == "__main__":
    main()
