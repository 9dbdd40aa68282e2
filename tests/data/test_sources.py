import bz2
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrm.data.sources import Kind, RowFile, list_files, read_rows
from rayrm.errors import ConfigError, DataError

ROW: dict[str, Any] = {"chosen": "a", "rejected": "b"}
LINE = b'{"chosen": "a", "rejected": "b"}'


def read(path: Path | str, kind: Kind) -> list[tuple[int, bytes]]:
    return list(read_rows(RowFile("label", str(path), kind)))


def lines_of(folder: Path, content: bytes, name: str = "rows.jsonl") -> list[tuple[int, bytes]]:
    (folder / name).write_bytes(content)
    return read(folder / name, "lines")


def files_of(path: Path | str) -> list[str]:
    """The files that a source stands for."""
    return [file.path for file in list_files(str(path), label="label", field="data.train")]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        pytest.param(b"1\n2\n", [(0, b"1"), (1, b"2")], id="two lines"),
        pytest.param(b"1\n2", [(0, b"1"), (1, b"2")], id="no final newline"),
        pytest.param(b"1\r\n2\r\n", [(0, b"1"), (1, b"2")], id="CRLF"),
        pytest.param(b"\xef\xbb\xbf1\n2\n", [(0, b"1"), (1, b"2")], id="BOM"),
        pytest.param(b"\n1\n \t\r\n\n2\n\n", [(1, b"1"), (4, b"2")], id="blank lines are counted"),
        pytest.param(b" 1 \n", [(0, b"1")], id="white space around"),
        pytest.param(b"", [], id="empty file"),
        pytest.param(b"\n\n\n", [], id="blank lines only"),
        pytest.param(b"\xef\xbb\xbf", [], id="BOM only"),
        pytest.param(b"1\r2\n", [(0, b"1\r2")], id="a bare CR ends no row"),
        pytest.param(b"\xff\n1\n", [(0, b"\xff"), (1, b"1")], id="no UTF-8 is a row as well"),
        pytest.param(b"{broken\ntrue\n", [(0, b"{broken"), (1, b"true")], id="no JSON is one row"),
    ],
)
def test_a_line_is_a_row(tmp_path: Path, content: bytes, rows: list[tuple[int, bytes]]):
    assert lines_of(tmp_path, content) == rows


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_rows_end_at_newlines_only(tmp_path: Path, mark: str):
    row = json.dumps({"chosen": f"a{mark}b"}, ensure_ascii=False).encode()
    assert lines_of(tmp_path, row + b"\n" + row) == [(0, row), (1, row)]


def test_a_line_may_be_longer_than_what_is_read_at_once(tmp_path: Path):
    long = b'{"chosen": "' + b"x" * 3_000_000 + b'"}'
    rows = [LINE, long, LINE]
    assert lines_of(tmp_path, b"\n".join(rows)) == list(enumerate(rows))


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress)])
def test_compressed_lines_are_read(tmp_path: Path, suffix: str, compress: Any):
    content = compress(LINE + b"\n\n" + LINE)
    assert lines_of(tmp_path, content, f"rows.jsonl.{suffix}") == [(0, LINE), (2, LINE)]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(gzip.compress(LINE * 1000)[:40], id="cut short"),
        pytest.param(b"this was never compressed\n" * 9, id="plain text"),
    ],
)
def test_a_broken_gz_is_an_error_that_names_the_file(tmp_path: Path, content: bytes):
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: cannot be read"):
        lines_of(tmp_path, content, "rows.jsonl.gz")


def test_a_file_that_went_away_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        read(tmp_path / "gone.jsonl", "lines")


def test_a_json_list_is_a_row_an_item(tmp_path: Path):
    (tmp_path / "rows.json").write_bytes(b'\xef\xbb\xbf\n[{"chosen": "\xc3\xa4"},\n null, [1]]\n')
    rows = [(0, '{"chosen": "ä"}'.encode()), (1, b"null"), (2, b"[1]")]
    assert read(tmp_path / "rows.json", "json") == rows


def test_a_json_file_may_hold_lines(tmp_path: Path):
    (tmp_path / "rows.json").write_bytes(b"\xef\xbb\xbf" + LINE + b"\n{broken\n" + LINE)
    assert read(tmp_path / "rows.json", "json") == [(0, LINE), (1, b"{broken"), (2, LINE)]


