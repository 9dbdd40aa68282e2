"""Between the first worker and the driver: progress to show, and a failure to raise."""

import contextlib
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tqdm import tqdm

from rayrm.data.feed import Order
from rayrm.errors import RayrmError

_PATIENCE_SECONDS = 90
_ANSWER_SECONDS = 5


class Board:
    """The actor: the first worker posts, the driver reads."""

    def __init__(self, save_minutes: float | None = None) -> None:
        """After ``save_minutes`` without a checkpoint the workers are asked for one."""
        self._save_seconds = float("inf") if save_minutes is None else 60 * save_minutes
        self._saved_at = time.monotonic()
        self._notes: list[str] = []
        self._step = 0
        self._num_steps = 0
        self._line: dict[str, Any] = {}
        self._evaluations: list[dict[str, Any]] = []
        self._failure: RayrmError | None = None
        self._stop_asked = False
        self._arrived: Counter[str] = Counter()
        self._place: PlacementGroup | None = None
        self._worker: Any = None

    def stop(self) -> None:
        """Ask the workers to finish their step, save and stop."""
        self._stop_asked = True

    def order(self) -> Order:
        """Return what the workers are to do after the step that is dealt out now."""
        if self._stop_asked:
            return "stop"
        if time.monotonic() - self._saved_at < self._save_seconds:
            return "go on"
        self._saved_at = time.monotonic()
        return "save"

    def saved(self) -> None:
        """A checkpoint was written."""
        self._saved_at = time.monotonic()

    def arrive(self, checkpoint: str) -> int:
        """A rank's part of a checkpoint was uploaded; return how many are."""
        self._arrived[checkpoint] += 1
        return self._arrived[checkpoint]

    def start(self, headline: str, step: int, num_steps: int) -> None:
        """Training starts, or starts again from a checkpoint."""
        self._notes.append(headline if step == 0 else f"{headline}; going on from step {step}")
        self._step, self._num_steps, self._line = step, num_steps, {}
        self._saved_at = time.monotonic()

    def note(self, text: str) -> None:
        """Take a line of text for the user."""
        self._notes.append(text)

    def update(self, line: dict[str, Any]) -> None:
        """Take a line of metrics."""
        self._step = line["step"]
        self._line = self._line | line
        if any(name.startswith("eval_") for name in line):
            self._evaluations.append(line)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the lines of all evaluations, those that a restart repeated among them."""
        return self._evaluations

    def read(self) -> tuple[list[str], int, int, dict[str, Any]]:
        """Return the notes not read yet, the step, the number of steps and the latest metrics."""
        notes, self._notes = self._notes, []
        return notes, self._step, self._num_steps, self._line

    def enter(self, place: PlacementGroup | None, worker: Any) -> RayrmError | None:
        """A worker starts, in this place; return the failure that a restart would only repeat."""
        self._place, self._worker = place, worker
        return self._failure

    def worker(self) -> Any:
        """Return the actor of the worker that started last."""
        return self._worker

    def place(self) -> PlacementGroup | None:
        """Return the resources that the workers hold."""
        return self._place

    def fail(self, error: RayrmError) -> None:
        """Post an error that a restart would only meet again; the first one counts."""
        self._failure = self._failure or error

    def failure(self) -> RayrmError | None:
        """Return what was posted."""
        return self._failure


@dataclass(frozen=True)
class OrderOf:
    """Asks the board what the workers are to do, from wherever it is called."""

    board: Any

    def __call__(self) -> Order:
        """Return what the board says."""
        return ray.get(self.board.order.remote())


def start_board(save_minutes: float | None) -> Any:
    """Start the actor on the driver's node: any other may leave the cluster."""
    here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(Board)
    return actor.remote(save_minutes)


@contextlib.contextmanager
def stopping_on_signals(board: Any) -> Iterator[list[int]]:
    """Turn Ctrl-C and SIGTERM into an orderly stop while the block runs; yield those received.

    A second Ctrl-C is not waited for; a second SIGTERM changes nothing, since supervisors send it
    to a process and again to its group. Only the main thread hears signals; elsewhere there is no
    change.
    """
    received: list[int] = []

    def ask(number: int, _: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if received:
            return
        received.append(number)
        board.stop.remote()
        print("stopping: this step is finished and saved first", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def showing(board: Any, *, waiting_for: str) -> Iterator[None]:
    """Show the board's progress while the block runs: a bar, or lines without a terminal.

    What is waited for is told where training has not started after a while.
    """
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(board, done, waiting_for), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join(timeout=5)


def _watch(board: Any, done: threading.Event, waiting_for: str) -> None:
    bar: tqdm[Any] | None = None
    shown = 0
    told_at = time.monotonic()
    reading: Any = None
    while True:
        finished = done.wait(0.5)
        try:
            reading = reading or board.read.remote()  # what is read once is told by no other
            notes, step, num_steps, line = ray.get(reading, timeout=_ANSWER_SECONDS)
        except GetTimeoutError:  # on a busy machine
            if finished:
                return
            continue
        except Exception:  # the bar must never end a run
            return
        reading = None
        for note in notes:
            tqdm.write(note, file=sys.stderr)
        if not num_steps and time.monotonic() - told_at > _PATIENCE_SECONDS:
            told_at = time.monotonic()
            print(f"waiting for {waiting_for} to start", file=sys.stderr, flush=True)
        if bar is None and num_steps:
            bar = tqdm(total=num_steps, initial=step, unit="step", disable=not sys.stderr.isatty())
        if bar is not None and step != shown:
            shown = step
            if bar.disable and line:
                print(f"step {step}/{num_steps}  {_short(line)}", file=sys.stderr, flush=True)
            bar.n = step
            bar.set_postfix_str(_short(line))
        if finished:
            if bar is not None:
                bar.close()
            return


def _short(line: dict[str, Any]) -> str:
    names = ("loss", "accuracy", "eval_loss", "eval_accuracy", "pairs_per_second")
    return "  ".join(f"{name} {line[name]:.4g}" for name in names if name in line)
