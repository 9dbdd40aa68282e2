"""Nodes that leave and join a running cluster: each row once an epoch, the steps of a fixed run."""

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.runs import (
    STEPS_AN_EPOCH,
    assert_each_row_once_an_epoch,
    config_for,
    rows_file,
    training_lines,
    wait_for,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.deepspeed,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

NUM_EPOCHS = 250
NUM_STEPS = NUM_EPOCHS * STEPS_AN_EPOCH


def config_of(base_model: Path, folder: Path, num_workers: Any) -> dict[str, Any]:
    config = config_for(base_model, folder, "run", num_train_epochs=NUM_EPOCHS, save_steps=20)
    config["train"]["learning_rate"] = 1e-5
    config["data"]["train"] = str(rows_file(folder.parent / "train.jsonl"))
    config["tracking"]["log_rows"] = True
    config["scaling"] = {
        "num_workers": num_workers,
        "max_failures": 5,
        "resources_per_worker": {"CPU": 1, "place": 1},
    }
    return config


def train_on_a_cluster(
    config: dict[str, Any], num_nodes: int, changes: list[tuple[int, str]]
) -> None:
    """Train on nodes with a worker's place each, of which one goes or comes at given steps."""
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "10"
    import ray
    from ray.cluster_utils import Cluster

    import rayrm

    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 150_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False)
    place = {"num_cpus": 1, "resources": {"place": 1}, "object_store_memory": 100_000_000}
    nodes = [cluster.add_node(**place) for _ in range(num_nodes)]
    failed: list[BaseException] = []

    def fit() -> None:
        try:
            rayrm.fit(config)
        except BaseException as error:
            failed.append(error)

    training = threading.Thread(target=fit)
    training.start()
    try:
        for step, change in changes:
            wait_for("at a step", step, Path(config["run"]["output_dir"], "run"))
            if change == "remove":
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            else:
                nodes.append(cluster.add_node(**place))  # from the main thread, as it wants
        training.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    if failed:
        raise failed[0]


def in_own_process(function: Any, *arguments: Any) -> None:
    """Call in a fresh process: a process holds one Ray at a time."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning) as pool:
        pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def undisturbed(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic") / "undisturbed"
    in_own_process(train_on_a_cluster, config_of(base_model, folder, 2), 2, [])
    return folder / "run"


@pytest.mark.parametrize(
    ("num_nodes", "changes", "num_workers"),
    [
        pytest.param(2, [(100, "remove")], {"min": 1, "max": 2}, id="a node is lost"),
        pytest.param(1, [(100, "add")], {"min": 1, "max": 2}, id="a node comes"),
        pytest.param(2, [(100, "remove"), (100, "add")], 2, id="a node is replaced"),
    ],
)
def test_a_run_goes_on_as_nodes_go_and_come(
    num_nodes: int,
    changes: list[tuple[int, str]],
    num_workers: Any,
    undisturbed: Path,
    base_model: Path,
) -> None:
    folder = undisturbed.parents[1] / f"{num_nodes}-{'-'.join(change for _, change in changes)}"
    scaling = num_workers if num_workers == 2 else {**num_workers, "resize_monitor_interval_s": 5}
    in_own_process(train_on_a_cluster, config_of(base_model, folder, scaling), num_nodes, changes)
    ours, theirs = training_lines(folder / "run"), training_lines(undisturbed)
    assert [line["step"] for line in ours] == list(range(1, NUM_STEPS + 1))
    for one, two in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5), one["step"]
    files = sorted(path.name for path in (folder / "run" / "rows").iterdir())
    assert files == ["worker-0.jsonl", "worker-1.jsonl"]
    assert_each_row_once_an_epoch(folder / "run", num_epochs=NUM_EPOCHS)
