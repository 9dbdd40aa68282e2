import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrm.data.columns import COLUMNS
from rayrm.data.formats import parse_line
from rayrm.data.pairs import REASONS, ConversationPair, Drop, Pair, Reason, TextPair, TokenPair


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def bot(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def parse(row: Any, columns: dict[str, str] | None = None) -> Pair | Drop:
    return parse_line(json.dumps(row), columns or {})


def check_dropped(row: Any, reason: Reason, detail: str) -> None:
    drop = parse(row)
    assert isinstance(drop, Drop)
    assert (drop.reason, detail in drop.detail) == (reason, True), drop


def text_row(**more: Any) -> dict[str, Any]:
    return {"prompt": "Name a colour.", "chosen": "Blue.", "rejected": "Seven.", **more}


ASK, YES, NO = user("Is it?"), bot("Yes."), bot("No.")
CHINESE = "请说出一种颜色的名字并说明你的理由"
ASKED = ConversationPair([ASK], [YES], [NO])
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def test_every_reason_has_a_meaning():
    assert set(REASONS) == set(get_args(Reason))


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        pytest.param(
            {"prompt": "Name a colour.", "chosen": " Blue.", "rejected": " Seven."},
            TextPair("Name a colour.", " Blue.", " Seven."),
            id="explicit prompt",
        ),
        pytest.param(
            {"chosen": "Paris ", "rejected": "London"},
            TextPair("", "Paris ", "London"),
            id="implicit prompt: not cut at a character",
        ),
        pytest.param(
            {"prompt": "", "chosen": "Blue.", "rejected": "Seven."},
            TextPair("", "Blue.", "Seven."),
            id="empty prompt",
        ),
        pytest.param(
            {"prompt": "2+2=", "chosen": "2+2=4", "rejected": "2+2=5"},
            TextPair("2+2=", "4", "5"),
            id="prompt repeated",
        ),
        pytest.param(
            {"prompt": CHINESE, "chosen": CHINESE + "蓝", "rejected": CHINESE + "七"},
            TextPair(CHINESE, "蓝", "七"),
            id="long prompt repeated without a border",
        ),
        pytest.param(
            {"prompt": "The sky is", "chosen": "The sky is blue.", "rejected": "Green."},
            TextPair("The sky is", "The sky is blue.", "Green."),
            id="only one reply repeats the prompt",
        ),
        pytest.param(
            {"prompt": "Hi", "chosen": "Hi! How are you?", "rejected": "High time."},
            TextPair("Hi", "Hi! How are you?", "High time."),
            id="short prompt that opens both replies by chance",
        ),
        pytest.param(
            text_row(messages=None, tools=[{"name": "f"}], chat_template_kwargs={}),
            TextPair("Name a colour.", "Blue.", "Seven."),
            id="what only templates read is left aside",
        ),
        pytest.param(
            text_row(chosen="One.\u2028Two."),
            TextPair("Name a colour.", "One.\u2028Two.", "Seven."),
            id="U+2028 is a character like others",
        ),
    ],
)  # fmt: skip
def test_text_rows(row: dict[str, Any], pair: Pair):
    assert parse(row) == pair


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        pytest.param(
            {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, ASKED, id="explicit prompt"
        ),
        pytest.param({"chosen": [ASK, YES], "rejected": [ASK, NO]}, ASKED, id="implicit prompt"),
        pytest.param({"prompt": "Is it?", "chosen": [YES], "rejected": [NO]}, ASKED, id="text"),
        pytest.param({"prompt": [ASK], "chosen": "Yes.", "rejected": "No."}, ASKED, id="text says"),
        pytest.param({"prompt": ASK, "chosen": YES, "rejected": NO}, ASKED, id="single messages"),
        pytest.param(
            {"prompt": [ASK], "chosen": "Yes.", "rejected": [NO]}, ASKED, id="one text, one list"
        ),
        pytest.param(
            {"prompt": [ASK], "chosen": [ASK, YES], "rejected": [ASK, NO]},
            ASKED,
            id="prompt repeated as messages",
        ),
        pytest.param(
            {"prompt": "Is it? ", "chosen": [ASK, YES], "rejected": [ASK, NO]},
            ASKED,
            id="prompt repeated, as text and as message (UltraFeedback)",
        ),
        pytest.param(
            {
                "prompt": "Is it?",
                "chosen": [system("Be brief."), ASK, YES],
                "rejected": [system("Be brief."), ASK, NO],
            },
            ConversationPair([system("Be brief."), ASK], [YES], [NO]),
            id="prompt repeated behind a system turn",
        ),
        pytest.param(
            {
                "prompt": [system("Be brief.")],
                "chosen": [ASK, YES],
                "rejected": [ASK, NO],
            },
            ConversationPair([system("Be brief."), ASK], [YES], [NO]),
            id="prompt is the system turn",
        ),
        pytest.param({"messages": [ASK], "chosen": "Yes.", "rejected": NO}, ASKED, id="messages"),
        pytest.param(
            {"messages": [ASK, YES], "chosen": [ASK, YES], "rejected": [ASK, NO]},
            ASKED,
            id="messages beside whole conversations",
        ),
        pytest.param({"prompt": "", "chosen": [YES], "rejected": [NO]},
            ConversationPair([], [YES], [NO]), id="no prompt at all"),
        pytest.param(
            {"chosen": [ASK, YES, user("So?"), YES], "rejected": [ASK, YES, user("So?"), NO]},
            ConversationPair([ASK, YES, user("So?")], [YES], [NO]),
            id="shared up to the last reply",
        ),
        pytest.param(
            {"chosen": [ASK, YES], "rejected": [ASK, NO, user("So?"), YES]},
            ConversationPair([ASK], [YES], [NO, user("So?"), YES]),
            id="sides of different length",
        ),
        pytest.param(
            {"chosen": [ASK, YES], "rejected": [ASK, YES, user("So?"), NO]},
            ConversationPair([ASK], [YES], [YES, user("So?"), NO]),
            id="one side begins like the whole other",
        ),
        pytest.param(
            {"chosen": [ASK, {"role": "bot", "content": "Yes."}], "rejected": [ASK, NO]},
            ConversationPair([ASK], [{"role": "bot", "content": "Yes."}], [NO]),
            id="a role that only the template knows",
        ),
        pytest.param(
            {
                "prompt": [user([{"type": "text", "text": "Is "}, {"value": "it?"}])],
                "chosen": [bot([{"type": "text", "text": "Yes.", "image_url": None}])],
                "rejected": [NO],
            },
            ASKED,
            id="text parts are joined",
        ),
        pytest.param(
            {
                "prompt": [{"role": "user", "content": "Is it?", "tool_calls": None, "name": None}],
                "chosen": [bot(None, tool_calls=[{**CALL, "id": None}])],
                "rejected": [bot("No.", tool_calls=[])],
            },
            ConversationPair([ASK], [bot("", tool_calls=[CALL])], [NO]),
            id="keys that Arrow filled with null, a reply that is a tool call",
        ),
        pytest.param(
            {
                "prompt": [ASK],
                "chosen": [bot("", tool_calls=[CALL]), {"role": "tool", "content": "1"}, YES],
                "rejected": [bot("", tool_calls=[CALL]), {"role": "tool", "content": "1"}, NO],
            },
            ConversationPair(
                [ASK, bot("", tool_calls=[CALL]), {"role": "tool", "content": "1"}], [YES], [NO]
            ),
            id="a tool was used on the way",
        ),
        pytest.param(
            {
                "prompt": [ASK],
                "chosen": [
                    bot("", tool_calls=[{"function": {"name": "f", "arguments": '{"x": null}'}}])
                ],
                "rejected": [NO],
            },
            ConversationPair(
                [ASK],
                [bot("", tool_calls=[{"function": {"name": "f", "arguments": '{"x": null}'}}])],
                [NO],
            ),
            id="arguments that are text stay as they are",
        ),
    ],
)  # fmt: skip
def test_conversation_rows(row: dict[str, Any], pair: Pair):
    assert parse(row) == pair


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ({"from": "gpt", "value": "Yes."}, {"from": "gpt", "value": "No."}),
        ("Yes.", "No."),
        ([YES], [NO]),
    ],
)
def test_sharegpt_rows(chosen: Any, rejected: Any):
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Is it?"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "1"},
    ]
    row = {"conversations": turns, "chosen": chosen, "rejected": rejected}
    called = bot("", tool_calls=[CALL])
    prompt = [system("Be brief."), ASK, called, {"role": "tool", "content": "1"}]
    assert parse(row) == ConversationPair(prompt, [YES], [NO])


