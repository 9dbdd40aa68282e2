"""Whatever is killed, the run ends as the undisturbed one: bit by bit, each pair once an epoch."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayrm.training.commits import complete_checkpoints, state_file
from rayrm.training.storage import RunFolder
from tests.runs import (
    NUM_PAIRS,
    STEPS_AN_EPOCH,
    actors_of,
    assert_each_row_once_an_epoch,
    config_for,
    rows_file,
    training_lines,
    wait_for,
)
from tests.wandb_file import read_wandb_file

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(600)]

NUM_EPOCHS = 6
NUM_STEPS = NUM_EPOCHS * STEPS_AN_EPOCH
VICTIMS = ("RayTrainWorker", "all RayTrainWorkers", "FeederActor", "TrainController", "driver")
MOMENTS = ("at a step", "during a checkpoint", "at an epoch's last step")
Kill = tuple[str, str, int]
"""Who is killed, when, and the step from which on."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rows_file(tmp_path_factory.mktemp("rows") / "train.jsonl")


def config_of(base_model: Path, rows: Path, folder: Path, *, workers: int = 2) -> dict[str, Any]:
    config = config_for(base_model, folder, "run", num_train_epochs=NUM_EPOCHS, save_steps=3)
    config["data"]["train"] = str(rows)
    config["tracking"]["log_rows"] = True
    config["scaling"] = {"num_workers": workers, "max_failures": 20}
    return config


