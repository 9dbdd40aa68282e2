"""Where rows come from: files of three kinds, the hub, data sets handed over, generated pairs.

Whatever the place, a row leaves here as the JSON text it is (``raw``) with the number of its file
and its place in it. Parsing happens later and row by row, so one broken line costs one line.
"""

import fnmatch
import glob
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import ray.data

from rayrm.config.schema import Source
from rayrm.data.columns import COLUMNS
from rayrm.data.synthetic import generate_pairs
from rayrm.errors import ConfigError, DataError

Kind = Literal["lines", "json", "parquet", "generated", "handed"]
_KINDS: dict[str, Kind] = {
    ".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet",
}  # fmt: skip
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_NO_ROWS = "no file of rows (.jsonl, .json or .parquet, also .gz)"
_ROWS_A_CHUNK = 256
_BLOCK_BYTES = 1 << 20
"""Raw rows travel in blocks of about this size: small enough to tokenize one file in parallel."""

RAW_SCHEMA = pa.schema([("file", pa.int32()), ("row", pa.int64()), ("raw", pa.binary())])


@dataclass(frozen=True, slots=True)
class RowFile:
    """One place with numbered rows; a source is one or more of them."""

    source: str
    """Label of the source in reports, unique within a run."""
    path: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class RawRows:
    """Rows as they stand in their sources: a lazy Ray data set of ``RAW_SCHEMA``."""

    files: tuple[RowFile, ...]
    dataset: ray.data.Dataset


def open_sources(sources: Iterable[tuple[str, Source]], *, field: str) -> RawRows:
    """Open labelled sources in order; nothing is read yet but file listings.

    Raises:
        ConfigError: a path, glob or data set does not exist or is of no known kind; ``field`` names
            the setting in the message.
    """
    files: list[RowFile] = []
    datasets: list[ray.data.Dataset] = []
    for label, source in sources:
        if source.path.startswith("hub:"):
            opened = hand_over(_load_from_hub(source, field), label=label, first_file=len(files))
            own_files, dataset = list(opened.files), opened.dataset
        else:
            own_files = list_files(source.path, label=label, field=field)
            dataset = _read_files(own_files, first_file=len(files))
        datasets.append(dataset if source.limit is None else dataset.limit(source.limit))
        files += own_files
    first, *others = datasets
    return RawRows(tuple(files), first.union(*others) if others else first)


def hand_over(rows: Any, *, label: str, first_file: int = 0) -> RawRows:
    """Take a ``ray.data.Dataset``, a ``datasets.Dataset`` or a list of rows as a source.

    Raises:
        ConfigError: it is none of these.
    """
    files = (RowFile(label, label, "handed"),)
    if isinstance(rows, list | tuple):
        texts = [_to_json(row) for row in rows]
        table = _raw_table(first_file, range(len(texts)), texts)
        return RawRows(files, _small_blocks(ray.data.from_arrow(table)))
    if not isinstance(rows, ray.data.Dataset):
        import datasets

        if not isinstance(rows, datasets.Dataset):
            raise ConfigError(
                f"datasets: {label!r} is a {type(rows).__module__}.{type(rows).__name__}; hand "
                "over a ray.data.Dataset, a datasets.Dataset or a list of rows"
            )
        rows = ray.data.from_huggingface(rows)
    # Ray data sets have no row numbers: freeze the order, then number the rows in it.
    frozen = _in_order(rows).materialize()
    numbers = ray.data.range(frozen.count()).rename_columns({"id": "__rayrm_row__"})
    numbered = numbers.zip(frozen).map_batches(
        partial(_numbered_to_raw, file=first_file), batch_format="pyarrow", batch_size=_ROWS_A_CHUNK
    )
    return RawRows(files, _in_order(numbered))


def _load_from_hub(source: Source, field: str) -> Any:
    import datasets

    name = source.path.removeprefix("hub:")
    try:
        return datasets.load_dataset(name, source.name, split=source.split or "train")
    except Exception as error:  # the library raises whatever its transport does
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(f"{field}: cannot load hub data set {name!r} ({first_line})") from error