TRANSCRIPT = "\n\nHuman: Is it?\n\nAssistant: Yes.\n\nHuman: Really?\n\nAssistant:"


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": TRANSCRIPT + " Yes.", "rejected": TRANSCRIPT + " No."},
        {"prompt": TRANSCRIPT, "chosen": " Yes.", "rejected": " No."},
        {"prompt": TRANSCRIPT, "chosen": TRANSCRIPT + " Yes.", "rejected": TRANSCRIPT + " No."},
        {"prompt": "Really?", "chosen": TRANSCRIPT + " Yes.", "rejected": TRANSCRIPT + " No."},
    ],
    ids=["implicit", "explicit", "repeated", "last question"],
)
def test_transcripts_become_conversations_and_keep_their_text(row: dict[str, Any]):
    assert parse(row) == ConversationPair(
        [ASK, YES, user("Really?")],
        [YES],
        [NO],
        transcripts=(TRANSCRIPT + " Yes.", TRANSCRIPT + " No."),
    )


def test_sides_are_prompt_and_reply_in_full():
    assert TextPair("a", "b", "c").sides == ("ab", "ac")
    assert TokenPair([1], [2], [3]).sides == ([1, 2], [1, 3])
    chosen, rejected = ConversationPair([ASK], [YES], [NO], transcripts=("yes", "no")).sides
    assert (chosen.messages, chosen.transcript) == ([ASK, YES], "yes")
    assert (rejected.messages, rejected.transcript) == ([ASK, NO], "no")


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        (
            {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]},
            TokenPair([1], [2, 3], [4]),
        ),
        (
            {"chosen_input_ids": [1, 2], "rejected_input_ids": [1, 3], "margin": 1},
            TokenPair([], [1, 2], [1, 3], 1.0),
        ),
        (
            {**text_row(), "prompt_ids": None, "chosen_ids": None, "rejected_ids": None},
            TextPair("Name a colour.", "Blue.", "Seven."),
        ),
    ],
)
def test_token_rows(row: dict[str, Any], pair: Pair):
    assert parse(row) == pair


