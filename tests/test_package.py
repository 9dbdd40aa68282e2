import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import rayrm
import rayrm.errors

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("module", ["rayrm", "rayrm.config.loader", "rayrm.cli", "rayrm.train"])
def test_importing_loads_nothing_heavy(module: str):
    heavy = ("torch", "ray", "transformers", "datasets", "accelerate", "deepspeed", "peft", "wandb")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "[]\n", result.stderr


def test_every_public_name_is_there():
    assert sorted(rayrm.__all__) == rayrm.__all__
    for name in rayrm.__all__:
        assert getattr(rayrm, name).__name__ == name
    assert set(rayrm.__all__) <= set(dir(rayrm))


def test_every_error_is_public_and_has_one_base():
    ours = {name for name, found in vars(rayrm.errors).items() if isinstance(found, type)}
    assert ours <= set(rayrm.__all__)
    assert all(issubclass(getattr(rayrm, name), rayrm.RayrmError) for name in ours)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'fti'"):
        _ = rayrm.fti


def test_the_installed_version_is_the_one_of_the_package():
    assert PROJECT["project"]["dynamic"] == ["version"]
    try:
        installed = version("rayrm")
    except PackageNotFoundError:
        pytest.skip("rayrm is not installed here")
    assert installed == rayrm.__version__


def test_a_wheel_carries_the_quickstart():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    (source,) = [given for given, to in included.items() if to == "rayrm/config/quickstart.yaml"]
    assert (ROOT / source).read_text() == (ROOT / "configs/quickstart.yaml").read_text()


def test_every_tested_dependency_is_pinned():
    pins = re.findall(r"^([\w.-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {normal(name) for name in pins}
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"], *extras["test"], *extras["bench"]]
    assert {normal(re.split(r"[\[<>=]", name)[0]) for name in needed} <= pinned


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
