import subprocess
import sys
from typing import Any

import pytest

from rayrm.cluster import Resources, choose_resources
from rayrm.config.schema import ScalingSection
from rayrm.errors import ConfigError


def choose(cpus: float, *, free: float | None = None, gpus: float = 0, **scaling: Any) -> Resources:
    """What a run asks for on a cluster of so many CPUs, all of them free unless told."""
    cluster = {"CPU": cpus, "memory": 1e9} | ({"GPU": gpus} if gpus else {})
    return choose_resources(
        ScalingSection(**scaling), cluster, cluster | {"CPU": cpus if free is None else free}
    )


@pytest.mark.parametrize(
    ("cpus", "workers", "per_worker", "per_task"),
    [
        pytest.param(1, 1, 0.5, 0.5, id="one CPU is shared by a worker and a data task"),
        pytest.param(1, 2, 0.25, 0.5, id="or by two workers and one"),
        pytest.param(2, 1, 1.0, 1.0, id="two CPUs have a place for each"),
        pytest.param(2, 3, 0.33, 1.0, id="three workers share the other"),
        pytest.param(4, 1, 1.0, 1.0, id="one worker asks for one CPU"),
        pytest.param(4, 4, 0.75, 1.0, id="four workers leave a CPU to a data task"),
        pytest.param(64, 8, 1.0, 1.0, id="on many CPUs each has its own"),
        pytest.param(64, 64, 0.98, 1.0, id="sixty-four workers leave one of as many"),
    ],
)
def test_workers_leave_a_data_task_its_place(
    cpus: float, workers: int, per_worker: float, per_task: float
):
    chosen = choose(cpus, num_workers=workers)
    assert chosen == Resources(workers, False, {"CPU": per_worker}, per_task)
    assert workers * per_worker + per_task <= cpus


