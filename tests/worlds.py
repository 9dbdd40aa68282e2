"""A world of training processes without Ray: a third of the start-up where Ray is not tested."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def in_world(function: Callable[[Any], Any], argument: Any, *, num_ranks: int, folder: Path) -> Any:
    """Call a module's function on every rank of a gloo world; return what rank 0 returns.

    It and its argument have to be picklable, the result has to be fit for JSON.
    """
    result = folder / "result.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(  # type: ignore[attr-defined]
        _enter, (num_ranks, port, function, argument, result), nprocs=num_ranks
    )
    return json.loads(result.read_text())


def _enter(
    rank: int,
    num_ranks: int,
    port: int,
    function: Callable[[Any], Any],
    argument: Any,
    result: Path,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    dist.init_process_group("gloo")
    value = function(argument)
    if rank == 0:
        result.write_text(json.dumps(value))
    dist.destroy_process_group()