@pytest.mark.parametrize(
    "winner", [{"winner": "model_b"}, {"winner_model_a": 0, "winner_model_b": 1}]
)
@pytest.mark.parametrize(
    "sides",
    [
        {"conversation_a": [ASK, NO], "conversation_b": [ASK, YES]},
        {"prompt": '["Is it?"]', "response_a": '["No."]', "response_b": '["Yes."]'},
        {"prompt": "Is it?", "response_a": "No.", "response_b": "Yes."},
    ],
    ids=["conversations", "JSON-encoded turns", "texts"],
)
def test_arena_rows(sides: dict[str, Any], winner: dict[str, Any]):
    assert parse({**sides, **winner}) == ASKED


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Is it?", "completions": ["So so.", "No.", "Yes."], "scores": [2, 1, 4]},
        {
            "instruction": "Is it?",
            "completions": [
                {"response": "Yes.", "overall_score": 4.0},
                {"response": "No.", "overall_score": 1.0},
            ],
        },
    ],
    ids=["scores", "UltraFeedback"],
)
def test_scored_completions_are_the_best_against_the_worst(row: dict[str, Any]):
    assert parse(row) == TextPair("Is it?", "Yes.", "No.", margin=3.0)


@pytest.mark.parametrize(
    ("margin", "expected"), [(0.5, 0.5), (-1, -1.0), (10_000, 1e4), (None, 0.0)]
)
def test_margins(margin: Any, expected: float):
    assert parse(text_row(margin=margin)) == TextPair("Name a colour.", "Blue.", "Seven.", expected)


