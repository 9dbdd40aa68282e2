"""The processes that drive the runs of a sweep, one run after another.

Loading what a run needs takes as long as many a small trial: a runner does it once.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayrm.config.schema import RunConfig

if TYPE_CHECKING:
    from rayrm.data.intake import Rows
    from rayrm.launch import FitResult


class Runner:
    """The actor in which one run at a time is driven."""

    def __init__(self) -> None:
        from rayrm.launch import fit_settled

        self._fit_settled = fit_settled
        self._board: Any = None

    def fit(
        self, run: RunConfig, datasets: Mapping[str, Any], rows: "Rows | None"
    ) -> "FitResult | None":
        """Train; return nothing where the run was told to stop."""
        self._board = None
        try:
            return self._fit_settled(run, datasets, on_board=self._take, rows=rows)
        except SystemExit:
            return None

    def _take(self, board: Any) -> None:
        self._board = board

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the lines of all evaluations so far."""
        return [] if self._board is None else ray.get(self._board.evaluations.remote())

    def stop(self) -> None:
        """Ask the workers to finish their step, save and stop."""
        if self._board is not None:
            self._board.stop.remote()


class Runners:
    """The actor that lends runners to trials; there are as many as trials at a time."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def take(self) -> Any:
        """Lend a runner."""
        return self._free.pop() if self._free else _actor(Runner, max_concurrency=2)

    def give_back(self, runner: Any, *, is_free: bool) -> None:
        """Take a runner back; end one whose run did not."""
        if is_free:
            self._free.append(runner)
        else:
            ray.kill(runner)


def start_runners() -> Any:
    """Start the actor that lends runners."""
    return _actor(Runners)


def _actor(kind: type, **options: Any) -> Any:
    """Start an actor outside of any placement group, which ends with whoever asked for it."""
    apart = PlacementGroupSchedulingStrategy(placement_group=None)  # type: ignore[arg-type]
    actor: Any = ray.remote(kind)
    return actor.options(num_cpus=0, scheduling_strategy=apart, **options).remote()