def test_an_empty_json_file_holds_no_rows(tmp_path: Path):
    (tmp_path / "rows.json").write_bytes(b"")
    assert read(tmp_path / "rows.json", "json") == []


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'[{"chosen": "a"}, {"chos', id="cut short"),
        pytest.param(b'[{"chosen": "\xff"}]', id="not UTF-8"),
        pytest.param(b"[" * 100_000, id="nested too deeply"),
    ],
)
def test_a_broken_json_list_is_an_error_that_names_the_file(tmp_path: Path, content: bytes):
    (tmp_path / "rows.json").write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.json: not a JSON list"):
        read(tmp_path / "rows.json", "json")


def test_a_json_object_around_the_rows_is_told_from_a_row(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": [json.loads(LINE)]}, indent=1))
    with pytest.raises(DataError, match=r"rows\.json: one object, whose data may be the rows"):
        read(path, "json")
    path.write_bytes(LINE)
    assert read(path, "json") == [(0, LINE)]
    path.write_text('{"messages": [{"role": "user"}], "chosen": "a", "rejected": "b"}')
    assert len(read(path, "json")) == 1


def test_compressed_json_is_read(tmp_path: Path):
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(b"[" + LINE + b"]"))
    assert read(tmp_path / "rows.json.gz", "json") == [(0, LINE)]


def test_half_a_surrogate_pair_stays_in_its_row(tmp_path: Path):
    (tmp_path / "rows.json").write_bytes(b'[{"chosen": "\\ud800"}, {"chosen": "a"}]')
    (_, broken), (_, whole) = read(tmp_path / "rows.json", "json")
    with pytest.raises(UnicodeDecodeError):
        broken.decode()
    assert whole == b'{"chosen": "a"}'


def test_parquet_is_a_row_a_row(tmp_path: Path):
    rows = [{**ROW, "margin": None}, {**ROW, "margin": 0.5}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=1)
    found = read(tmp_path / "rows.parquet", "parquet")
    assert [(number, json.loads(text)) for number, text in found] == list(enumerate(rows))


def test_parquet_messages_keep_their_structure(tmp_path: Path):
    row = {"chosen": [{"role": "user", "content": "ä\u2028"}], "n": 2**60, "b": True}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    ((_, text),) = read(tmp_path / "rows.parquet", "parquet")
    assert json.loads(text) == row
    assert "ä\u2028".encode() in text