def test_a_row_without_margin_has_none_whatever_came_before():
    pairs = [parse(text_row(margin=2)), parse(text_row()), parse(text_row(margin=2))]
    assert [pair.margin for pair in pairs if not isinstance(pair, Drop)] == [2.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([{"name": "f", "strict": None}], [{"name": "f"}]),
        ('[{"name": "f"}]', [{"name": "f"}]),
        ("", []),
        (" ", []),
        ("null", []),
        (None, []),
        ([], []),
    ],
)
def test_tools(tools: Any, expected: list[Any]):
    pair = parse({"chosen": [ASK, YES], "rejected": [ASK, NO], "tools": tools})
    assert pair == ConversationPair([ASK], [YES], [NO], tools=expected)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"enable_thinking": False, "date": None}, {"enable_thinking": False}),
        ('{"enable_thinking": false}', {"enable_thinking": False}),
        ("", {}),
        (None, {}),
    ],
)
def test_chat_template_kwargs(kwargs: Any, expected: dict[str, Any]):
    pair = parse({"chosen": [ASK, YES], "rejected": [ASK, NO], "chat_template_kwargs": kwargs})
    assert pair == ConversationPair([ASK], [YES], [NO], chat_template_kwargs=expected)


def test_layouts_may_change_from_row_to_row():
    rows = [
        {"chosen": [ASK, YES], "rejected": [ASK, NO]},
        text_row(),
        {"prompt": "Is it?", "chosen": [YES], "rejected": [NO]},
        {"chosen_ids": [1], "rejected_ids": [2]},
    ]
    kinds = [type(parse(row)) for row in rows]
    assert kinds == [ConversationPair, TextPair, ConversationPair, TokenPair]


def test_columns_are_renamed():
    row = {"question": "Q", "chosen": "an index", "better": "A", "worse": "B"}
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    assert parse(row, columns) == TextPair("Q", "A", "B")


def test_columns_may_change_places():
    columns = {"chosen": "rejected", "rejected": "chosen"}
    assert parse(text_row(), columns) == TextPair("Name a colour.", "Seven.", "Blue.")


@pytest.mark.parametrize("missing", ["chosen", "margin"])
def test_a_renamed_column_must_be_there(missing: str):
    drop = parse(text_row(), {missing: "other"})
    assert drop == Drop(
        "missing_field",
        f"there is no other, which data.columns names for {missing}; "
        "the row has prompt, chosen, rejected",
    )


@pytest.mark.parametrize(
    "row",
    [
        text_row(margin=1),
        {"chosen": [ASK, YES], "rejected": [ASK, NO], "tools": [], "chat_template_kwargs": {}},
        {"messages": [ASK], "chosen": "Yes.", "rejected": "No."},
        {"conversations": [ASK], "chosen": "Yes.", "rejected": "No."},
        {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]},
        {"prompt_input_ids": [1], "chosen_input_ids": [2], "rejected_input_ids": [3]},
        {"conversation_a": [ASK, YES], "conversation_b": [ASK, NO], "winner": "model_a"},
        {"prompt": "Q", "response_a": "A", "response_b": "B", "winner_model_a": 1},
        {"prompt": "Q", "response_a": "A", "response_b": "B", "winner_model_b": 1},
        {"instruction": "Q", "completions": ["A", "B"], "scores": [1, 2]},
    ],
)
def test_every_layout_is_read_under_other_names(row: dict[str, Any]):
    columns = {name: f"my_{name}" for name in row}
    assert columns.keys() <= COLUMNS
    pair = parse({f"my_{name}": value for name, value in row.items()}, columns)
    assert not isinstance(pair, Drop)
    assert pair == parse(row)


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        ("", "not JSON: Expecting value"),
        ('{"chosen": "a", "reje', "not JSON: Unterminated string"),
        ("true", "the line is a boolean, not an object"),
        ("[1, 2]", "the line is a list, not an object"),
        ('{"margin": ' + "1" * 5000 + "}", "not JSON: Exceeds the limit"),
        ('{"chosen": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"chosen": "\\ud800", "rejected": "a"}', "half of a surrogate pair"),
        ('{"chosen": "\udcff", "rejected": "a"}', "half of a surrogate pair"),
    ],
)
def test_lines_that_cannot_be_read(raw: str, detail: str):
    drop = parse_line(raw, {})
    assert isinstance(drop, Drop)
    assert (drop.reason, detail in drop.detail) == ("unparsable", True), drop