@pytest.fixture(scope="module")
def undisturbed(
    ray_session: None, base_model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run on two workers."""
    import rayrm

    folder = tmp_path_factory.mktemp("undisturbed")
    return Path(rayrm.fit(config_of(base_model, rows, folder)).run_dir)


def assert_same_steps(run_dir: Path, expected: Path) -> None:
    """Each step once and in order, with the numbers of the expected run."""
    ours, theirs = training_lines(run_dir), training_lines(expected)
    assert [line["step"] for line in ours] == list(range(1, NUM_STEPS + 1))
    for one, two in zip(ours, theirs, strict=True):
        for name in ("loss", "accuracy", "margin", "min_reward", "max_reward", "num_tokens"):
            assert one[name] == pytest.approx(two[name], abs=1e-5), (one["step"], name)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    told = json.loads((run_dir / "result.json").read_text())
    assert told["pairs"] == NUM_EPOCHS * NUM_PAIRS
    assert_each_row_once_an_epoch(run_dir, num_epochs=NUM_EPOCHS)


def weights_of(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def test_one_worker_takes_the_steps_of_two(
    undisturbed: Path, base_model: Path, rows: Path, tmp_path: Path
) -> None:
    import rayrm

    config = config_of(base_model, rows, tmp_path, workers=1)
    config["train"]["max_tokens_per_micro_batch"] = 128  # and cuts its shares differently
    run_dir = Path(rayrm.fit(config).run_dir)
    assert_same_steps(run_dir, undisturbed)
    lines = training_lines(run_dir)
    assert [line["loss"] for line in lines[:4]] != [line["loss"] for line in lines[4:8]]


def kills_of(seed: int) -> list[Kill]:
    """Draw two kills; those of the first seeds, which always run, are chosen."""
    if seed == 0:
        return [("FeederActor", "at a step", 5), ("RayTrainWorker", "at an epoch's last step", 12)]
    if seed == 1:
        return [
            ("all RayTrainWorkers", "during a checkpoint", 6),
            ("driver", "at a step", 17),
            ("TrainController", "at a step", 20),
        ]
    rng = random.Random(seed)
    first, second = sorted(rng.sample(range(1, NUM_STEPS - 3), 2))
    return [(rng.choice(VICTIMS), rng.choice(MOMENTS), step) for step in (first, second)]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 22))]
)
def test_a_run_of_which_processes_are_killed_ends_as_the_undisturbed_one(
    seed: int, undisturbed: Path, base_model: Path, rows: Path, tmp_path: Path
) -> None:
    import rayrm

    config = config_of(base_model, rows, tmp_path)
    config["tracking"]["wandb"] = {"mode": "offline"}
    run_dir = tmp_path / "run"
    kills = kills_of(seed)
    while any(victim == "driver" for victim, _, _ in kills):
        before = next(i for i, (victim, _, _) in enumerate(kills) if victim == "driver")
        kill_while_a_driver_runs(kills[: before + 1], config, tmp_path)
        kills = kills[before + 1 :]
    with ThreadPoolExecutor() as pool:
        killing = pool.submit(kill_one_after_the_other, kills, run_dir, psutil.Process())
        rayrm.fit(config)
        killing.result()
    assert_same_steps(run_dir, undisturbed)
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert_one_wandb_run(run_dir)
    assert_checkpoints_are_complete(run_dir)
    if seed == 0:  # once, for the worker: of the feeder nobody heard
        assert json.loads((run_dir / "result.json").read_text())["resumed"] == 1


def kill_one_after_the_other(kills: list[Kill], run_dir: Path, driver: psutil.Process) -> None:
    """Kill what belongs to a driver, each once its moment has come."""
    for victim, moment, step in kills:
        wait_for(moment, step, run_dir)
        if victim == "driver":
            driver.kill()
            continue
        actors = actors_of(driver, victim.removeprefix("all ").removesuffix("s"))
        for actor in actors if victim.startswith("all") else actors[-1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                actor.kill()


def kill_while_a_driver_runs(kills: list[Kill], config: dict[str, Any], folder: Path) -> None:
    """Run the command in a process of its own, which the last kill ends with all of its Ray."""
    file = folder / "run.yaml"
    file.write_text(json.dumps(config))
    driver = subprocess.Popen(
        [sys.executable, "-m", "rayrm.train", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    try:
        kill_one_after_the_other(kills[:-1], folder / "run", psutil.Process(driver.pid))
        wait_for(kills[-1][1], kills[-1][2], folder / "run")
        workers = actors_of(psutil.Process(driver.pid), "RayTrainWorker")
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert not (folder / "run" / "result.json").exists()


def assert_one_wandb_run(run_dir: Path) -> None:
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    _, history = read_wandb_file(file)
    steps = [row["_step"] for row in history if "loss" in row]
    assert steps == list(range(1, NUM_STEPS + 1))


def assert_checkpoints_are_complete(run_dir: Path) -> None:
    complete = complete_checkpoints(RunFolder(str(run_dir)))
    folders = [path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir()]
    assert sorted(saved.name for saved in complete) == sorted(folders)
    assert [saved.step for saved in complete][-1:] == [NUM_STEPS]


def test_a_run_whose_driver_was_killed_goes_on_with_another_number_of_workers(
    undisturbed: Path, base_model: Path, rows: Path, tmp_path: Path
) -> None:
    import rayrm

    config = config_of(base_model, rows, tmp_path)
    kill_while_a_driver_runs([("driver", "at a step", 8)], config, tmp_path)
    config["scaling"]["num_workers"] = 1
    run_dir = Path(rayrm.fit(config).run_dir)
    assert_same_steps(run_dir, undisturbed)
    assert json.loads((run_dir / "result.json").read_text())["resumed"] == 1


def unfinished_copy(
    undisturbed: Path, base_model: Path, rows: Path, folder: Path
) -> dict[str, Any]:
    """Copy a run without its result, as if it had been stopped, and return its configuration."""
    shutil.copytree(undisturbed, folder / "run")
    (folder / "run" / "result.json").unlink()
    recorded = json.loads((folder / "run" / "config.json").read_text())
    recorded["data"]["train"][0]["path"] = str(rows)
    recorded["run"]["output_dir"] = str(folder)
    (folder / "run" / "config.json").write_text(json.dumps(recorded))
    return config_of(base_model, rows, folder)


def test_rows_that_changed_since_the_first_start_are_refused(
    undisturbed: Path, base_model: Path, rows: Path, tmp_path: Path
) -> None:
    import rayrm

    other = tmp_path / "train.jsonl"
    other.write_text(rows.read_text().replace("The answer is 3", "The answer is 4"))
    config = unfinished_copy(undisturbed, base_model, other, tmp_path)
    with pytest.raises(rayrm.DataError, match=r"^data\.train: train has changed since this run"):
        rayrm.fit(config)


@pytest.mark.slow
def test_with_a_broken_newest_checkpoint_the_run_goes_on_from_the_one_before(
    undisturbed: Path, base_model: Path, rows: Path, tmp_path: Path
) -> None:
    import rayrm

    config = unfinished_copy(undisturbed, base_model, rows, tmp_path)
    newest = complete_checkpoints(RunFolder(str(tmp_path / "run")))[-1]
    state = tmp_path / "run" / "checkpoints" / newest.name / state_file(1, 2)
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    run_dir = Path(rayrm.fit(config).run_dir)
    assert_same_steps(run_dir, undisturbed)
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert_checkpoints_are_complete(run_dir)
