import os
import tempfile
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from rayrm.errors import ConfigError
from rayrm.training.storage import RunFolder


@pytest.fixture(params=["local", "file URL", "another filesystem"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunFolder:
    """A run's folder at each kind of place; the other filesystem is in memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    schemes = {"local": "", "file URL": "file://", "another filesystem": "fsspec+memory://"}
    return RunFolder(f"{schemes[request.param]}{tmp_path}/runs/one")


def files(folder: RunFolder) -> list[str]:
    """All files below a run's folder, sorted."""
    filesystem, root = pafs.FileSystem.from_uri(folder.url)
    selector = pafs.FileSelector(root, recursive=True, allow_not_found=True)
    found = filesystem.get_file_info(selector)
    return sorted(x.path.removeprefix(f"{root}/") for x in found if x.type == pafs.FileType.File)


def test_opening_a_folder_creates_nothing(tmp_path: Path):
    folder = RunFolder(f"{tmp_path}/runs/one")
    assert folder.is_local
    assert not folder.exists("config.json")
    assert list(tmp_path.iterdir()) == []


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("runs/one")
    monkeypatch.chdir("/")
    folder.write_text("a", "b")
    assert (tmp_path / "runs" / "one" / "a").read_text() == "b"
    assert folder.path("a") == str(tmp_path / "runs" / "one" / "a")


def test_a_place_that_cannot_be_opened_is_a_config_error():
    with pytest.raises(ConfigError, match=r"^run\.output_dir: cannot open nothing://bucket/run \("):
        RunFolder("nothing://bucket/run")


def test_a_file_url_becomes_a_path_that_any_library_takes(tmp_path: Path):
    folder = RunFolder(f"file://{tmp_path}/a%20run/")
    folder.write_text("b", "c")
    assert Path(folder.path("b")).read_text() == "c"
    assert folder.path("b") == f"{tmp_path}/a run/b"


def test_what_was_written_is_there_for_the_next_who_opens(folder: RunFolder):
    folder.write_json("config.json", {"a": 1})
    assert RunFolder(folder.url).read_json("config.json") == {"a": 1}
    assert folder.path("config.json") == f"{folder.url}/config.json"


def test_json_comes_back_as_it_was(folder: RunFolder):
    value = {"a": [1, 2.5, None], "b": "ä\u2028"}
    assert folder.read_json("deep/result.json") is None
    folder.write_json("deep/result.json", value)
    assert folder.read_json("deep/result.json") == value
    folder.write_json("deep/result.json", {})
    assert folder.read_json("deep/result.json") == {}
    assert files(folder) == ["deep/result.json"]


def test_a_text_that_cannot_be_encoded_leaves_the_old_one(folder: RunFolder):
    folder.write_text("a", "old")
    with pytest.raises(UnicodeEncodeError):
        folder.write_text("a", "\ud800")
    assert files(folder) == ["a"]
    folder.write_json_lines("b.jsonl", [{"a": 1}, {"a": "ä"}])
    assert folder.read_lines("b.jsonl") == ['{"a": 1}', '{"a": "ä"}']


def test_entries_are_listed_and_deleted_by_name(folder: RunFolder):
    assert folder.entries("checkpoints") == []
    folder.write_text("checkpoints/b/a", "")
    folder.write_text("checkpoints/a.json", "{}")
    assert folder.entries("checkpoints") == ["a.json", "b"]
    for name in ("a.json", "b", "c"):
        folder.delete(f"checkpoints/{name}")
    assert folder.entries("checkpoints") == []


def test_a_folder_is_held_by_one_at_a_time(tmp_path: Path):
    one, other = RunFolder(str(tmp_path)), RunFolder(str(tmp_path))
    with one.held(), pytest.raises(ConfigError, match="is being trained by another process"):
        other.held().__enter__()
    with other.held():
        pass


def test_appended_lines_are_there_at_once_on_a_local_disk(tmp_path: Path):
    folder = RunFolder(str(tmp_path))
    folder.append_json("metrics.jsonl", {"step": 1})
    folder.append_json("metrics.jsonl", {"step": 2, "note": "ä"})
    written = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert written == '{"step": 1}\n{"step": 2, "note": "ä"}\n'


def test_appended_lines_are_put_in_place_by_sync(folder: RunFolder):
    folder.append_json("metrics.jsonl", {"step": 1})
    folder.sync()
    folder.append_json("metrics.jsonl", {"step": 2})
    folder.sync()
    assert folder.read_lines("metrics.jsonl") == ['{"step": 1}', '{"step": 2}']


def test_lines_after_a_checkpoint_are_cut(folder: RunFolder):
    for step in (1, 2, 3):
        folder.append_json("metrics.jsonl", {"step": step})
    folder.append_json("metrics.jsonl", {"note": "of no step"})
    folder.sync()
    folder.cut_lines("metrics.jsonl", after_step=2)
    folder.append_json("metrics.jsonl", {"step": 3, "again": True})
    folder.sync()
    assert folder.read_lines("metrics.jsonl") == [
        '{"step": 1}',
        '{"step": 2}',
        '{"note": "of no step"}',
        '{"step": 3, "again": true}',
    ]
    assert files(folder) == ["metrics.jsonl"]


@pytest.mark.parametrize("half", ['{"step": 2, "lo', '{"step": 2, "name": "\xc3', "{", "\n"])
def test_a_half_written_last_line_is_cut(tmp_path: Path, half: str):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + half.encode("latin-1"))
    folder = RunFolder(str(tmp_path))
    assert folder.read_lines("metrics.jsonl") == ['{"step": 1}']
    folder.cut_lines("metrics.jsonl", after_step=9)
    folder.append_json("metrics.jsonl", {"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_restart_from_the_beginning_cuts_all_lines(tmp_path: Path):
    folder = RunFolder(str(tmp_path))
    folder.append_json("metrics.jsonl", {"step": 1})
    folder.cut_lines("metrics.jsonl", after_step=0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_no_lines_are_cut_where_there_is_no_file(folder: RunFolder):
    folder.cut_lines("metrics.jsonl", after_step=0)
    assert folder.read_lines("metrics.jsonl") == []
    assert files(folder) == []


def build(folder: RunFolder, *names: str) -> None:
    with folder.building("model") as place:
        for name in names:
            os.makedirs(os.path.dirname(f"{place}/{name}"), exist_ok=True)
            Path(place, name).write_text(name)


def test_a_built_folder_takes_its_place_whole(folder: RunFolder):
    build(folder, "config.json", "base/weights")
    assert files(folder) == ["model/base/weights", "model/config.json"]


def test_a_built_folder_replaces_the_one_before(folder: RunFolder):
    build(folder, "config.json", "stale")
    build(folder, "config.json", "fresh")
    assert files(folder) == ["model/config.json", "model/fresh"]


def build_and_fail(folder: RunFolder, error: BaseException) -> None:
    with folder.building("model") as place:
        Path(place, "half").write_text("")
        raise error


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_a_build_that_fails_leaves_nothing(folder: RunFolder, error: BaseException):
    with pytest.raises(type(error)):
        build_and_fail(folder, error)
    assert files(folder) == []


def test_a_build_that_fails_leaves_the_one_before(folder: RunFolder):
    build(folder, "config.json")
    with pytest.raises(OSError, match="disk full"):
        build_and_fail(folder, OSError("disk full"))
    assert files(folder) == ["model/config.json"]


def test_what_a_killed_build_left_is_no_part_of_the_next(tmp_path: Path):
    for left in ("model.part", "model.old"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "half").touch()
    folder = RunFolder(str(tmp_path))
    build(folder, "config.json")
    assert files(folder) == ["model/config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_links_are_built_as_links(tmp_path: Path):
    (tmp_path / "weights").write_text("heavy")
    folder = RunFolder(str(tmp_path / "run"))
    with folder.building("model") as place:
        os.symlink(tmp_path / "weights", f"{place}/weights")
    assert os.path.islink(folder.local_path("model/weights"))