@pytest.mark.parametrize("frame", ["\ufeff{}", "{}\r", " {} "])
def test_marks_and_spaces_around_a_row_do_not_matter(frame: str):
    raw = frame.replace("{}", '{"chosen": "\\ud83d\\ude00", "rejected": "b"}')
    assert parse_line(raw, {}) == TextPair("", "\U0001f600", "b")


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (text_row(chosen=None), "wrong_type", "chosen is null"),
        (text_row(chosen=True), "wrong_type", "chosen is a boolean"),
        (text_row(rejected=42), "wrong_type", "rejected is a number"),
        (text_row(prompt=None), "wrong_type", "prompt is null"),
        (text_row(rejected=["a"]), "wrong_type", "rejected, turn 0 is text, not a message"),
        ({"prompt": "Q", "chosen": "A"}, "missing_field", "no rejected; the row has prompt, chos"),
        ({"text": "A"}, "missing_field", "no chosen and no rejected; the row has text;"),
        ({}, "missing_field", "the row has no columns"),
        ({str(n): n for n in range(99)}, "missing_field", "10, 11 and more;"),
        (text_row(chosen=""), "empty_response", "chosen is empty"),
        (text_row(rejected=" \n"), "empty_response", "rejected is empty"),
        ({"prompt": "2+2=", "chosen": "2+2=4", "rejected": "2+2="}, "empty_response", "rejected"),
        (text_row(rejected="Blue."), "identical_pair", "same text"),
        (text_row(rejected="Blue. "), "identical_pair", "same text"),
        (text_row(margin=float("nan")), "bad_margin", "margin is nan"),
        (text_row(margin=float("inf")), "bad_margin", "margin is inf"),
        (text_row(margin=-10_001), "bad_margin", "margin is -10001, not between"),
        (text_row(margin=10**400), "bad_margin", "margin is 1000"),
        (text_row(margin="0.5"), "bad_margin", "margin is text, not a number"),
        (text_row(margin=True), "bad_margin", "margin is a boolean, not a number"),
        ({"prompt": "Q", "completion": "A", "label": True}, "not_a_pair", "KTO"),
        ({"messages": [ASK, YES], "label": False}, "not_a_pair", "KTO"),
        ({"prompt": "Q", "completions": ["A"], "labels": [True]}, "not_a_pair", "steps"),
        ({"chosen_ids": [1]}, "missing_field", "no rejected_ids; the row has chosen_ids"),
        ({"chosen_ids": [1], "rejected_ids": []}, "empty_response", "rejected_ids is empty"),
        ({"chosen_ids": [1], "rejected_ids": [1]}, "identical_pair", "are equal"),
        ({"chosen_ids": [1], "rejected_ids": [-1]}, "wrong_type", "rejected_ids holds"),
        ({"chosen_ids": [1], "rejected_ids": [False]}, "wrong_type", "rejected_ids holds"),
        ({"chosen_ids": [1], "rejected_ids": "2"}, "wrong_type", "rejected_ids is text"),
    ],
)  # fmt: skip
def test_rows_that_are_dropped(row: dict[str, Any], reason: Reason, detail: str):
    check_dropped(row, reason, detail)


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason", "detail"),
    [
        ([ASK, YES], None, "wrong_type", "rejected is null"),
        ([ASK, YES], [ASK, 7], "wrong_type", "rejected, turn 1 is a number, not a message"),
        ([ASK, bot(None)], [ASK, NO], "wrong_type", "chosen, turn 1: content is null, not text"),
        ([ASK, bot(7)], [ASK, NO], "wrong_type", "chosen, turn 1: content is a number, not text"),
        ([user([{"type": "image"}]), YES], [ASK, NO], "wrong_type", "chosen, turn 0: content has"),
        ([{"content": "A"}], [NO], "wrong_type", "chosen, turn 0: role is null, not a name"),
        ([ASK, bot("A", tool_calls="f()")], [NO], "wrong_type", "tool_calls is text, not a list"),
        ([{"from": "function_call", "value": "f()"}], [NO], "wrong_type", "call is not JSON"),
        ([{"from": "function_call", "value": "[1]"}], [NO], "wrong_type", "is not an object"),
        ([ASK], [ASK, NO], "wrong_type", "chosen ends in a user turn, not in a reply"),
        ([], [NO], "empty_response", "chosen has no messages"),
        ([ASK, bot(" ")], [ASK, NO], "empty_response", "chosen ends in an empty reply"),
        ([ASK, YES], [ASK, YES], "identical_pair", "the same conversation"),
        ([ASK, YES], [ASK, bot(" Yes.\n")], "identical_pair", "the same conversation"),
        ([ASK, YES], [user("Is he?"), NO], "different_prompt", "chosen, turn 0: a user turn"),
        ([ASK, YES], [NO], "different_prompt", "chosen, turn 0: a user turn"),
        ([system("A"), ASK, YES], [system("B"), ASK, NO], "different_prompt", "a system turn"),
    ],
)
def test_conversations_that_are_dropped(chosen: Any, rejected: Any, reason: Reason, detail: str):
    check_dropped({"chosen": chosen, "rejected": rejected}, reason, detail)


