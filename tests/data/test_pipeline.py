import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrm.config.schema import ModelSection
from rayrm.data.pipeline import PAIR_SCHEMA, pairs_of, tokenize_table
from rayrm.data.sources import RAW_SCHEMA
from rayrm.data.tokenize import TokenizedPair
from tests.builders import word_tokenizer

TEXTS = {"prompt": "Name a colour.", "chosen": " Blue.", "rejected": " Seven."}


@pytest.fixture(scope="module")
def model_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model section of a folder that holds a tokenizer whose padding is its EOS."""
    folder = tmp_path_factory.mktemp("model")
    word_tokenizer(pad_token="<eos>").save_pretrained(folder)
    return ModelSection(name_or_path=str(folder)).model_dump_json()


def tokenize(
    model_json: str,
    rows: Sequence[Any],
    *,
    max_length: int = 100,
    columns: dict[str, str] | None = None,
) -> pa.Table:
    """The table of rows; what is no bytes is written as JSON."""
    texts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    raw = pa.table([[3] * len(rows), [10 + i for i in range(len(rows))], texts], schema=RAW_SCHEMA)
    return tokenize_table(raw, model_json=model_json, max_length=max_length, columns=columns or {})


def test_a_pair_becomes_ids_lengths_and_margin(model_json: str):
    table = tokenize(model_json, [{**TEXTS, "margin": 0.5}])
    assert table.schema == PAIR_SCHEMA
    (row,) = table.to_pylist()
    encode: Any = word_tokenizer()
    sides = [encode(TEXTS["prompt"] + TEXTS[side])["input_ids"] for side in ("chosen", "rejected")]
    assert row["prompt_ids"] + row["chosen_ids"] == [*sides[0], encode.eos_token_id]
    assert row["prompt_ids"] + row["rejected_ids"] == [*sides[1], encode.eos_token_id]
    assert (row["prompt_length"], row["chosen_length"], row["rejected_length"]) == (
        len(row["prompt_ids"]),
        len(sides[0]) + 1,
        len(sides[1]) + 1,
    )
    assert (row["file"], row["row"], row["margin"]) == (3, 10, 0.5)
    assert (row["reason"], row["detail"], row["raw"]) == (None, None, None)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"{broken", "unparsable"),
        (b"true", "unparsable"),
        (b'{"chosen": "caf\xe9", "rejected": "b"}', "unparsable"),
        (b"\xff\xfe", "unparsable"),
        (b'{"chosen": "\xed\xa0\x80", "rejected": "b"}', "unparsable"),
        ({"chosen": "a"}, "missing_field"),
        ({"chosen": "a", "rejected": None}, "wrong_type"),
        ({"chosen": "a", "rejected": " "}, "empty_response"),
        ({"chosen": "a", "rejected": "a"}, "identical_pair"),
        ({"chosen": "a", "rejected": "b" * 200}, "too_long"),
        ({"chosen": "a", "rejected": "b", "margin": "big"}, "bad_margin"),
    ],
)
def test_a_row_that_is_no_pair_keeps_its_text_and_says_why(model_json: str, row: Any, reason: str):
    table = tokenize(model_json, [row])
    assert table.schema == PAIR_SCHEMA
    (dropped,) = table.to_pylist()
    raw = row if isinstance(row, bytes) else json.dumps(row).encode()
    assert (dropped["file"], dropped["row"]) == (3, 10)
    assert (dropped["reason"], dropped["raw"]) == (reason, raw)
    assert dropped["detail"]
    assert dropped["prompt_ids"] is dropped["chosen_ids"] is dropped["margin"] is None


def test_one_bad_row_costs_one_row(model_json: str):
    table = tokenize(model_json, [TEXTS, b"\xff", {**TEXTS, "chosen": " Green."}])
    assert table["row"].to_pylist() == [10, 11, 12]
    assert table["reason"].to_pylist() == [None, "unparsable", None]


def test_bytes_that_are_no_utf8_are_told_by_their_place(model_json: str):
    table = tokenize(model_json, [b'{"chosen": "\xff"}'])
    assert table["detail"].to_pylist() == ["not UTF-8 at byte 12; save the file as UTF-8"]


def test_columns_are_renamed(model_json: str):
    row = {"question": "Name a colour.", "chosen": " Blue.", "rejected": " Seven."}
    table = tokenize(model_json, [row, TEXTS], columns={"prompt": "question"})
    assert table["reason"].to_pylist() == [None, "missing_field"]


def test_max_length_is_the_most_tokens_of_a_side(model_json: str):
    (row,) = tokenize(model_json, [TEXTS]).to_pylist()
    longest = max(row["chosen_length"], row["rejected_length"])
    assert tokenize(model_json, [TEXTS], max_length=longest)["reason"].to_pylist() == [None]
    too_long = tokenize(model_json, [TEXTS], max_length=longest - 1)
    assert too_long["reason"].to_pylist() == ["too_long"]


def test_rows_before_the_first_are_left_out_and_not_tokenized(model_json: str):
    raw = pa.table(
        [[0, 0, 1, 1], [3, 7, 0, 2], [json.dumps(TEXTS).encode()] * 4], schema=RAW_SCHEMA
    )
    options: Any = {"model_json": model_json, "max_length": 512, "columns": {}}
    for first, expected in (
        ((0, 0), [(0, 3), (0, 7), (1, 0), (1, 2)]),
        ((0, 7), [(0, 7), (1, 0), (1, 2)]),
        ((1, 1), [(1, 2)]),
        ((2, 0), []),
    ):
        table = tokenize_table(raw, first=first, **options)
        found = zip(table["file"].to_pylist(), table["row"].to_pylist(), strict=True)
        assert list(found) == expected


def test_no_rows_are_an_empty_table(model_json: str):
    table = tokenize(model_json, [])
    assert (table.num_rows, table.schema) == (0, PAIR_SCHEMA)


def test_a_digest_tells_every_text_at_every_place(model_json: str):
    other = TEXTS | {"rejected": " Eight."}
    broken = TEXTS | {"rejected": None}
    first, again = (tokenize(model_json, [TEXTS, other, TEXTS, broken]) for _ in range(2))
    digests = first["digest"].to_pylist()
    assert digests == again["digest"].to_pylist()
    assert len(set(digests)) == 4
    assert tokenize(model_json, [other])["digest"].to_pylist()[0] not in digests


def as_lists(pairs: list[TokenizedPair]) -> list[tuple[list[int], list[int], list[int], float]]:
    return [
        (x.prompt_ids.tolist(), x.chosen_ids.tolist(), x.rejected_ids.tolist(), x.margin)
        for x in pairs
    ]


def table_of(*pairs: tuple[list[int], list[int], list[int], float]) -> pa.Table:
    names = ("prompt_ids", "chosen_ids", "rejected_ids", "margin")
    rows = [dict(zip(names, pair, strict=True)) for pair in pairs]
    return pa.Table.from_pylist(rows, schema=PAIR_SCHEMA)


PAIRS = [([1, 2], [3], [4, 5], 0.0), ([], [6], [7, 8, 9], -2.0), ([1], [2], [3], 0.5)]


def test_pairs_come_out_of_a_table_as_they_went_in():
    pairs = pairs_of(table_of(*PAIRS))
    assert as_lists(pairs) == PAIRS
    assert pairs[0].prompt_ids.dtype == np.int32
    assert isinstance(pairs[0].margin, float)


@pytest.mark.parametrize(
    ("table", "pairs"),
    [
        pytest.param(table_of(*PAIRS).slice(1, 1), PAIRS[1:2], id="slice"),
        pytest.param(table_of(*PAIRS).slice(2), PAIRS[2:], id="slice to the end"),
        pytest.param(table_of(*PAIRS).slice(0, 0), [], id="empty slice"),
        pytest.param(table_of(*PAIRS).take([2, 0]), [PAIRS[2], PAIRS[0]], id="taken"),
        pytest.param(
            pa.concat_tables([table_of(*PAIRS[:1]), table_of(), table_of(*PAIRS).slice(1)]),
            PAIRS,
            id="chunks",
        ),
        pytest.param(PAIR_SCHEMA.empty_table(), [], id="no chunk"),
    ],
)
def test_pairs_come_out_of_a_table_however_it_was_cut(table: pa.Table, pairs: list[Any]):
    assert as_lists(pairs_of(table)) == pairs


def test_ids_that_training_reads_are_those_of_the_tokenizer(model_json: str):
    (pair,) = pairs_of(tokenize(model_json, [TEXTS]))
    decode = word_tokenizer().decode
    assert decode(np.concatenate([pair.prompt_ids, pair.chosen_ids])) == "Name a colour. Blue.<eos>"


def test_the_tokenizer_is_that_of_the_model_section(tmp_path: Path, model_json: str):
    word_tokenizer(adds="bos").save_pretrained(tmp_path)
    other = ModelSection(name_or_path=str(tmp_path)).model_dump_json()
    first, second = (tokenize(model, [TEXTS]) for model in (model_json, other))
    lengths = [table["chosen_length"].to_pylist()[0] for table in (first, second)]
    assert lengths[1] == lengths[0] + 1