def list_files(path: str, *, label: str, field: str) -> list[RowFile]:
    """Return the files that a path, folder, glob or URL stands for, sorted.

    Raises:
        ConfigError: there are none, or one is of no known kind.
    """
    scheme, _, split = path.partition(":")
    if scheme == "quickstart":
        if split not in ("train", "eval"):
            raise ConfigError(f"{field}: {path!r}: write quickstart:train or quickstart:eval")
        return [RowFile(label, path, "generated")]
    try:
        paths = _expand_url(path) if "://" in path else _expand(path)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{field}: cannot open {path} ({error})") from error
    if not paths and "://" not in path and os.path.isdir(path):
        raise ConfigError(f"{field}: the folder {path} holds {_NO_ROWS}")
    if not paths:
        raise ConfigError(f"{field}: no such file, folder or match: {path}")
    files = []
    for place in paths:
        kind = _kind_of(place)
        if kind is None:
            raise ConfigError(
                f"{field}: {place}: unknown kind of file; rows are read from .jsonl, .json and "
                ".parquet (also .gz)"
            )
        files.append(RowFile(label, place, kind))
    return files


def stamps_of(files: Iterable[RowFile]) -> dict[str, list[int]]:
    """Return size and time of change of the files among these, by their path: no row is read."""
    places = {file.path: _find(file.path) for file in files if file.kind in _KINDS.values()}
    infos = {path: system.get_file_info(inner) for path, (system, inner) in places.items()}
    return {path: [info.size, info.mtime_ns] for path, info in infos.items()}


def _kind_of(path: str) -> Kind | None:
    stem, suffix = os.path.splitext(path.lower())
    if suffix in _CODECS:
        suffix = os.path.splitext(stem)[1]
    return _KINDS.get(suffix)


def _expand(path: str) -> list[str]:
    """Return the files that a local path, folder or glob stands for, sorted."""
    if os.path.isdir(path):
        inside = glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
        found = [place for place in inside if _kind_of(place)]
    else:
        found = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
    files = [place for place in found if not os.path.isdir(place)]
    for place in files:
        if not os.path.exists(place):
            raise OSError(f"{place} is a link to {os.readlink(place)}, which is not there")
        if not os.path.isfile(place):
            raise OSError(f"{place} is no file but a pipe, a socket or a device")
    return sorted(os.path.abspath(place) for place in files)


def _expand_url(url: str) -> list[str]:
    """Return the files that a URL of a file or folder, or a glob of URLs, stands for, sorted."""
    head, star, _ = url.partition("*")
    place = head.rpartition("/")[0] if star else url.rstrip("/")
    filesystem, inner = pafs.FileSystem.from_uri(place)
    if not star and filesystem.get_file_info(inner).type == pafs.FileType.File:
        return [url]
    root = place.removesuffix(inner)
    pattern = url.removeprefix(root)
    selector = pafs.FileSelector(inner, recursive=True, allow_not_found=True)
    return sorted(
        root + entry.path
        for entry in filesystem.get_file_info(selector)
        if entry.type == pafs.FileType.File
        and (_matches(entry.path, pattern) if star else _kind_of(entry.path))
    )


def _matches(path: str, pattern: str) -> bool:
    """Whether a path fits a glob: ``*`` stays in its folder, ``**/`` goes into others."""
    is_deep = "**" in pattern
    may_match = is_deep or path.count("/") == pattern.count("/")
    return may_match and fnmatch.fnmatchcase(path, pattern.replace("**/", "*"))


def _read_files(files: list[RowFile], *, first_file: int) -> ray.data.Dataset:
    numbers = ray.data.from_items(
        [{"file": first_file + i} for i in range(len(files))], override_num_blocks=len(files)
    )
    read: Any = partial(_read_numbered, files=files, first_file=first_file)
    # a fraction of a CPU keeps Ray from fusing this with tokenizing, which runs wider
    dataset = numbers.map_batches(read, batch_size=1, batch_format="numpy", num_cpus=0.25)
    return _small_blocks(dataset)


def _small_blocks(dataset: ray.data.Dataset) -> ray.data.Dataset:
    dataset = _in_order(dataset)
    dataset.context.target_max_block_size = _BLOCK_BYTES
    return dataset


def _in_order(dataset: ray.data.Dataset) -> ray.data.Dataset:
    dataset.context.execution_options.preserve_order = True
    return dataset