@pytest.mark.parametrize(
    ("more", "reason", "detail"),
    [
        ({"prompt": "Was it?"}, "different_prompt", "both sides open with turns that are not"),
        ({"tools": "f()"}, "wrong_type", "tools is text, but not JSON"),
        ({"tools": {"name": "f"}}, "wrong_type", "tools is not a list of objects"),
        ({"tools": ["f"]}, "wrong_type", "tools is not a list of objects"),
        ({"tools": '["\\ud800"]'}, "unparsable", "half of a surrogate pair"),
        ({"chat_template_kwargs": []}, "wrong_type", "chat_template_kwargs is a list"),
        ({"chat_template_kwargs": "x"}, "wrong_type", "chat_template_kwargs is text, but not JSON"),
        ({"margin": "big"}, "bad_margin", "margin is text"),
    ],
)
def test_conversations_dropped_for_what_comes_with_them(
    more: dict[str, Any], reason: Reason, detail: str
):
    check_dropped({"chosen": [ASK, YES], "rejected": [ASK, NO], **more}, reason, detail)


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"messages": [ASK, YES], "chosen": "A", "rejected": "B"},
            "different_prompt", "messages ends in a reply"),
        ({"prompt": "Is he?", "chosen": TRANSCRIPT + " A", "rejected": TRANSCRIPT + " B"},
            "different_prompt", "the transcripts do not contain the prompt"),
        ({"chosen": TRANSCRIPT + " A", "rejected": TRANSCRIPT},
            "empty_response", "rejected ends in an empty reply"),
        ({"chosen": TRANSCRIPT + " A", "rejected": TRANSCRIPT + " B\n\nHuman: So?"},
            "wrong_type", "rejected ends in a user turn"),
        ({"chosen": TRANSCRIPT + " A", "rejected": TRANSCRIPT + "  A "}, "identical_pair", ""),
        ({"chosen": "\n\nHuman: Is it?", "rejected": "\n\nHuman: Is it?\n\nAssistant: No."},
            "wrong_type", "chosen ends in a user turn"),
        ({"chosen": "\n\nHuman: Is it?\n\nAssistant: No.", "rejected": "\n\nHuman: Is it?"},
            "wrong_type", "rejected ends in a user turn"),
        ({"chosen": {"a": 1}, "rejected": [NO]},
            "wrong_type", "chosen is an object, not text or a list of messages"),
    ],
)  # fmt: skip
def test_prompts_and_transcripts_that_do_not_fit(row: dict[str, Any], reason: Reason, detail: str):
    check_dropped(row, reason, detail)