def test_compressed_parquet_is_read(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    packed = gzip.compress((tmp_path / "rows.parquet").read_bytes())
    (tmp_path / "rows.parquet.gz").write_bytes(packed)
    assert read(tmp_path / "rows.parquet.gz", "parquet") == [(0, LINE)]


def test_a_broken_parquet_is_an_error_that_names_the_file(tmp_path: Path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read"):
        read(tmp_path / "rows.parquet", "parquet")


def test_generated_rows_are_read():
    (number, text), *_ = read("quickstart:train", "generated")
    assert number == 0
    assert json.loads(text).keys() == {"prompt", "chosen", "rejected"}
    assert text != read("quickstart:eval", "generated")[0][1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of rows: b.jsonl, a.parquet, deep/c.json.gz, and what holds none."""
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.parquet", "deep/c.json.gz", "README.md", "b.jsonl.tmp"):
        (tmp_path / name).touch()
    return tmp_path


ROW_FILES = ["a.parquet", "b.jsonl", "deep/c.json.gz"]


@pytest.mark.parametrize(
    ("path", "files"),
    [
        pytest.param("b.jsonl", ["b.jsonl"], id="file"),
        pytest.param("", ROW_FILES, id="folder"),
        pytest.param("*.jsonl", ["b.jsonl"], id="glob"),
        pytest.param("[ab].*[lt]", ["a.parquet", "b.jsonl"], id="glob of classes"),
        pytest.param("**/*.gz", ["deep/c.json.gz"], id="glob into folders"),
        pytest.param("*/*.json.gz", ["deep/c.json.gz"], id="glob of folders"),
    ],
)
def test_a_path_stands_for_its_files_in_order(folder: Path, path: str, files: list[str]):
    assert files_of(folder / path) == [str(folder / name) for name in files]


def test_a_relative_path_becomes_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    assert files_of("b.jsonl") == [str(folder / "b.jsonl")]


@pytest.mark.parametrize(
    ("path", "files"),
    [
        pytest.param("/b.jsonl", ["b.jsonl"], id="file"),
        pytest.param("", ROW_FILES, id="folder"),
        pytest.param("/", ROW_FILES, id="folder with a slash behind it"),
        pytest.param("/*.jsonl", ["b.jsonl"], id="glob"),
        pytest.param("/*.gz", [], id="glob that stays in its folder"),
        pytest.param("/d*/c*.gz", ["deep/c.json.gz"], id="glob of folders"),
        pytest.param("/**/*.[jg]*", ["b.jsonl", "deep/c.json.gz"], id="glob into folders"),
        pytest.param("/missing.jsonl", [], id="none of its neighbours"),
    ],
)
@pytest.mark.parametrize("scheme", ["file://", "fsspec+file://"])
def test_a_url_stands_for_its_files_as_well(folder: Path, scheme: str, path: str, files: list[str]):
    (folder / "b.jsonl.tmp").unlink()
    if files:
        assert files_of(f"{scheme}{folder}{path}") == [f"{scheme}{folder}/{name}" for name in files]
    else:
        with pytest.raises(ConfigError, match="no such file, folder or match"):
            files_of(f"{scheme}{folder}{path}")


def test_a_file_url_is_read(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(LINE)
    assert read(f"file://{tmp_path}/rows.jsonl", "lines") == [(0, LINE)]


def test_a_name_with_glob_characters_is_a_file_if_there_is_one(tmp_path: Path):
    (tmp_path / "rows[1].jsonl").touch()
    (tmp_path / "[old]").mkdir()
    (tmp_path / "[old]" / "rows.jsonl").touch()
    assert files_of(tmp_path / "rows[1].jsonl") == [str(tmp_path / "rows[1].jsonl")]
    assert files_of(tmp_path / "[old]") == [str(tmp_path / "[old]" / "rows.jsonl")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.jsonl", "lines"),
        ("x.ndjson", "lines"),
        ("x.json", "json"),
        ("x.parquet", "parquet"),
        ("x.jsonl.gz", "lines"),
        ("x.json.zst", "json"),
        ("X.JSONL", "lines"),
    ],
)
def test_the_suffix_tells_the_kind(tmp_path: Path, name: str, kind: Kind):
    (tmp_path / name).touch()
    (file,) = list_files(str(tmp_path / name), label="label", field="data.train")
    assert (file.kind, file.source) == (kind, "label")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.jsonl", r"data\.train: no such file, folder or match: .*missing\.jsonl"),
        ("*.jsonl", "no such file, folder or match"),
        ("empty", r"the folder .*empty holds no file of rows \(\.jsonl"),
        ("links", r"b\.jsonl is a link to gone\.jsonl, which is not there"),
        ("links/*.jsonl", r"b\.jsonl is a link to gone\.jsonl, which is not there"),
        ("links/b.jsonl", r"b\.jsonl is a link to gone\.jsonl, which is not there"),
        ("pipes", r"a\.jsonl is no file but a pipe"),
        ("notes.txt", r"notes\.txt: unknown kind of file; .*\.jsonl"),
        ("no_suffix", "unknown kind of file"),
        ("rows.gz", "unknown kind of file"),
    ],
)
def test_a_source_that_cannot_be_opened_is_a_config_error(tmp_path: Path, path: str, message: str):
    for name in ("notes.txt", "no_suffix", "rows.gz"):
        (tmp_path / name).touch()
    for name in ("empty", "links", "pipes"):
        (tmp_path / name).mkdir()
    (tmp_path / "links" / "a.jsonl").touch()
    (tmp_path / "links" / "b.jsonl").symlink_to("gone.jsonl")
    os.mkfifo(tmp_path / "pipes" / "a.jsonl")
    with pytest.raises(ConfigError, match=message):
        files_of(tmp_path / path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("quickstart:test", "write quickstart:train or quickstart:eval"),
        ("nothing://x/rows.jsonl", r"data\.train: cannot open nothing://x/rows\.jsonl"),
        ("file:///no/such/folder/rows.jsonl", "no such file, folder or match"),
        ("file:///no/such/folder/", "no such file, folder or match"),
        ("file:///no/such/folder/*.jsonl", "no such file, folder or match"),
    ],
)
def test_a_url_that_cannot_be_opened_is_a_config_error(path: str, message: str):
    with pytest.raises(ConfigError, match=message):
        files_of(path)
