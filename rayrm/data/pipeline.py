"""Ray Data from raw rows to tokenized pairs: parse, render, tokenize and filter in parallel."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data

from rayrm.config.schema import DataSection, ModelSection
from rayrm.data.formats import parse_line
from rayrm.data.pairs import Drop, Pair
from rayrm.data.report import FIRST_ROW, ROWS_A_MARK, DataReport, RowId
from rayrm.data.sources import RawRows, RowFile
from rayrm.data.tokenize import PairTokenizer, TokenizedPair
from rayrm.errors import DataError

_IDS = pa.large_list(pa.int32())
_ID_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
PAIR_SCHEMA = pa.schema(
    [
        ("file", pa.int32()),
        ("row", pa.int64()),
        *((name, _IDS) for name in _ID_COLUMNS),
        ("margin", pa.float32()),
        ("prompt_length", pa.int32()),
        ("chosen_length", pa.int32()),
        ("rejected_length", pa.int32()),
        ("digest", pa.uint64()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("raw", pa.binary()),
    ]
)
"""A kept pair has no reason and no raw; a dropped row has both and no ids. Lengths are of the
shared prefix and of the two whole sides. The digest is of the row's text and number."""

_ROWS_A_BATCH = 256


@dataclass(frozen=True, slots=True)
class PairStream:
    """Tokenized rows of one data set, in the order of their sources: lazy Ray data sets."""

    files: tuple[RowFile, ...]
    rows: ray.data.Dataset
    """Of ``RAW_SCHEMA``; of ``PAIR_SCHEMA`` where they are held."""
    tokenize: partial[pa.Table] | None
    """Maps the one to the other; null where they are held."""
    num_cpus: float = 1.0
    """Logical CPUs of one tokenizing task."""

    def dataset(self, first: RowId = FIRST_ROW) -> ray.data.Dataset:
        """Return the tokenized rows from ``first`` on; those before it are not tokenized."""
        if self.tokenize is None and first == FIRST_ROW:
            return self.rows
        if self.tokenize is None:
            return self.rows.map_batches(partial(_rows_from, first=first), batch_format="pyarrow")
        return self.rows.map_batches(
            partial(self.tokenize, first=first),
            batch_size=_ROWS_A_BATCH,
            batch_format="pyarrow",
            zero_copy_batch=True,
            num_cpus=self.num_cpus,
        )

    def held(self) -> "PairStream":
        """Return the same rows, tokenized once and kept in the object store."""
        if self.tokenize is None:
            return self
        return PairStream(self.files, self.dataset().materialize(), tokenize=None)

    def survey(self, *, rows_a_mark: int = ROWS_A_MARK) -> DataReport:
        """Stream all rows once and account for each; memory does not grow with their number."""
        report = DataReport(
            [f.source for f in self.files],
            [f.path for f in self.files],
            rows_a_mark=rows_a_mark,
        )
        counted = [name for name in PAIR_SCHEMA.names if name not in _ID_COLUMNS]
        batches: Any = (
            self.dataset()
            .select_columns(counted)
            .iter_batches(batch_size=None, batch_format="pyarrow")
        )
        for table in batches:
            if table.num_rows:
                report.add(table)
        return report


def tokenize_rows(
    raw: RawRows, *, model: ModelSection, data: DataSection, num_cpus: float = 1.0
) -> PairStream:
    """Tokenize raw rows in Ray tasks, each with the tokenizer of its process."""
    rows = raw.dataset
    if data.num_blocks is not None:
        rows = rows.repartition(data.num_blocks)
    tokenize = partial(
        tokenize_table,
        model_json=model.model_dump_json(),
        max_length=data.max_length,
        columns=data.columns,
    )
    return PairStream(raw.files, rows, tokenize, num_cpus)


def _rows_from(table: pa.Table, *, first: RowId) -> pa.Table:
    if first == FIRST_ROW:
        return table
    file, row = table["file"].to_numpy(), table["row"].to_numpy()
    is_wanted = (file > first[0]) | ((file == first[0]) & (row >= first[1]))
    return table.filter(pa.array(is_wanted))


