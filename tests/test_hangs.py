"""What could wait for ever ends in an error that says who waited for what, or goes on by itself."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.runs import actors_of, config_for, rows_file, training_lines, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(600)]

MINUTES = 0.15
"""Patience of the runs that are held up here."""


def run_config(base_model: Path, folder: Path, **scaling: Any) -> dict[str, Any]:
    config = config_for(base_model, folder, "run", num_train_epochs=10, save_steps=2)
    config["data"]["train"] = str(rows_file(folder / "train.jsonl"))
    config["scaling"] = {"num_workers": 2, "timeout_minutes": MINUTES, **scaling}
    return config


@contextlib.contextmanager
def once_at_step(step: int, run_dir: Path, act: Callable[[], Any]) -> Iterator[None]:
    """Act once a run that is made in the block has come to a step."""

    def wait_and_act() -> None:
        wait_for("at a step", step, run_dir)
        act()

    acting = threading.Thread(target=wait_and_act)
    acting.start()
    try:
        yield
    finally:
        acting.join()


def freeze(name: str) -> None:
    actors_of(psutil.Process(), name)[-1].suspend()


def test_no_cpu_for_data_tasks_is_told_after_the_patience(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    @ray.remote(num_cpus=ray.cluster_resources()["CPU"])
    class Other:
        def is_there(self) -> bool:
            return True

    other: Any = Other.remote()
    assert ray.get(other.is_there.remote())
    config = run_config(
        base_model, tmp_path, timeout_minutes=0.03, resources_per_worker={"CPU": 0.1}
    )
    try:
        with pytest.raises(rayrm.RayrmError, match=r"^scaling: no 1 CPU was free for a data task"):
            rayrm.fit(config)
    finally:
        ray.kill(other)


def test_workers_that_cannot_be_placed_are_told_with_what_they_need(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    scaling: dict[str, Any] = {
        "timeout_minutes": 0.1,
        "resources_per_worker": {"CPU": 0.1, "moon": 1},
    }
    began = time.monotonic()
    with pytest.raises(rayrm.RayrmError, match=r"2 worker\(s\) x .*'moon': 1.* were not placed"):
        rayrm.fit(run_config(base_model, tmp_path, **scaling))
    assert time.monotonic() - began < 60  # and not a minute for each of max_failures


@pytest.mark.slow
def test_a_signal_while_workers_are_waited_for_ends_the_run(
    base_model: Path, tmp_path: Path
) -> None:
    asked = {"CPU": 0.1, "moon": 1}
    config = run_config(base_model, tmp_path, timeout_minutes=10, resources_per_worker=asked)
    code = f"import ray, rayrm; ray.init(address='local', num_cpus=2); rayrm.fit({config!r})"
    driver = psutil.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "run.json").is_file():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(5)
    assert driver.poll() is None
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(timeout=60) == 143


@pytest.mark.slow
def test_a_frozen_worker_is_replaced(ray_session: None, base_model: Path, tmp_path: Path) -> None:
    import rayrm

    config = run_config(base_model, tmp_path)
    with once_at_step(5, tmp_path / "run", lambda: freeze("RayTrainWorker")):
        run_dir = rayrm.fit(config).run_dir
    assert [line["step"] for line in training_lines(run_dir)] == list(range(1, 41))
    assert json.loads(Path(run_dir, "result.json").read_text())["resumed"] == 1


@pytest.mark.slow
def test_a_frozen_feeder_is_told_by_the_workers_that_wait(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    config = run_config(base_model, tmp_path)
    with (
        once_at_step(5, tmp_path / "run", lambda: freeze("FeederActor")),
        pytest.raises(rayrm.DataError, match=r"^data: worker \d waited 0.15 minutes for the rows"),
    ):
        rayrm.fit(config)


@pytest.mark.slow
def test_a_source_that_vanishes_in_the_middle_is_named(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    config = run_config(base_model, tmp_path)
    rows = tmp_path / "train.jsonl"
    with (
        once_at_step(5, tmp_path / "run", rows.unlink),
        pytest.raises(rayrm.DataError, match=rf"{rows}: cannot be read"),
    ):
        rayrm.fit(config)
    assert list((tmp_path / "run" / "checkpoints").glob("checkpoint_2*"))


@pytest.mark.slow
def test_one_rank_that_fails_while_the_other_waits_is_named(
    ray_session: None, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import rayrm

    config = run_config(base_model, tmp_path, max_failures=1)
    config["tracking"]["log_rows"] = True
    (tmp_path / "run" / "rows" / "worker-1.jsonl").mkdir(parents=True)  # only rank 1 writes to it
    with pytest.raises(rayrm.RayrmError, match=r"Rank 1[\s\S]*worker-1\.jsonl' is a directory"):
        rayrm.fit(config)
    assert "worker 1 stopped: OSError: Cannot open for reading" in capsys.readouterr().err


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run(
    ray_session: None, base_model: Path, tmp_path: Path
) -> None:
    import rayrm

    config = run_config(base_model, tmp_path, max_failures=1)
    done = threading.Event()

    def kill_again_and_again() -> None:
        wait_for("at a step", 2, tmp_path / "run")
        while not done.wait(0.2):
            for actor in actors_of(psutil.Process(), "RayTrainWorker"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    actor.kill()

    killing = threading.Thread(target=kill_again_and_again)
    killing.start()
    try:
        with pytest.raises(rayrm.RayrmError, match=r"^training failed: "):
            rayrm.fit(config)
    finally:
        done.set()
        killing.join()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_run_starts_ends_it(
    number: signal.Signals, base_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run_config(base_model, tmp_path)))
    command = subprocess.Popen(
        [sys.executable, "-m", "rayrm.train", str(file)],
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    deadline = time.monotonic() + 120
    while not psutil.Process(command.pid).children(recursive=True):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = psutil.Process(command.pid).children(recursive=True)
    command.send_signal(number)
    assert command.wait(timeout=60) == 128 + number
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive


def test_a_cluster_that_does_not_answer_is_told(base_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run_config(base_model, tmp_path)))
    ran = subprocess.run(
        [sys.executable, "-m", "rayrm.train", str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
        timeout=60,
    )
    assert ran.returncode == 2
    assert "error: RAY_ADDRESS: nothing answers at 127.0.0.1:1" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_second_start_beside_the_first_is_refused(base_model: Path, tmp_path: Path) -> None:
    import rayrm
    from rayrm.training.storage import RunFolder

    folder = RunFolder(f"{tmp_path}/run")
    folder.create()
    with (
        folder.held(),
        pytest.raises(rayrm.ConfigError, match="is being trained by another process"),
    ):
        rayrm.fit(run_config(base_model, tmp_path))
