"""One trial of a sweep: a run of ``fit`` that Ray Tune asks for its evaluations.

Tune has a new process for each trial: what trains is loaded by the runners, which stay.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import tune

from rayrm.config.loader import with_values
from rayrm.config.schema import SweepConfig, TrainSection
from rayrm.config.space import trial_config
from rayrm.errors import RayrmError
from rayrm.training.branch import begin_branch, copy_progress
from rayrm.training.storage import RunFolder

if TYPE_CHECKING:
    from rayrm.data.intake import Rows
    from rayrm.launch import FitResult

TRIALS = "trials"
"""Folder of the trials' runs in the sweep's folder."""
RUN = "run"
"""In every line of a trial: the name of its run."""
FINISHED = "finished"
"""In the last line of a trial that was trained to its end; Tune's ``done`` is also a stop's."""
_LOOK_SECONDS = 0.5
_CHECKPOINT_SECONDS = 120
_ORIGIN = "origin.json"
_STOP_SECONDS = 120
"""So long a trial may take to finish a step and save it."""


@dataclass(frozen=True)
class SweepJob:
    """What every trial is told."""

    config: SweepConfig
    folder: str
    """The sweep's folder."""
    datasets: Mapping[str, Any]
    runners: Any
    """Actor of ``Runners``."""
    rows: "Rows | None"
    """Those of all trials, tokenized; null where each trial has its own."""


def trial_name(number: int, repeat: int) -> str:
    """Return the name of a trial's run."""
    return f"{number:03d}-{repeat}"


class Trial(tune.Trainable):
    """Trains one drawn configuration; a step of Tune is an evaluation.

    That this is a class lets a scheduler's stop reach the run: its workers finish their step and
    free what they hold, where Tune alone would only end the trial's process. The run starts with
    the first step, since only then Tune has said where the trial begins.
    """

    def setup(self, config: dict[str, Any], *, job: SweepJob) -> None:  # type: ignore[override]
        """Take the drawn values."""
        self._job = job
        self._repeat = config["repeat"]
        self._config = trial_config(job.config, config["values"])
        self._run_name: str = self.trial_name
        self._runner: Any = None
        self._outcome: Any = None
        self._step = -1

    def step(self) -> dict[str, Any]:
        """Wait for the next evaluation, or for the end of the run."""
        runner = self._runner = self._runner or self._start()
        while True:
            ended, _ = ray.wait([self._outcome], timeout=_LOOK_SECONDS)
            for line in ray.get(runner.evaluations.remote()):
                if line["step"] > self._step:  # a restarted run evaluates again
                    self._step = line["step"]
                    return {**line, RUN: self._run_name}
            if ended:
                return self._final_line(ray.get(self._outcome))

    def _start(self) -> Any:
        """Start the run; one that was started before goes on from its last checkpoint."""
        run, job = self._config, self._job
        wandb = run.tracking.wandb
        named: dict[str, Any] = {
            "run.name": self._run_name,
            "run.output_dir": f"{job.folder}/{TRIALS}",
            "run.seed": run.run.seed + self._repeat,
            "run.resume": "auto",
        }
        if wandb is not None and wandb.group is None:
            named["tracking.wandb.group"] = job.config.run.name
        if job.config.search.scheduler == "pbt":  # trials go on from one another's evaluations
            named["train.save_steps"] = run.train.eval_steps
        runner: Any = ray.get(job.runners.take.remote())
        self._outcome = runner.fit.remote(with_values(run, named), dict(job.datasets), job.rows)
        return runner

    def _final_line(self, result: "FitResult | None") -> dict[str, Any]:
        if result is None:
            raise RayrmError("the run was told to stop")
        return {**result.metrics, RUN: self._run_name, FINISHED: True, "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy what another trial needs to go on from this one's last evaluation."""
        step = copy_progress(
            self._folder, checkpoint_dir, step=self._step, seconds=_CHECKPOINT_SECONDS
        )
        train = self._config.train.model_dump(mode="json")
        origin = {"trial": self.trial_name, "step": step, "train": train}
        RunFolder(checkpoint_dir).write_json(_ORIGIN, origin)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Begin as a new run where another trial was; the folder of one's own needs nothing."""
        origin = RunFolder(checkpoint).read_json(_ORIGIN)
        if origin["trial"] == self.trial_name:
            return
        self._run_name = f"{self.trial_name}-from-{origin['trial']}-at-{origin['step']}"
        before = TrainSection.model_validate(origin["train"])
        begin_branch(checkpoint, self._folder, before=before, now=self._config.train)

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(f"{self._job.folder}/{TRIALS}/{self._run_name}")

    def cleanup(self) -> None:
        """Let the workers finish their step, and wait until they have gone."""
        if self._runner is None:
            return
        deadline = time.monotonic() + _STOP_SECONDS
        ended: list[Any] = []
        while not ended and time.monotonic() < deadline:
            self._runner.stop.remote()
            ended, _ = ray.wait([self._outcome], timeout=1)
        ray.get(self._job.runners.give_back.remote(self._runner, is_free=bool(ended)))