@pytest.mark.parametrize(
    ("cpus", "free", "per_worker", "per_task"),
    [
        pytest.param(4, 3, 1.0, 1.0, id="a caller in a task of one CPU"),
        pytest.param(2, 1, 0.25, 0.5, id="half of what there is"),
        pytest.param(1, 0, 0.12, 0.25, id="all of it, which a caller that waits gives back"),
    ],
)
def test_what_the_caller_holds_is_not_asked_for(
    cpus: float, free: float, per_worker: float, per_task: float
):
    chosen = choose(cpus, free=free, num_workers=2)
    assert (chosen.per_worker, chosen.cpus_per_task) == ({"CPU": per_worker}, per_task)


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        ({"use_gpu": True}, "scaling.use_gpu: true, but this machine has no GPU"),
        (
            {"num_workers": 3, "resources_per_worker": {"CPU": 0.1, "moon": 1}},
            "scaling.resources_per_worker: 3 workers x 1 moon are more than this machine has (0)",
        ),
        ({"num_workers": 41}, "scaling.num_workers: 41 workers on 4 CPUs would each have less"),
    ],
)
def test_what_this_machine_will_never_have_is_refused_at_once(scaling: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as caught:
        choose_resources(ScalingSection(**scaling), {"CPU": 4}, {"CPU": 4}, may_grow=False)
    assert str(caught.value).startswith(told)


def test_a_cluster_that_grows_is_asked_for_what_it_does_not_have_yet():
    assert choose(4, use_gpu=True).use_gpu
    assert choose(4, resources_per_worker={"CPU": 16}).per_worker == {"CPU": 16}
    assert choose(4, num_workers=41, resources_per_worker={"CPU": 1}).num_workers == 41


def test_a_range_of_workers_is_asked_for_as_it_is_with_room_for_the_most():
    chosen = choose(4, num_workers={"min": 2, "max": 6})
    assert chosen == Resources((2, 6), False, {"CPU": 0.5}, 1.0)
    assert choose(4, num_workers={"min": 3, "max": 3}).num_workers == 3


def test_gpus_have_to_do_for_the_fewest_workers():
    elastic = {"min": 2, "max": 8}
    assert choose(16, gpus=2, num_workers=elastic).use_gpu
    assert not choose(16, gpus=1, num_workers=elastic).use_gpu
    with pytest.raises(ConfigError, match="2 workers need 2 GPUs, but the cluster has 1"):
        choose(16, gpus=1, num_workers=elastic, use_gpu=True)


def test_however_little_is_free_each_worker_asks_for_something():
    assert choose(20, free=0, num_workers=100).per_worker == {"CPU": 0.01}


@pytest.mark.parametrize(
    ("gpus", "workers", "use_gpu", "used"),
    [
        (0, 1, "auto", False),
        (1, 1, "auto", True),
        (8, 4, "auto", True),
        (1, 2, "auto", False),
        (4, 4, True, True),
        (4, 4, False, False),
        pytest.param(0, 2, True, True, id="an autoscaler may bring them"),
    ],
)
def test_gpus_are_used_where_there_is_one_a_worker(
    gpus: float, workers: int, use_gpu: Any, used: bool
):
    chosen = choose(16, gpus=gpus, num_workers=workers, use_gpu=use_gpu)
    assert chosen.use_gpu is used
    assert chosen.per_worker == {"CPU": 1.0} | ({"GPU": 1.0} if used else {})


def test_too_few_gpus_are_an_error_with_their_number():
    with pytest.raises(ConfigError, match=r"4 workers need 4 GPUs, but the cluster has 2; lower"):
        choose(16, gpus=2, num_workers=4, use_gpu=True)


def test_given_resources_are_taken_as_they_are():
    chosen = choose(8, num_workers=2, resources_per_worker={"CPU": 3, "special": 0.5})
    assert chosen == Resources(2, False, {"CPU": 3.0, "special": 0.5}, 1.0)


@pytest.mark.parametrize(("cpus", "workers", "each"), [(4, 2, 2), (4, 1, 3.5), (1, 1, 1)])
def test_given_resources_that_leave_no_room_are_an_error_with_the_arithmetic(
    cpus: float, workers: int, each: float
):
    told = (
        rf"{workers} workers x {each:g} CPU \+ 1 CPU for data tasks = {workers * each + 1:g} CPUs, "
        rf"but the Ray cluster has {cpus:g}; lower scaling\.resources_per_worker"
    )
    with pytest.raises(ConfigError, match=told):
        choose(cpus, num_workers=workers, resources_per_worker={"CPU": each})


def test_more_than_there_is_may_be_asked_of_an_autoscaler():
    assert choose(4, num_workers=4, resources_per_worker={"CPU": 4}).per_worker == {"CPU": 4.0}


def test_given_gpus_are_used():
    chosen = choose(8, gpus=2, num_workers=2, resources_per_worker={"CPU": 1, "GPU": 1})
    assert chosen == Resources(2, True, {"CPU": 1.0, "GPU": 1.0}, 1.0)
    assert choose(8, num_workers=2, resources_per_worker={"GPU": 0.5}).use_gpu
    assert not choose(8, gpus=2, num_workers=2, resources_per_worker={"CPU": 1, "GPU": 0}).use_gpu


IN_A_GROUP_APART = """
import os, subprocess
from rayrm.cluster import children_in_own_group

own = os.getpgid(0)
with children_in_own_group():
    child = subprocess.Popen(["sleep", "60"])
assert os.getpgid(0) == own
apart = os.getpgid(child.pid) != own
child.kill()
print(apart, child.wait())
"""


@pytest.mark.parametrize(
    ("options", "is_apart"),
    [
        pytest.param({}, True, id="in the group of another"),
        pytest.param({"process_group": 0}, True, id="leader of a group, as shells start it"),
        pytest.param(
            {"start_new_session": True}, False, id="leader of a session, which has to stay"
        ),
    ],
)
def test_a_signal_to_our_group_does_not_reach_what_is_started_apart(
    options: dict[str, Any], is_apart: bool
):
    told = subprocess.run(
        [sys.executable, "-c", IN_A_GROUP_APART],
        capture_output=True,
        text=True,
        check=True,
        **options,
    )
    assert told.stdout == f"{is_apart} -9\n"