def _read_numbered(
    batch: dict[str, Any], *, files: list[RowFile], first_file: int
) -> Iterator[pa.Table]:
    (number,) = batch["file"].tolist()
    file = files[number - first_file]
    rows: list[int] = []
    texts: list[bytes] = []
    for row, text in read_rows(file):
        rows.append(row)
        texts.append(text)
        if len(rows) == _ROWS_A_CHUNK:
            yield _raw_table(number, rows, texts)
            rows, texts = [], []
    yield _raw_table(number, rows, texts)


def read_rows(file: RowFile) -> Iterator[tuple[int, bytes]]:
    """Yield each row of a file with its number, from 0; blank lines count but are no rows.

    Raises:
        DataError: the file as a whole cannot be read.
    """
    try:
        if file.kind == "generated":
            split = file.path.removeprefix("quickstart:")
            for row, pair in enumerate(generate_pairs("train" if split == "train" else "eval")):
                yield row, _to_json(pair)
        elif file.kind == "parquet":
            yield from _read_parquet(file.path)
        elif file.kind == "json":
            yield from _read_json(file.path)
        else:
            yield from _read_lines(file.path)
    except (OSError, EOFError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{file.path}: cannot be read ({error}); is it whole, and what its name says?"
        ) from error


def _find(path: str) -> tuple[pafs.FileSystem, str]:
    return pafs.FileSystem.from_uri(path) if "://" in path else (pafs.LocalFileSystem(), path)


def _open(path: str) -> pa.NativeFile:
    """Open a file as a stream of what it held before it was compressed, if it was."""
    filesystem, inner = _find(path)
    return filesystem.open_input_stream(inner, compression=_codec_of(path))


def _codec_of(path: str) -> str | None:
    return _CODECS.get(os.path.splitext(path.lower())[1])


def _read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    with _open(path) as stream:
        rest, number = b"", 0
        while chunk := stream.read(1 << 20):
            # rows end at \n only: U+2028 and the like are part of a text
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield from _line(number, line)
                number += 1
        yield from _line(number, rest)


def _line(number: int, line: bytes) -> Iterator[tuple[int, bytes]]:
    line = (line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line).strip(b" \t\r")
    if line:
        yield number, line


def _read_json(path: str) -> Iterator[tuple[int, bytes]]:
    with _open(path) as stream:
        text = stream.read().removeprefix(b"\xef\xbb\xbf")
    if not text.lstrip().startswith(b"["):
        _check_no_wrapper(path, text)
        yield from _read_lines(path)  # many .json files hold a row a line
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not a JSON list of rows ({error}); mend it there, or write a row a line"
        ) from error
    for number, row in enumerate(rows):
        yield number, _to_json(row)


def _check_no_wrapper(path: str, text: bytes) -> None:
    """Refuse a file that is one object around its rows: which of its lists they are is a guess."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return  # a row a line, or lines that will each be told of
    if not isinstance(whole, dict) or whole.keys() & COLUMNS:
        return
    lists = [name for name, value in whole.items() if isinstance(value, list)]
    if lists and all(isinstance(row, dict) for row in whole[lists[0]]):
        raise DataError(
            f"{path}: one object, whose {lists[0]} may be the rows; rows are expected as a list or "
            "a line each: write out that list alone"
        )


def _read_parquet(path: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    with _open_parquet(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_A_CHUNK):
            for row in batch.to_pylist():
                yield number, _to_json(row)
                number += 1


def _open_parquet(path: str) -> pq.ParquetFile:
    """Open a Parquet file in place; a compressed one is read whole, since it has no places."""
    if _codec_of(path) is not None:
        with _open(path) as stream:
            return pq.ParquetFile(pa.BufferReader(stream.read()))
    filesystem, inner = _find(path)
    return pq.ParquetFile(inner, filesystem=filesystem)


def _numbered_to_raw(table: pa.Table, *, file: int) -> pa.Table:
    numbers = table["__rayrm_row__"].to_pylist()
    rows = table.drop_columns(["__rayrm_row__"]).to_pylist()
    return _raw_table(file, numbers, [_to_json(row) for row in rows])


def _to_json(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


def _raw_table(file: int, rows: Iterable[int], texts: list[bytes]) -> pa.Table:
    rows = list(rows)
    return pa.table([[file] * len(rows), rows, texts], schema=RAW_SCHEMA)
