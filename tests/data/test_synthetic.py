import json
import re
from collections import Counter
from collections.abc import Callable

import pytest

from rayrm.data.formats import parse_line
from rayrm.data.pairs import ConversationPair
from rayrm.data.synthetic import KINDS, Split, generate_pairs, split_of

Row = dict[str, list[dict[str, str]]]

SPLITS: tuple[Split, ...] = ("train", "eval")
KIND_OF = {thing: kind for kind, things in KINDS.items() for thing in things}


def text(row: Row, side: str) -> str:
    (message,) = row[side]
    return message["content"]


def things(row: Row, side: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text(row, side)) if word in KIND_OF]


def asked(row: Row) -> list[str]:
    return [word for word in re.findall(r"\w+", text(row, "prompt")) if word in KINDS]


def accuracy_without_the_prompt(score: Callable[[Row, str], float]) -> float:
    gaps = [score(row, "chosen") - score(row, "rejected") for row in generate_pairs("train")]
    return sum((gap > 0) + (gap == 0) / 2 for gap in gaps) / len(gaps)


def test_the_first_row_is_this_one():
    assert next(generate_pairs("train")) == {
        "prompt": [
            {"role": "user", "content": "I need a drink, a tool, a metal and a country."},
        ],
        "chosen": [
            {
                "role": "assistant",
                "content": "Let me think. My answer is cocoa, wrench, copper and Peru.",
            }
        ],
        "rejected": [
            {
                "role": "assistant",
                "content": "Happy to help! Here is my list: golf, hammer, nickel and spinach.",
            }
        ],
    }


def test_the_same_arguments_give_the_same_rows_and_fewer_are_the_first_of_more():
    rows = list(generate_pairs("train", 20))
    assert rows == list(generate_pairs("train", 20))
    assert rows[:5] == list(generate_pairs("train", 5))
    assert rows != list(generate_pairs("train", 20, seed=1))


@pytest.mark.parametrize(("split", "num_pairs"), [("train", 4000), ("eval", 400)])
def test_chosen_names_what_was_asked_and_rejected_strays_twice_or_more(
    split: Split, num_pairs: int
):
    rows = list(generate_pairs(split))
    assert len(rows) == num_pairs
    for row in rows:
        kinds = asked(row)
        assert [KIND_OF[thing] for thing in things(row, "chosen")] == kinds
        rejected = [KIND_OF[thing] for thing in things(row, "rejected")]
        assert len(set(rejected)) == len(kinds)
        assert sum(kind not in kinds for kind in rejected) >= 2


def test_what_is_named_together_in_one_split_never_is_in_the_other():
    replies: dict[Split, set[frozenset[str]]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for row in generate_pairs(split):
            for side in ("chosen", "rejected"):
                assert split_of(things(row, side)) == split
                replies[split].add(frozenset(things(row, side)))
    assert not replies["train"] & replies["eval"]


def test_without_the_prompt_neither_length_nor_mixture_tells():
    rules: list[Callable[[Row, str], float]] = [
        lambda row, side: len(text(row, side)),
        lambda row, side: len(text(row, side).split()),
        lambda row, side: len({KIND_OF[thing] for thing in things(row, side)}),
    ]
    for rule in rules:
        assert accuracy_without_the_prompt(rule) == pytest.approx(0.5, abs=0.03)


def test_words_are_as_frequent_in_chosen_as_in_rejected_replies():
    counts = {"chosen": Counter[str](), "rejected": Counter[str]()}
    for row in generate_pairs("train"):
        for side, count in counts.items():
            count.update(re.findall(r"\w+", text(row, side)))
    assert counts["chosen"].keys() == counts["rejected"].keys() >= KIND_OF.keys()
    for word, chosen in counts["chosen"].items():
        total = chosen + counts["rejected"][word]
        # four and a half standard deviations of a fair coin
        assert abs(chosen / total - 0.5) < 4.5 * 0.5 / total**0.5, word


def test_rows_are_pairs_to_the_row_reader():
    row = next(generate_pairs("eval"))
    assert isinstance(parse_line(json.dumps(row), {}), ConversationPair)