def tokenize_table(
    table: pa.Table,
    *,
    model_json: str,
    max_length: int,
    columns: dict[str, str],
    first: RowId = FIRST_ROW,
) -> pa.Table:
    """Map a table of ``RAW_SCHEMA`` to one of ``PAIR_SCHEMA``, a row from ``first`` on a row."""
    table = _rows_from(table, first=first)
    raw: list[bytes] = table["raw"].to_pylist()
    pairs = [_parse(text, columns) for text in raw]
    outcomes = _pair_tokenizer(model_json, max_length).tokenize(pairs)
    kept = [x if isinstance(x, TokenizedPair) else None for x in outcomes]
    drops = [x if isinstance(x, Drop) else None for x in outcomes]

    def column(value: Any) -> list[Any]:
        return [None if pair is None else value(pair) for pair in kept]

    return pa.table(
        [
            table["file"],
            table["row"],
            *(column(lambda pair, name=name: getattr(pair, name)) for name in _ID_COLUMNS),
            column(lambda pair: pair.margin),
            column(lambda pair: len(pair.prompt_ids)),
            column(lambda pair: len(pair.prompt_ids) + len(pair.chosen_ids)),
            column(lambda pair: len(pair.prompt_ids) + len(pair.rejected_ids)),
            [_digest(text, row) for text, row in zip(raw, table["row"].to_pylist(), strict=True)],
            [None if drop is None else drop.reason for drop in drops],
            [None if drop is None else drop.detail for drop in drops],
            [None if drop is None else text for drop, text in zip(drops, raw, strict=True)],
        ],
        schema=PAIR_SCHEMA,
    )


def pairs_of(table: pa.Table) -> list[TokenizedPair]:
    """Return the pairs of a table of ``PAIR_SCHEMA`` without dropped rows, ids not copied."""
    ids = [_slices(table[name]) for name in _ID_COLUMNS]
    margins = table["margin"].to_pylist()
    return [TokenizedPair(*arrays) for arrays in zip(*ids, margins, strict=True)]


def _slices(column: pa.ChunkedArray) -> list[np.ndarray]:
    return [
        values[start:end]
        for chunk in column.chunks
        for values, offsets in [(chunk.values.to_numpy(), chunk.offsets.to_numpy())]
        for start, end in pairwise(offsets)
    ]


def _digest(text: bytes, row: int) -> int:
    place = row.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=place).digest(), "little")


def _parse(text: bytes, columns: dict[str, str]) -> Pair | Drop:
    try:
        return parse_line(text.decode("utf-8"), columns)
    except UnicodeDecodeError as error:
        return Drop("unparsable", f"not UTF-8 at byte {error.start}; save the file as UTF-8")


@lru_cache(maxsize=2)
def _pair_tokenizer(model_json: str, max_length: int) -> PairTokenizer:
    """Load once a process: Ray keeps its processes from task to task and from epoch to epoch."""
    # imported here, since it loads transformers and torch, which a feeder does not need
    from rayrm.model.tokenizer import load_tokenizer

    model = ModelSection.model_validate_json(model_json)
    return PairTokenizer(load_tokenizer(model), max_length=max_length)


def check_report(report: DataReport, data: DataSection, *, field: str) -> None:
    """Refuse a data set without a single pair, or with a bad row where that is to stop the run.

    Raises:
        DataError: with the counts by reason, or with the first bad row.
    """
    if data.on_bad_row == "stop" and (row := report.first_dropped()) is not None:
        raise DataError(
            f"{field}: {row['source']}, row {row['row']}: {row['reason']}: {row['detail']} "
            "(data.on_bad_row is stop; drop would count it and go on)"
        )
    if report.num_rows == 0:
        raise DataError(f"{field}: there are no rows in {', '.join(report.paths) or 'it'}")
    if report.num_pairs == 0:
        counts = ", ".join(f"{n} {reason}" for reason, n in report.dropped.most_common())
        raise DataError(
            f"{field}: none of {report.num_rows} rows is a usable pair ({counts})"
            + _remedy(report, data)
        )


def _remedy(report: DataReport, data: DataSection) -> str:
    if report.dropped["too_long"]:
        return f"; raise data.max_length (now {data.max_length})"
    row = report.first_dropped()
    return (
        "" if row is None else f"; the first: row {row['row']} of {row['source']}: {row['detail']}"
    )
