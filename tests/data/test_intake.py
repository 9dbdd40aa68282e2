import logging
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrm.config.loader import load_config
from rayrm.config.schema import Source
from rayrm.data.intake import check_reports, check_unchanged, eval_names, label_sources
from rayrm.data.pipeline import PAIR_SCHEMA
from rayrm.data.report import DataReport
from rayrm.errors import DataError


def labels(*paths: str, taken: tuple[str, ...] = ()) -> list[str]:
    return [label for label, _ in label_sources([Source(path=path) for path in paths], taken)]


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("data/pairs.jsonl.gz", "pairs"),
        ("data/pairs/", "pairs"),
        ("data/pairs/*.jsonl", "pairs"),
        ("data/pairs/**/*.jsonl", "pairs"),
        ("data/part-*.jsonl", "part"),
        ("s3://bucket/pairs/*", "pairs"),
        ("hub:trl-lib/ultrafeedback_binarized", "ultrafeedback_binarized"),
        ("hub:pairs", "hub-pairs"),
        ("quickstart:train", "quickstart-train"),
        ("a b?.jsonl", "a-b"),
        ("*.jsonl", "source"),
        ("größe.jsonl", "größe"),
    ],
)
def test_a_source_is_called_by_its_file_and_may_name_one(path: str, label: str):
    assert labels(path) == [label]


def test_sources_of_one_name_are_numbered():
    assert labels("a/x.jsonl", "b/x.jsonl", "c/x.parquet") == ["x", "x-2", "x-3"]


def test_a_number_that_another_source_has_by_itself_is_passed_over():
    assert labels("x-2.jsonl", "a/x.jsonl", "b/x.jsonl") == ["x-2", "x", "x-3"]
    assert labels("x-3.jsonl", "a/x.jsonl", "b/x.jsonl") == ["x-3", "x", "x-2"]


def test_names_of_evaluation_sets_are_left_to_them():
    assert labels("eval.jsonl", "train.jsonl", taken=("eval",)) == ["eval-2", "train"]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.from_regex(r"\A[xy](-[1-4])*\.jsonl\Z"), max_size=8))
def test_labels_are_unique(paths: list[str]):
    assert len(set(labels(*paths))) == len(paths)


@pytest.mark.parametrize(
    ("configured", "names"),
    [
        ([], []),
        (["data.eval=x.jsonl"], ["eval"]),
        (["data.eval={easy: x.jsonl, hard: y.jsonl}"], ["eval_easy", "eval_hard"]),
        (["data.eval={a: x.jsonl, a_: y.jsonl}"], ["eval_a", "eval_a_"]),
    ],
)
def test_evaluation_sets_are_called_eval_and_their_name(configured: list[str], names: list[str]):
    assert list(eval_names(load_config({}, configured), {})) == names


def test_rows_that_are_handed_over_take_the_place_of_the_configured():
    config = load_config({}, ["data.eval=x.jsonl"])
    assert eval_names(config, {"eval": [{"chosen": "a"}]}) == {"eval": [{"chosen": "a"}]}
    assert eval_names(config, {"eval": {"b": []}}) == {"eval_b": []}


def report_of(*reasons: str | None, digest: int = 0) -> DataReport:
    """The account of one file, a row a reason; None is a kept pair."""
    rows: list[dict[str, Any]] = [
        {"file": 0, "row": row, "digest": digest}
        | {"reason": reason, "detail": f"it is {reason}", "raw": b"{}"}
        if reason
        else {"file": 0, "row": row, "digest": digest, "margin": 0.0}
        | dict.fromkeys(("prompt_length", "chosen_length", "rejected_length"), 2)
        for row, reason in enumerate(reasons)
    ]
    report = DataReport(["x"], ["x.jsonl"])
    report.add(pa.Table.from_pylist(rows, schema=PAIR_SCHEMA))
    return report


@pytest.mark.parametrize(
    ("reasons", "overrides", "message"),
    [
        ([], [], r"^data\.train: there are no rows in x\.jsonl$"),
        (
            ["tie", "too_long", "tie"],
            ["data.max_length=77"],
            r"none of 3 rows .* \(2 tie, 1 too_long\); raise data\.max_length \(now 77\)",
        ),
        (["no_eos"], [], r"\(1 no_eos\); the first: row 0 of x\.jsonl: it is no_eos"),
        ([None, "tie"], ["data.on_bad_row=stop"], r"x\.jsonl, row 1: tie: it is tie"),
    ],
)
def test_unusable_data_is_an_error_that_says_why(
    reasons: list[str | None], overrides: list[str], message: str
):
    with pytest.raises(DataError, match=message):
        check_reports({"train": report_of(*reasons)}, load_config({}, overrides), kept_in="d")


def test_an_unusable_evaluation_set_is_called_by_its_field():
    with pytest.raises(DataError, match=r"^data\.eval\.my_eval_set: there are no rows"):
        check_reports({"eval_my_eval_set": report_of()}, load_config({}), kept_in="d")


def test_what_is_dropped_of_usable_data_is_said(caplog: pytest.LogCaptureFixture):
    reports = {"train": report_of(None, "tie", "too_long", "tie"), "eval": report_of(None)}
    with caplog.at_level(logging.WARNING):
        check_reports(reports, load_config({}), kept_in="run/dropped")
    assert [record.message for record in caplog.records] == [
        "data.train: 3 of 4 rows dropped (2 tie, 1 too_long); see run/dropped"
    ]


def test_a_run_goes_on_with_the_rows_that_it_had():
    reports = {"train": report_of(None, None, digest=5)}
    check_unchanged(reports, report_of(None, None, digest=5).as_dict())
    check_unchanged(reports, {})  # nothing is known of a first start


def test_rows_that_changed_since_the_first_start_are_refused():
    reports = {"train": report_of(None), "eval_b": report_of(None, "tie", digest=6)}
    before = {"x": report_of(None, digest=5).as_dict()["x"]}
    with pytest.raises(
        DataError,
        match=r"^data\.eval\.b: x has changed .*\(its 1 rows then are not its 2 now\).*run\.name$",
    ):
        check_unchanged({"eval_b": reports["eval_b"]}, before)
    with pytest.raises(DataError, match=r"^data\.train: x has changed"):
        check_unchanged(reports, before)
