"""One trial of a sweep: a run of ``fit`` that Ray Tune asks for its evaluations."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import tune
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayrm.config.loader import with_values
from rayrm.config.schema import RunConfig, SweepConfig
from rayrm.config.space import trial_config
from rayrm.errors import RayrmError
from rayrm.launch import FitResult, fit_settled

TRIALS = "trials"
"""Folder of the trials' runs in the sweep's folder."""
_LOOK_SECONDS = 0.5
_STOP_SECONDS = 120
"""So long a trial may take to finish a step and save it."""


@dataclass(frozen=True)
class SweepJob:
    """What every trial is told."""

    config: SweepConfig
    folder: str
    """The sweep's folder."""
    datasets: Mapping[str, Any]


def trial_name(number: int, repeat: int) -> str:
    """Return the name of a trial's run."""
    return f"{number:03d}-{repeat}"


class Runner:
    """The actor in which a trial's run is driven, outside the placement group that Tune made."""

    def __init__(self, run: RunConfig, datasets: Mapping[str, Any]) -> None:
        self._run = run
        self._datasets = datasets
        self._board: Any = None

    def fit(self) -> FitResult | None:
        """Train; return nothing where the run was told to stop."""
        try:
            return fit_settled(self._run, self._datasets, on_board=self._take)
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


class Trial(tune.Trainable):
    """Trains one drawn configuration; a step of Tune is an evaluation.

    That this is a class lets a scheduler's stop reach the run: its workers finish their step and
    free what they hold, where Tune alone would only end the trial's process.
    """

    def setup(self, config: dict[str, Any], *, job: SweepJob) -> None:  # type: ignore[override]
        """Start the run; one that was started before goes on from its last checkpoint."""
        number, repeat = config["number"], config["repeat"]
        run = trial_config(job.config, config["values"])
        wandb = run.tracking.wandb
        named: dict[str, Any] = {
            "run.name": trial_name(number, repeat),
            "run.output_dir": f"{job.folder}/{TRIALS}",
            "run.seed": run.run.seed + repeat,
            "run.resume": "auto",
        }
        if wandb is not None and wandb.group is None:
            named["tracking.wandb.group"] = job.config.run.name
        apart = PlacementGroupSchedulingStrategy(placement_group=None)  # type: ignore[arg-type]
        actor: Any = ray.remote(Runner)
        runner = actor.options(num_cpus=0, max_concurrency=2, scheduling_strategy=apart)
        self._runner = runner.remote(with_values(run, named), dict(job.datasets))
        self._outcome = self._runner.fit.remote()
        self._step = -1

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation, or for the end of the run."""
        while True:
            ended, _ = ray.wait([self._outcome], timeout=_LOOK_SECONDS)
            for line in ray.get(self._runner.evaluations.remote()):
                if line["step"] > self._step:  # a restarted run evaluates again
                    self._step = line["step"]
                    return line
            if ended:
                return self._final_line(ray.get(self._outcome))

    def _final_line(self, result: FitResult | None) -> dict[str, Any]:
        if result is None:
            raise RayrmError("the run was told to stop")
        return {**result.metrics, "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save nothing: the run's own folder has all that is needed."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load nothing: ``setup`` goes on with the run."""

    def cleanup(self) -> None:
        """Let the workers finish their step, and wait until they have gone."""
        deadline = time.monotonic() + _STOP_SECONDS
        ended: list[Any] = []
        while not ended and time.monotonic() < deadline:
            self._runner.stop.remote()
            ended, _ = ray.wait([self._outcome], timeout=1)
        ray.kill(self._runner)
