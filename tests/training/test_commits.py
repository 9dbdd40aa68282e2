"""Which checkpoints count, after whatever was killed while they were written."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rayrm.errors import CheckpointError
from rayrm.training.commits import complete_checkpoints, settle_checkpoints, state_file
from rayrm.training.storage import RunFolder

RECORD = "checkpoint_manager_snapshot.json"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def write_checkpoint(checkpoints: Path, name: str, *, step: int, ranks: int = 2) -> Path:
    folder = checkpoints / name
    folder.mkdir()
    progress = {"step": step, "world_size": ranks, "score": step / 10}
    (folder / "progress.json").write_text(json.dumps(progress))
    (folder / "schedule.json").write_text("{}")
    for rank in range(ranks):
        tensors = {"weight.a": np.full((2, 3), rank, dtype=np.float32)}
        save_file(tensors, folder / state_file(rank, ranks))
    return folder


def write_record(checkpoints: Path, *names: str) -> None:
    results = [{"checkpoint_dir_name": name, "metrics": {}} for name in names]
    (checkpoints / RECORD).write_text(json.dumps({"checkpoint_results": results}))


def settle(checkpoints: Path) -> list[int]:
    return [saved.step for saved in settle_checkpoints(RunFolder(str(checkpoints.parent)))]


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_a_run_without_checkpoints_has_nothing_to_settle(tmp_path: Path):
    folder = RunFolder(f"{tmp_path}/new")
    assert complete_checkpoints(folder) == []
    assert settle_checkpoints(folder) == ()
    assert list(tmp_path.iterdir()) == []


def test_what_is_on_record_and_whole_stays(checkpoints: Path):
    for number in (1, 2):
        write_checkpoint(checkpoints, f"checkpoint_{number}", step=number)
    write_record(checkpoints, "checkpoint_1", "checkpoint_2")
    before = names(checkpoints)
    assert settle(checkpoints) == []
    assert names(checkpoints) == before


def test_what_a_kill_left_is_removed(checkpoints: Path):
    write_checkpoint(checkpoints, "checkpoint_1", step=1)
    write_checkpoint(checkpoints, "checkpoint_2", step=2)  # in place, but not committed
    write_checkpoint(checkpoints, "part_checkpoint_3", step=3)
    write_record(checkpoints, "checkpoint_1")
    assert settle(checkpoints) == []
    assert names(checkpoints) == ["checkpoint_1", RECORD]


def test_a_first_checkpoint_that_is_whole_but_not_on_record_counts(checkpoints: Path):
    write_checkpoint(checkpoints, "checkpoint_1", step=3)
    assert settle(checkpoints) == [3]
    assert names(checkpoints) == ["checkpoint_1"]


def test_a_first_checkpoint_that_was_never_whole_is_removed(checkpoints: Path):
    folder = write_checkpoint(checkpoints, "checkpoint_1", step=3)
    (folder / state_file(1, 2)).unlink()
    assert settle(checkpoints) == []
    assert names(checkpoints) == []


@pytest.mark.parametrize("record", ["", '{"checkpoint_results": [{"chec', "[]", '{"a": 1}'])
def test_without_a_readable_record_the_newest_whole_checkpoint_counts(
    record: str, checkpoints: Path
):
    write_checkpoint(checkpoints, "checkpoint_a", step=10)
    write_checkpoint(checkpoints, "checkpoint_b", step=9)
    (checkpoints / RECORD).write_text(record)
    assert settle(checkpoints) == [9, 10]
    assert names(checkpoints) == ["checkpoint_a", "checkpoint_b"]  # Ray begins another record


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("file", [state_file(1, 2), "progress.json", "schedule.json"])
@pytest.mark.parametrize("harm", [cut, overwrite, Path.unlink, lambda path: path.write_bytes(b"")])
def test_with_a_broken_newest_checkpoint_the_one_before_counts_and_that_is_told(
    harm: Callable[[Path], None], file: str, checkpoints: Path, caplog: pytest.LogCaptureFixture
):
    write_checkpoint(checkpoints, "checkpoint_1", step=4)
    newest = write_checkpoint(checkpoints, "checkpoint_2", step=8)
    write_record(checkpoints, "checkpoint_1", "checkpoint_2")
    harm(newest / file)
    with caplog.at_level(logging.WARNING):
        assert settle(checkpoints) == [4]
    assert f"{newest} is not complete" in caplog.text
    assert "going on from step 4 instead" in caplog.text
    assert names(checkpoints) == ["checkpoint_1"]


def test_a_broken_newest_checkpoint_is_told_without_a_record_too(
    checkpoints: Path, caplog: pytest.LogCaptureFixture
):
    write_checkpoint(checkpoints, "checkpoint_1", step=4)
    newest = write_checkpoint(checkpoints, "checkpoint_2", step=8)
    (newest / "progress.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert settle(checkpoints) == [4]
    assert f"{newest} is not complete" in caplog.text
    assert "going on from step 4 instead" in caplog.text


def test_where_nothing_whole_is_left_nothing_is_touched_and_nothing_begins_anew(checkpoints: Path):
    folder = write_checkpoint(checkpoints, "checkpoint_1", step=4)
    write_record(checkpoints, "checkpoint_1")
    cut(folder / state_file(0, 2))
    before = names(checkpoints)
    with pytest.raises(CheckpointError, match=r"checkpoint_1 is not complete .*cut short.*remove"):
        settle(checkpoints)
    assert names(checkpoints) == before


def test_a_lost_record_without_checkpoints_is_an_error(checkpoints: Path):
    (checkpoints / RECORD).write_text("")
    with pytest.raises(CheckpointError, match=rf"{RECORD} cannot be read: no complete checkpoint"):
        settle(checkpoints)


def test_checkpoints_behind_a_url_are_judged_alike(tmp_path: Path):
    folder = RunFolder(f"fsspec+memory://{tmp_path}/run")
    local = tmp_path / "checkpoints"
    local.mkdir()
    write_checkpoint(local, "checkpoint_1", step=1, ranks=1)
    for name in ("progress.json", "schedule.json"):
        text = (local / "checkpoint_1" / name).read_text()
        folder.write_text(f"checkpoints/checkpoint_1/{name}", text)
    assert complete_checkpoints(folder) == []
    with folder.building("checkpoints/checkpoint_1") as place:
        for file in (local / "checkpoint_1").iterdir():
            Path(place, file.name).write_bytes(file.read_bytes())
    assert [saved.step for saved in complete_checkpoints(folder)] == [1]
    assert [saved.step for saved in settle_checkpoints(folder)] == [1]
