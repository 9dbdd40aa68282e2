"""Runs as jobs of a cluster of ``ray start``: their logs, their ends, and second starts."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.job_submission import JobSubmissionClient

from tests.runs import config_for, rows_file, training_lines, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(600)]

PROJECT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Head:
    """A cluster of one node."""

    dashboard: str
    gcs: str

    def submit(self, *words: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        """Submit ``python -m`` with these words, as a user does from the project's folder."""
        command = [
            str(Path(sys.executable).with_name("ray")),
            "job",
            "submit",
            "--working-dir",
            ".",
        ]
        command += [] if wait else ["--no-wait"]
        return subprocess.run(
            [*command, "--", "python", "-m", *words],
            cwd=PROJECT,
            env=os.environ | {"RAY_API_SERVER_ADDRESS": self.dashboard},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def client(self) -> JobSubmissionClient:
        return JobSubmissionClient(self.dashboard)

    def last_job(self) -> Any:
        return max(self.client.list_jobs(), key=lambda job: job.start_time or 0)


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    gcs, dashboard, client, agent, metrics = free_ports(5)
    bin_folder = Path(sys.executable).parent
    process = psutil.Popen(
        [str(bin_folder / "ray"), "start", "--head", "--block", "--num-cpus=3",
         "--node-ip-address=127.0.0.1", f"--port={gcs}", "--dashboard-host=127.0.0.1",
         f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
         f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}",
         "--object-store-memory=200000000", "--disable-usage-stats"],
        env=os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{dashboard}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                JobSubmissionClient(url).list_jobs()
                break
            except (ConnectionError, RuntimeError):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.5)
        yield Head(url, f"127.0.0.1:{gcs}")
    finally:
        children = process.children(recursive=True)
        process.terminate()
        _, alive = psutil.wait_procs([process, *children], timeout=20)
        for one in alive:
            one.kill()


def job_file(base_model: Path, folder: Path, **train: Any) -> Path:
    config = config_for(base_model, folder, "job", **train)
    config["data"]["train"] = str(rows_file(folder / "rows.jsonl"))
    file = folder / "job.yaml"
    file.write_text(json.dumps(config))
    return file


def test_a_job_trains_and_its_log_tells_how_far_it_is(
    head: Head, base_model: Path, tmp_path: Path
) -> None:
    ended = head.submit("rayrm.train", str(job_file(base_model, tmp_path)))
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "step 8/8" in ended.stdout
    assert f"model: {tmp_path}/job/model" in ended.stdout
    assert head.last_job().driver_exit_code == 0


def test_a_wrong_configuration_ends_a_job_with_its_message_and_2(
    head: Head, base_model: Path, tmp_path: Path
) -> None:
    file = job_file(base_model, tmp_path)
    ended = head.submit("rayrm.train", str(file), "train.lerning_rate=1")
    assert ended.returncode != 0
    assert "train.lerning_rate: unknown key; did you mean learning_rate?" in ended.stdout
    assert head.last_job().driver_exit_code == 2


def test_a_job_that_is_stopped_leaves_a_checkpoint_from_which_a_second_goes_on(
    head: Head, base_model: Path, tmp_path: Path
) -> None:
    file = job_file(base_model, tmp_path, num_train_epochs=100, save_steps=None)
    head.submit("rayrm.train", str(file), wait=False)
    wait_for("at a step", 5, tmp_path / "job")
    job = head.last_job()
    head.client.stop_job(job.submission_id)
    deadline = time.monotonic() + 60
    while not head.client.get_job_status(job.submission_id).is_terminal():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert head.client.get_job_status(job.submission_id) == "STOPPED"
    saved = json.loads(next((tmp_path / "job").glob("checkpoints/*/progress.json")).read_text())
    assert saved["step"] >= 5
    ended = head.submit("rayrm.train", str(file))
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert f"going on from step {saved['step']}" in ended.stdout
    steps = [line["step"] for line in training_lines(tmp_path / "job")]
    assert steps == list(range(1, 401))


def test_a_sweep_runs_from_a_driver_of_that_cluster(
    head: Head, base_model: Path, tmp_path: Path
) -> None:
    config = config_for(base_model, tmp_path, "sweep", num_train_epochs=1, eval_steps=2)
    config["data"] |= {
        "train": str(rows_file(tmp_path / "rows.jsonl")),
        "eval": str(rows_file(tmp_path / "held_out.jsonl")),
    }
    rates = {"type": "grid", "values": [1e-3, 1e-4]}
    config["search"] = {"num_samples": 2, "space": {"train.learning_rate": rates}}
    code = f"import rayrm; print(list(rayrm.sweep({config!r}).trials.status))"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RAY_ADDRESS": head.gcs},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip() in ("['finished', 'finished']", "['finished', 'stopped']")
