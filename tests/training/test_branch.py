"""A run that begins where another was: its checkpoint, its metrics, a learning rate of its own."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rayrm.config.schema import TrainSection
from rayrm.errors import CheckpointError
from rayrm.training.branch import begin_branch, copy_progress
from rayrm.training.commits import complete_checkpoints, state_file
from rayrm.training.storage import RunFolder


def run_with_checkpoints(folder: Path, *steps: int) -> RunFolder:
    for step in steps:
        place = folder / "checkpoints" / f"checkpoint_{step}"
        place.mkdir(parents=True)
        progress = {"step": step, "world_size": 1, "score": 0.0}
        schedule = {"base_lrs": [1e-3, 2e-3], "_last_lr": [5e-4, 1e-3], "last_epoch": step}
        (place / "progress.json").write_text(json.dumps(progress))
        (place / "schedule.json").write_text(json.dumps(schedule))
        save_file({"weight.a": np.zeros(3, dtype=np.float32)}, place / state_file(0, 1))
    (folder / "metrics.jsonl").write_text('{"step": 2}\n')
    return RunFolder(str(folder))


def test_a_branch_has_the_checkpoint_and_the_metrics_and_its_own_learning_rate(tmp_path: Path):
    run = run_with_checkpoints(tmp_path / "run", 2, 4, 6)
    assert copy_progress(run, str(tmp_path / "copy"), step=4, seconds=1) == 4
    branch = RunFolder(str(tmp_path / "branch"))
    before, now = TrainSection(learning_rate=1e-3), TrainSection(learning_rate=2e-3)
    begin_branch(str(tmp_path / "copy"), branch, before=before, now=now)
    (saved,) = complete_checkpoints(branch)
    assert saved.step == 4
    schedule = branch.read_json(f"checkpoints/{saved.name}/schedule.json")
    assert schedule == {"base_lrs": [2e-3, 4e-3], "_last_lr": [1e-3, 2e-3], "last_epoch": 4}
    assert branch.read_lines("metrics.jsonl") == run.read_lines("metrics.jsonl")
    assert branch.read_json("config.json") is None  # it will be its own
    assert len(complete_checkpoints(run)) == 3


def test_a_branch_that_has_begun_stays_as_it_is(tmp_path: Path):
    run = run_with_checkpoints(tmp_path / "run", 4)
    branch = run_with_checkpoints(tmp_path / "branch", 6)
    copy_progress(run, str(tmp_path / "copy"), step=4, seconds=1)
    train = TrainSection()
    begin_branch(str(tmp_path / "copy"), branch, before=train, now=train)
    assert [saved.step for saved in complete_checkpoints(branch)] == [6]


def test_a_checkpoint_that_never_comes_is_told(tmp_path: Path):
    run = run_with_checkpoints(tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4 in 0\.3 seconds"):
        copy_progress(run, str(tmp_path / "copy"), step=4, seconds=0.3)
