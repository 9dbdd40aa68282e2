"""Whatever is killed, the run ends as the undisturbed one: bit by bit, each pair once an epoch."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.test_fit_workers import NUM_PAIRS, config_for, text_rows, training_lines

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(600)]

NUM_EPOCHS = 6
NUM_STEPS = NUM_EPOCHS * 4  # 13 pairs, four a step: a tail of one
KILLED: tuple[str, ...] = (
    "RayTrainWorker",
    "all RayTrainWorkers",
    "FeederActor",
    "TrainController",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in text_rows(NUM_PAIRS)))
    return path


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
    assert_each_row_once_an_epoch(run_dir)


def assert_each_row_once_an_epoch(run_dir: Path) -> None:
    """Count what the workers noted themselves."""
    trained: Counter[tuple[int, int]] = Counter()
    for file in (run_dir / "rows").glob("worker-*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            epoch = (line["step"] - 1) * NUM_EPOCHS // NUM_STEPS
            trained.update((epoch, row) for _, row in line["rows"])
    expected = [(epoch, row) for epoch in range(NUM_EPOCHS) for row in range(NUM_PAIRS)]
    assert trained == Counter(expected)


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


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_a_run_of_which_actors_are_killed_ends_as_the_undisturbed_one(
    seed: int, undisturbed: Path, base_model: Path, rows: Path, tmp_path: Path
) -> None:
    import rayrm

    rng = random.Random(seed)
    victims = ["FeederActor", "RayTrainWorker"] if seed == 0 else rng.sample(KILLED, 2)
    at = sorted(rng.sample(range(2, NUM_STEPS - 2), 2))
    metrics = tmp_path / "run" / "metrics.jsonl"
    with ThreadPoolExecutor() as pool:
        killing = pool.submit(kill_one_after_the_other, victims, at, metrics)
        run_dir = Path(rayrm.fit(config_of(base_model, rows, tmp_path)).run_dir)
        killing.result()
    assert_same_steps(run_dir, undisturbed)
    assert weights_of(run_dir) == weights_of(undisturbed)
    if seed == 0:  # once, for the worker: of the feeder nobody heard
        assert json.loads((run_dir / "result.json").read_text())["resumed"] == 1


def kill_one_after_the_other(victims: list[str], at: list[int], metrics: Path) -> None:
    """Kill actors of this process's Ray, each once a line of metrics for its step is there."""
    for name, step in zip(victims, at, strict=True):
        wait_for_line(metrics, step)
        actors = actors_of(psutil.Process(), name.removeprefix("all ").removesuffix("s"))
        assert actors, name
        for actor in actors if name.startswith("all") else actors[-1:]:
            os.kill(actor.pid, signal.SIGKILL)


def actors_of(driver: psutil.Process, name: str) -> list[psutil.Process]:
    """Return the processes of a driver's Ray that run actors of this name."""
    children = driver.children(recursive=True)
    return [process for process in children if name in " ".join(process.cmdline())]


def wait_for_line(metrics: Path, number: int) -> None:
    """Wait until so many lines are there; a busy machine takes minutes to start a second Ray."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= number:
            return
        time.sleep(0.01)
    raise TimeoutError(f"{metrics} has no line {number}")


def test_a_run_whose_driver_was_killed_goes_on_with_another_number_of_workers(
    undisturbed: Path, base_model: Path, rows: Path, tmp_path: Path
) -> None:
    import rayrm

    config = config_of(base_model, rows, tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config))
    driver = subprocess.Popen(
        [sys.executable, "-m", "rayrm.train", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    try:
        wait_for_line(tmp_path / "run" / "metrics.jsonl", 8)
        workers = actors_of(psutil.Process(driver.pid), "RayTrainWorker")
    finally:
        driver.kill()
        driver.wait()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert not (tmp_path / "run" / "result.json").exists()
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
def test_a_checkpoint_that_was_cut_short_is_named_and_nothing_else_is_touched(
    undisturbed: Path, base_model: Path, rows: Path, tmp_path: Path
) -> None:
    import rayrm

    config = unfinished_copy(undisturbed, base_model, rows, tmp_path)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("checkpoint_2*"))
    assert len(checkpoints) == 2
    for number in range(2):
        state = checkpoints[-1] / f"state-{number:05d}-of-00002.safetensors"
        state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    with pytest.raises(rayrm.CheckpointError, match=rf"{checkpoints[-1].name}: cannot be read"):
        rayrm.fit(config)
    assert sorted((tmp_path / "run" / "checkpoints").glob("checkpoint_2*")) == checkpoints
