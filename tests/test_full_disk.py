"""A disk without room, at three moments: where, what it takes, what stands; and nothing is lost."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrm.training.commits import complete_checkpoints
from rayrm.training.storage import RunFolder
from tests.runs import config_for, rows_file, training_lines

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]

DISK_BYTES = 4_000_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def config_of(base_model: Path, disk: Path, *, free: int, **train: Any) -> dict[str, Any]:
    """A run on a disk with so many bytes free."""
    (disk / "filler").write_bytes(b"." * (DISK_BYTES - free))
    config = config_for(base_model, disk, "run", **train)
    config["data"]["train"] = str(rows_file(disk.parent / "train.jsonl"))
    return config


def test_no_room_for_the_first_file(ray_session: None, base_model: Path, disk: Path) -> None:
    import rayrm

    config = config_of(base_model, disk, free=0)
    with pytest.raises(rayrm.RayrmError, match=rf"^{disk}/run/\S+: cannot be written, the disk is"):
        rayrm.fit(config)


@pytest.mark.slow
def test_no_room_for_a_second_checkpoint(ray_session: None, base_model: Path, disk: Path) -> None:
    import rayrm

    config = config_of(base_model, disk, free=700_000, save_steps=2, num_train_epochs=6)
    with pytest.raises(rayrm.CheckpointError, match=r"cannot be written .* takes 0\.4 MB; that of"):
        rayrm.fit(config)
    (saved,) = complete_checkpoints(RunFolder(f"{disk}/run"))
    (disk / "filler").unlink()
    run_dir = rayrm.fit(config).run_dir
    assert json.loads(Path(run_dir, "result.json").read_text())["resumed"] == 1
    assert [line["step"] for line in training_lines(run_dir)] == list(range(1, 25))
    assert saved.step == 2


@pytest.mark.slow
def test_no_room_for_the_model(ray_session: None, base_model: Path, disk: Path) -> None:
    import rayrm

    config = config_of(base_model, disk, free=100_000, save_steps=None)
    with pytest.raises(rayrm.RayrmError, match=rf"^{disk}/run/model: cannot be written, the disk"):
        rayrm.fit(config)
    assert not list((disk / "run").glob("model*"))
