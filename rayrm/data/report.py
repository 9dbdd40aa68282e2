"""The account of every row: read, kept, or dropped for a counted reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_KEPT_ROWS = 1_000
"""Dropped rows of one source that are kept with their text; all are counted."""


RowId = tuple[int, int]
"""Number of a row's file, and its place in it."""
FIRST_ROW: RowId = (0, 0)
ROWS_A_MARK = 10_000
"""About so many source rows a stretch: few marks for many rows, and little to read in vain."""


@dataclass
class Mark:
    """A stretch of source rows: where it begins, and how many pairs it holds."""

    first: RowId
    num_pairs: int


@dataclass
class SourceReport:
    """What became of the rows of one source."""

    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    negative_margins: int = 0
    tokens: int = 0
    shared_tokens: int = 0
    longest: int = 0
    longest_pair: int = 0
    fingerprint: int = 0
    """Sum of all rows' digests, modulo 2**64: alike for the same rows at the same places."""
    kept_rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pairs(self) -> int:
        """Rows that are trained or evaluated on."""
        return self.rows - self.dropped.total()

    def as_dict(self) -> dict[str, Any]:
        """Return the account as plain data."""
        pairs = self.pairs
        return {
            "rows": self.rows,
            "pairs": pairs,
            "dropped": dict(sorted(self.dropped.items())),
            "dropped_rows_kept": len(self.kept_rows),
            "negative_margins": self.negative_margins,
            "tokens": {
                "total": self.tokens,
                "mean_per_side": self.tokens / (2 * pairs) if pairs else 0.0,
                "longest_side": self.longest,
                "longest_pair": self.longest_pair,
            },
            "fingerprint": f"{self.fingerprint:016x}",
            "shared_prompt_share": self.shared_tokens / self.tokens if self.tokens else 0.0,
        }


class DataReport:
    """Adds up tokenized tables (columns of ``rayrm.data.pipeline.PAIR_SCHEMA``) by source."""

    def __init__(
        self, sources: list[str], paths: list[str], *, rows_a_mark: int = ROWS_A_MARK
    ) -> None:
        """``sources`` and ``paths`` name the label and the place of each file number."""
        self.marks: list[Mark] = []
        """Stretches of ``rows_a_mark`` rows, by which a stream is entered in the middle."""
        self._rows_a_mark = rows_a_mark
        self._rows_since_mark = rows_a_mark
        self._labels = sources
        self.paths = paths
        self.sources = {label: SourceReport() for label in sources}

    def add(self, table: pa.Table) -> None:
        """Count the rows of one table; tables come in the order of the rows."""
        self._mark(table)
        for number in table["file"].unique().to_pylist():
            rows = table.filter(pc.field("file") == number)
            report = self.sources[self._labels[number]]
            report.rows += rows.num_rows
            digests = int(rows["digest"].to_numpy().sum(dtype=np.uint64))
            report.fingerprint = (report.fingerprint + digests) % 2**64
            self._count_kept(report, rows.filter(rows["reason"].is_null()))
            self._keep_dropped(report, rows.filter(rows["reason"].is_valid()), number)

    def _mark(self, table: pa.Table) -> None:
        while table.num_rows:
            if self._rows_since_mark == self._rows_a_mark:
                self.marks.append(Mark((table["file"][0].as_py(), table["row"][0].as_py()), 0))
                self._rows_since_mark = 0
            part = table.slice(0, self._rows_a_mark - self._rows_since_mark)
            self.marks[-1].num_pairs += part["reason"].null_count
            self._rows_since_mark += part.num_rows
            table = table.slice(part.num_rows)

    def _count_kept(self, report: SourceReport, kept: pa.Table) -> None:
        if kept.num_rows == 0:
            return
        names = ("prompt_length", "chosen_length", "rejected_length", "margin")
        prompt, chosen, rejected, margin = (kept[name].to_numpy() for name in names)
        report.tokens += int(chosen.sum() + rejected.sum())
        report.shared_tokens += int(prompt.sum())
        report.longest = max(report.longest, int(chosen.max()), int(rejected.max()))
        report.longest_pair = max(report.longest_pair, int((chosen + rejected - prompt).max()))
        report.negative_margins += int((margin < 0).sum())

    def _keep_dropped(self, report: SourceReport, dropped: pa.Table, number: int) -> None:
        if dropped.num_rows == 0:
            return
        for row in dropped.select(["row", "reason", "detail", "raw"]).to_pylist():
            report.dropped[row["reason"]] += 1
            if len(report.kept_rows) < MAX_KEPT_ROWS:
                report.kept_rows.append(
                    {
                        "source": self.paths[number],
                        "row": row["row"],
                        "reason": row["reason"],
                        "detail": row["detail"],
                        "raw": row["raw"].decode("utf-8", "replace"),
                    }
                )

    @property
    def num_rows(self) -> int:
        """Rows read from all sources."""
        return sum(report.rows for report in self.sources.values())

    @property
    def num_pairs(self) -> int:
        """Pairs kept from all sources."""
        return sum(report.pairs for report in self.sources.values())

    @property
    def longest_side(self) -> int:
        """Most tokens of prompt and reply together."""
        return max((report.longest for report in self.sources.values()), default=0)

    @property
    def longest_pair(self) -> int:
        """Most tokens of a pair, its prompt counted once."""
        return max((report.longest_pair for report in self.sources.values()), default=0)

    @property
    def dropped(self) -> Counter[str]:
        """Rows dropped from all sources, by reason."""
        return sum((report.dropped for report in self.sources.values()), Counter())

    def first_dropped(self) -> dict[str, Any] | None:
        """Return the first dropped row that was kept, with its reason."""
        rows = (row for report in self.sources.values() for row in report.kept_rows)
        return next(rows, None)

    def as_dict(self) -> dict[str, Any]:
        """Return the account of each source as plain data."""
        return {label: report.as_dict() for label, report in self.sources.items()}
