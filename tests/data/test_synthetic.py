import re
from collections import Counter

import pytest

from rayrm.data.formats import parse_line
from rayrm.data.pairs import ConversationPair
from rayrm.data.synthetic import KINDS, generate_pairs, split_of

KIND_OF = {thing: kind for kind, things in KINDS.items() for thing in things}


def kinds_in(row: dict[str, list[dict[str, str]]], side: str) -> list[str]:
    words = re.findall(r"\w+", row[side][0]["content"])
    return [KIND_OF[word] for word in words if word in KIND_OF]


def asked(row: dict[str, list[dict[str, str]]]) -> str:
    (kind,) = [w for w in re.findall(r"\w+", row["prompt"][0]["content"]) if w in KINDS]
    return kind


@pytest.mark.parametrize(("split", "num_pairs"), [("train", 4000), ("eval", 400)])
def test_every_chosen_reply_keeps_to_the_kind_and_every_rejected_one_strays_once(
    split: str, num_pairs: int
):
    rows = list(generate_pairs("train" if split == "train" else "eval"))
    assert len(rows) == num_pairs
    for row in rows:
        assert set(kinds_in(row, "chosen")) == {asked(row)}
        strays = [kind for kind in kinds_in(row, "rejected") if kind != asked(row)]
        assert len(strays) == 1


def test_the_same_arguments_give_the_same_rows_and_fewer_are_the_first_of_more():
    rows = list(generate_pairs("train", 20))
    assert rows == list(generate_pairs("train", 20))
    assert rows[:5] == list(generate_pairs("train", 5))
    assert rows != list(generate_pairs("train", 20, seed=1))


def test_what_is_named_together_in_one_split_never_is_in_the_other():
    for split in ("train", "eval"):
        for row in generate_pairs(split):
            for side in ("chosen", "rejected"):
                words = re.findall(r"\w+", row[side][0]["content"])
                assert split_of([word for word in words if word in KIND_OF]) == split


def test_the_longer_reply_is_as_often_the_wrong_one():
    longer = Counter(
        (len(row["chosen"][0]["content"]) > len(row["rejected"][0]["content"]))
        for row in generate_pairs("train")
    )
    assert longer[True] / longer.total() == pytest.approx(0.5, abs=0.05)


def test_rows_are_pairs_to_the_row_reader():
    import json

    row = next(generate_pairs("eval"))
    assert isinstance(parse_line(json.dumps(row), {}), ConversationPair)
