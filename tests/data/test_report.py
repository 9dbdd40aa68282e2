from typing import Any

import pyarrow as pa
import pytest

from rayrm.data import report as report_module
from rayrm.data.pipeline import PAIR_SCHEMA
from rayrm.data.report import DataReport


def kept(file: int, row: int, prompt: int, chosen: int, rejected: int, **more: Any) -> dict:
    lengths = {"prompt_length": prompt, "chosen_length": chosen, "rejected_length": rejected}
    return {"file": file, "row": row, "margin": 0.0, "digest": 1 << 63, **lengths, **more}


def dropped(file: int, row: int, reason: str, raw: bytes = b"{}") -> dict[str, Any]:
    told = {"reason": reason, "detail": f"it is a {reason}", "raw": raw}
    return {"file": file, "row": row, "digest": 1, **told}


def report_of(*tables: list[dict[str, Any]]) -> DataReport:
    """The account of three files: two of source a, one of source b."""
    report = DataReport(["a", "a", "b"], ["a1.jsonl", "a2.jsonl", "b.jsonl"])
    for rows in tables:
        report.add(pa.Table.from_pylist(rows, schema=PAIR_SCHEMA))
    return report


def test_every_number_of_a_source():
    report = report_of(
        [kept(0, 0, 4, 10, 6), dropped(0, 1, "tie"), kept(1, 0, 2, 3, 21, margin=-1.0)],
        [dropped(1, 1, "too_long"), dropped(1, 2, "tie"), kept(1, 3, 0, 4, 4, margin=2.0)],
    )
    assert report.as_dict()["a"] == {
        "rows": 6,
        "pairs": 3,
        "dropped": {"tie": 2, "too_long": 1},
        "dropped_rows_kept": 3,
        "negative_margins": 1,
        "tokens": {"total": 48, "mean_per_side": 8.0, "longest_side": 21, "longest_pair": 22},
        "fingerprint": "8000000000000003",  # of 3 * 2**63 + 3, what fits into 64 bits
        "shared_prompt_share": 6 / 48,
    }


def test_a_source_without_rows_is_told_as_well():
    report = report_of([kept(0, 0, 4, 10, 6)])
    assert report.as_dict()["b"] == {
        "rows": 0,
        "pairs": 0,
        "dropped": {},
        "dropped_rows_kept": 0,
        "negative_margins": 0,
        "tokens": {"total": 0, "mean_per_side": 0.0, "longest_side": 0, "longest_pair": 0},
        "fingerprint": "0000000000000000",
        "shared_prompt_share": 0.0,
    }


def test_files_add_up_by_source_and_sources_add_up():
    report = report_of(
        [kept(0, 0, 1, 2, 2), kept(1, 0, 1, 2, 2), dropped(2, 0, "tie"), kept(2, 1, 1, 2, 2)]
    )
    told = {label: (one["rows"], one["pairs"]) for label, one in report.as_dict().items()}
    assert told == {"a": (2, 2), "b": (2, 1)}
    assert (report.num_rows, report.num_pairs, dict(report.dropped)) == (4, 3, {"tie": 1})


def test_dropped_rows_name_their_file_row_and_reason():
    report = report_of([dropped(1, 7, "tie", b"{1}"), dropped(2, 0, "unparsable", b"\xff{")])
    assert report.sources["a"].kept_rows == [
        {"source": "a2.jsonl", "row": 7, "reason": "tie", "detail": "it is a tie", "raw": "{1}"}
    ]
    assert report.sources["b"].kept_rows[0]["raw"] == "\ufffd{"


def test_rows_beyond_the_cap_are_counted_but_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report_module, "MAX_KEPT_ROWS", 2)
    report = report_of([dropped(0, row, "tie") for row in range(5)], [dropped(2, 0, "tie")])
    told = report.as_dict()
    assert (told["a"]["dropped"], told["a"]["dropped_rows_kept"]) == ({"tie": 5}, 2)
    assert told["b"]["dropped_rows_kept"] == 1
    assert report.dropped == {"tie": 6}


def test_the_first_dropped_row_is_that_of_the_first_source_with_one():
    assert report_of([kept(0, 0, 1, 2, 2)]).first_dropped() is None
    first = report_of([dropped(2, 0, "tie"), dropped(1, 5, "no_eos")]).first_dropped()
    assert first is not None
    assert (first["source"], first["row"]) == ("a2.jsonl", 5)


def test_no_rows_are_no_account():
    report = report_of([])
    assert (report.num_rows, report.num_pairs, report.dropped) == (0, 0, {})
