"""A world of training processes without Ray: a third of the start-up where Ray is not tested."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rayrm.config.schema import ModelSection, RunConfig
from rayrm.data.plan import Cutting
from rayrm.data.tokenize import TokenizedPair
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.export import Proof, export_model, take_proof

if TYPE_CHECKING:
    from rayrm.training.engine import Engine  # of which each rank alone loads DeepSpeed


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


def start_engine(config: RunConfig, *, num_steps: int) -> tuple["Engine", PreTrainedTokenizerBase]:
    """Return the engine of this rank, with large forwards, and the tokenizer."""
    from rayrm.training.engine import Engine

    tokenizer = load_tokenizer(config.model)
    engine = Engine(config, tokenizer, num_steps=num_steps)
    engine.cutting = Cutting(engine.cutting.layout, 1000)
    return engine, tokenizer


def proof_of(engine: "Engine", pairs: list[TokenizedPair]) -> Proof:
    """Return the rewards that the engine's model gives now."""
    with engine.evaluating():
        return take_proof(lambda part: engine.score(engine.pack(part)), pairs)


def export_trained(
    engine: "Engine",
    tokenizer: PreTrainedTokenizerBase,
    model: ModelSection,
    folder: Path,
    proof: Proof,
) -> None:
    """Export what is trained to a new folder, which is whole on every rank's return."""
    state = engine.gather_state(trained_only=model.trains_adapter)
    engine.leave_zero()
    if engine.rank == 0:
        folder.mkdir()
        export_model(
            engine.model,
            state,
            tokenizer,
            model,
            folder=str(folder),
            final_path=str(folder),
            proof=proof,
        )
    engine.gather_objects(None)


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