@pytest.mark.parametrize(
    ("more", "reason", "detail"),
    [
        ({"winner": "tie (bothbad)"}, "tie", "the vote is 'tie (bothbad)'"),
        ({"winner_model_a": 0, "winner_model_b": 0, "winner_tie": 1}, "tie", "the vote is 'tie'"),
        ({"winner": "gpt-4"}, "wrong_type", "winner is 'gpt-4'"),
        ({"winner": None}, "missing_field", "there is no one winner"),
        ({"winner": "model_a", "response_a": '["A", "B"]'}, "wrong_type", "1 turns in prompt, 2"),
        ({"winner": "model_a", "response_a": "[null]"}, "wrong_type", "chosen, turn 1: content is"),
        ({"winner": "model_a", "response_a": '["\\ud800"]'}, "unparsable", "surrogate"),
    ],
)  # fmt: skip
def test_votes_that_are_dropped(more: dict[str, Any], reason: Reason, detail: str):
    row = {"prompt": '["Q"]', "response_a": '["A"]', "response_b": '["B"]', **more}
    check_dropped(row, reason, detail)


@pytest.mark.parametrize(
    ("completions", "scores", "reason"),
    [
        (["A", "B"], [3, 3], "tie"),
        (["A", "B"], [3], "wrong_type"),
        (["A"], [3], "wrong_type"),
        (["A", "B"], [3, "4"], "wrong_type"),
        (["A", None], [3, 2], "wrong_type"),
        (["A", "B"], [3, float("nan")], "wrong_type"),
        (["A", "B"], [3, 10**400], "wrong_type"),
        ([{"response": "A", "overall_score": 1}, "B"], None, "wrong_type"),
        ([{"response": "A"}, {"response": "B"}], None, "missing_field"),
    ],
)
def test_scores_that_make_no_pair(completions: Any, scores: Any, reason: Reason):
    drop = parse({"prompt": "Q", "completions": completions, "scores": scores})
    assert isinstance(drop, Drop)
    assert drop.reason == reason, drop


TEXT = st.text(st.characters(exclude_categories=()), max_size=9)  # halves of characters too
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
KEYS = st.sampled_from(["role", "content", "from", "value", "tool_calls", "name", "text"])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "bot"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": TEXT | JSON}, optional={"tool_calls": JSON})
    | st.fixed_dictionaries({"from": st.just("gpt") | TEXT, "value": TEXT | JSON}),
    max_size=3,
)
SIDES = TEXT | MESSAGES | JSON
ROWS = st.dictionaries(st.sampled_from([*sorted(COLUMNS), "label", "x"]), SIDES, max_size=6)
PAIRED_ROWS = st.fixed_dictionaries(
    {"chosen": SIDES, "rejected": SIDES},
    optional={
        "prompt": SIDES,
        "messages": MESSAGES,
        "margin": st.floats(-2, 2) | JSON,
        "tools": st.just([]) | JSON,
        "chat_template_kwargs": JSON,
    },
)


@settings(deadline=None)
@given(JSON | ROWS | PAIRED_ROWS)
def test_any_json_value_is_a_pair_or_a_reason(value: Any):
    outcome = parse(value)
    assert isinstance(outcome, TextPair | ConversationPair | TokenPair | Drop)
    if isinstance(outcome, Drop):
        assert outcome.reason in REASONS
        assert outcome.detail
