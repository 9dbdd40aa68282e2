"""What lies in ``cluster/`` is what Ray, Kubernetes, Docker and the shell take, and is not open."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER = Path(__file__).parents[1] / "cluster"
LAUNCHERS = sorted(CLUSTER.glob("*.yaml"))
PODS = sorted((CLUSTER / "kuberay").glob("*.yaml"))
KUBERNETES = "1.31"

PROVIDER_KEYS = {
    "aws": {
        "type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips",
        "security_group",
    },
    "gcp": {"type", "region", "availability_zone", "project_id", "cache_stopped_nodes"},
}  # fmt: skip
"""Of the cluster launcher's configuration reference, which Ray's own check does not look into."""

RAY_IO: dict[str, set[str]] = {
    "RayCluster": {
        "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions",
        "headGroupSpec", "headServiceAnnotations", "managedBy", "rayVersion", "suspend",
        "workerGroupSpecs",
    },
    "RayJob": {
        "activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy",
        "entrypoint", "entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "jobId",
        "managedBy", "metadata", "rayClusterSpec", "runtimeEnvYAML", "shutdownAfterJobFinishes",
        "submissionMode", "submitterConfig", "submitterPodTemplate", "suspend",
        "ttlSecondsAfterFinished",
    },
    "autoscalerOptions": {
        "env", "envFrom", "idleTimeoutSeconds", "image", "imagePullPolicy", "resources",
        "securityContext", "upscalingMode", "version", "volumeMounts",
    },
    "headGroupSpec": {
        "enableIngress", "headService", "rayStartParams", "serviceType", "template",
    },
    "workerGroupSpec": {
        "groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts",
        "rayStartParams", "replicas", "scaleStrategy", "suspend", "template",
    },
}  # fmt: skip
"""Fields of the specs in KubeRay's API reference (ray.io/v1; authOptions since KubeRay 1.5.1)."""


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_ray_up_takes_the_file(path: Path) -> None:
    config = load(path)
    validate_config(prepare_config(copy.deepcopy(config)))
    assert config["provider"].keys() <= PROVIDER_KEYS[config["provider"]["type"]]


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_workers_of_a_cloud_come_for_a_run_and_go_after_it(path: Path) -> None:
    config = load(path)
    nodes = config["available_node_types"]
    head = nodes.pop(config["head_node_type"])
    assert "GPU" not in head["resources"]
    assert all(node["min_workers"] == 0 for node in nodes.values())
    assert next(name for name, node in nodes.items() if "GPU" in node["resources"]) == "gpu_spot"
    assert config["idle_timeout_minutes"] <= 15


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_a_cluster_in_a_cloud_is_open_to_whoever_has_its_token_only(path: Path) -> None:
    config = load(path)
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    for start in (command for command in starts if "ray start" in command):
        assert "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]
    assert any(place.endswith(".ray/auth_token") for place in config["file_mounts"])


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_kuberay_knows_the_fields_and_kubernetes_takes_the_pods(path: Path) -> None:
    document = load(path)
    assert document["apiVersion"] == "ray.io/v1"
    assert document["spec"].keys() <= RAY_IO[document["kind"]]
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    assert spec.keys() <= RAY_IO["RayCluster"]
    assert spec["autoscalerOptions"].keys() <= RAY_IO["autoscalerOptions"]
    assert spec["headGroupSpec"].keys() <= RAY_IO["headGroupSpec"]
    for group in spec["workerGroupSpecs"]:
        assert group.keys() <= RAY_IO["workerGroupSpec"]
        assert group["minReplicas"] == 0
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_pods_are_no_root_bring_no_secret_and_want_a_token(path: Path) -> None:
    document = load(path)
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    assert spec["authOptions"] == {"mode": "token"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert group.get("serviceType", "ClusterIP") == "ClusterIP"
        for container in pod["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert all("value" not in variable for variable in container["env"])
            assert container["resources"]["limits"] == container["resources"]["requests"]


def test_the_pins_of_the_files_are_those_of_the_project() -> None:
    pins = dict(
        line.split("==")
        for line in (CLUSTER.parent / "constraints.txt").read_text().split()
        if "==" in line
    )
    for path in PODS:
        document = load(path)
        spec = document["spec"].get("rayClusterSpec", document["spec"])
        assert spec["rayVersion"] == pins["ray"]


@pytest.mark.parametrize(
    ("tool", "file"), [("hadolint", "Dockerfile"), ("shellcheck", "slurm.sbatch")]
)
def test_linters_find_nothing(tool: str, file: str) -> None:
    program = Path(sys.executable).with_name(tool)
    found = subprocess.run([program, CLUSTER / file], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")
