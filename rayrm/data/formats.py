"""One row of JSON text -> a preference pair, or the reason why it is none.

Each row is recognised by itself, so one file may mix layouts. `FORMATS` lists the layouts, a
function each; what they have in common is read in `columns` and `messages`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

from rayrm.data.columns import (
    MAX_MARGIN,
    Row,
    columns_of,
    decode,
    in_words,
    is_number,
    read_chat_template_kwargs,
    read_ids,
    read_margin,
    read_tools,
    with_standard_names,
)
from rayrm.data.messages import (
    asks_first,
    asks_last,
    check_ends_in_reply,
    is_transcript,
    num_shared_turns,
    opens_as_transcript,
    put_behind_prompt,
    read_messages,
    read_transcript,
)
from rayrm.data.pairs import (
    ConversationPair,
    Drop,
    Json,
    Message,
    Pair,
    Refusal,
    TextPair,
    TokenPair,
    refuse,
)


def parse_line(raw: str, columns: Mapping[str, str]) -> Pair | Drop:
    """Read one row; `columns` maps standard column names to those of this data set."""
    try:
        return _recognise(with_standard_names(_read_object(raw), columns))
    except Refusal as refusal:
        return refusal.args[0]
    except RecursionError:
        return Drop("unparsable", "its values are nested too deeply")


def _read_object(raw: str) -> Row:
    try:
        row = decode(raw.removeprefix("\ufeff"))
    except ValueError as error:
        refuse("unparsable", f"not JSON: {error}")
    if not isinstance(row, dict):
        remedy = "; a file that is one list is named .json" if isinstance(row, list) else ""
        refuse("unparsable", f"the line is {in_words(row)}, not an object{remedy}")
    return row


def _recognise(row: Row) -> Pair:
    for recognise in FORMATS:
        if (pair := recognise(row)) is not None:
            return pair
    missing = " and no ".join(name for name in ("chosen", "rejected") if name not in row)
    remedy = "if they have other names, map them in data.columns"
    refuse("missing_field", f"there is no {missing}; {columns_of(row)}; {remedy}")


def _token_ids(row: Row) -> Pair | None:
    """{prompt_ids?, chosen_ids, rejected_ids}, or the same as *_input_ids."""
    for ending in ("ids", "input_ids"):
        prompt, chosen, rejected = (f"{part}_{ending}" for part in ("prompt", "chosen", "rejected"))
        if row.get(chosen) is None and row.get(rejected) is None:
            continue
        prompt_ids = [] if row.get(prompt) is None else read_ids(row, prompt)
        chosen_ids, rejected_ids = read_ids(row, chosen), read_ids(row, rejected)
        if not chosen_ids or not rejected_ids:
            refuse("empty_response", f"{rejected if chosen_ids else chosen} is empty")
        if chosen_ids == rejected_ids:
            refuse("identical_pair", f"{chosen} and {rejected} are equal")
        return TokenPair(prompt_ids, chosen_ids, rejected_ids, read_margin(row))
    return None


def _transcripts(row: Row) -> Pair | None:
    r"""{prompt?, chosen, rejected} of "\n\nHuman: ...\n\nAssistant: ..." (HH-RLHF)."""
    if (texts := _texts(row)) is None:
        return None
    prompt, chosen, rejected = texts
    sides = (chosen, rejected)
    if any(map(is_transcript, sides)) and all(map(opens_as_transcript, sides)):
        if prompt.strip() not in chosen or prompt.strip() not in rejected:
            refuse("different_prompt", "the transcripts do not contain the prompt")
        transcripts = (chosen, rejected)
    elif is_transcript(prompt) and prompt.rstrip().endswith("\n\nAssistant:"):
        transcripts = (prompt + chosen, prompt + rejected)
    else:
        return None
    return _conversation_pair(row, [], *map(read_transcript, transcripts), transcripts=transcripts)


def _plain_texts(row: Row) -> Pair | None:
    """{prompt?, chosen, rejected}, all of them text."""
    if (texts := _texts(row)) is None:
        return None
    prompt, chosen, rejected = _with_prompt_once(*texts)
    for name, reply in (("chosen", chosen), ("rejected", rejected)):
        if not reply.strip():
            refuse("empty_response", f"{name} is empty, white space, or only the prompt")
    if chosen.strip() == rejected.strip():
        refuse("identical_pair", "chosen and rejected are the same text")
    return TextPair(prompt, chosen, rejected, read_margin(row))


def _conversations(row: Row) -> Pair | None:
    """{prompt?, chosen, rejected} with messages in at least one place.

    The prompt may be called messages or conversations, a message may be {from, value} (ShareGPT).
    """
    if "chosen" not in row or "rejected" not in row:
        return None
    chosen = read_messages(row["chosen"], "chosen", role="assistant")
    rejected = read_messages(row["rejected"], "rejected", role="assistant")
    context = _context_column(row)
    if context is None or (context != "prompt" and asks_first(chosen) and asks_first(rejected)):
        return _conversation_pair(row, [], chosen, rejected)
    prompt = [] if row[context] == "" else read_messages(row[context], context, role="user")
    if context != "prompt" and not asks_last(prompt):
        refuse("different_prompt", f"{context} ends in a reply, and waits for none")
    return _conversation_pair(row, prompt, chosen, rejected)


def _arena_votes(row: Row) -> Pair | None:
    """{conversation_a, conversation_b} or {prompt, response_a, response_b}, and who won.

    The vote is winner: model_a, or the one of winner_model_a, winner_model_b, winner_tie that is 1.
    """
    if "conversation_a" in row and "conversation_b" in row:
        sides = {"model_a": row["conversation_a"], "model_b": row["conversation_b"]}
    elif "response_a" in row and "response_b" in row:
        sides = {f"model_{side}": _arena_turns(row, f"response_{side}") for side in "ab"}
    else:
        return None
    votes = [name for name in ("model_a", "model_b", "tie") if row.get(f"winner_{name}") == 1]
    winner = votes[0] if len(votes) == 1 else row.get("winner")
    if not isinstance(winner, str):
        refuse("missing_field", f"there is no one winner; {columns_of(row)}")
    if winner.startswith(("tie", "both")):
        refuse("tie", f"the vote is {winner[:40]!r}")
    if winner not in sides:
        refuse("wrong_type", f"winner is {winner[:40]!r}, not model_a, model_b or tie")
    loser = "model_b" if winner == "model_a" else "model_a"
    return _recognise({**_extras(row), "chosen": sides[winner], "rejected": sides[loser]})


def _scored_completions(row: Row) -> Pair | None:
    """{prompt, completions, scores}: the best against the worst, their gap is the margin.

    UltraFeedback: {instruction, completions: [{response, overall_score}]}.
    """
    replies, scores = row.get("completions"), row.get("scores")
    if not isinstance(replies, list):
        return None
    if scores is None:
        answers = [answer if isinstance(answer, dict) else {} for answer in replies]
        if not any("overall_score" in answer for answer in answers):
            return None
        replies = [answer.get("response") for answer in answers]
        scores = [answer.get("overall_score") for answer in answers]
    scores = scores if isinstance(scores, list) else []
    numbers = [score for score in scores if is_number(score) and abs(score) <= MAX_MARGIN]
    if not len(numbers) == len(scores) == len(replies) >= 2:
        refuse("wrong_type", "it takes two completions or more, and a number for each as score")
    best, worst = numbers.index(max(numbers)), numbers.index(min(numbers))
    if best == worst:
        refuse("tie", "all completions have the same score")
    pair: dict[str, Json] = {"chosen": replies[best], "rejected": replies[worst]}
    question = "prompt" if "prompt" in row else "instruction"
    if question in row:
        pair["prompt"] = row[question]
    return _recognise({"margin": numbers[best] - numbers[worst], **_extras(row), **pair})


def _single_replies(row: Row) -> Pair | None:
    """{completion or messages, label} (KTO) and {completions, labels} (steps) are no pairs."""
    is_kto = isinstance(row.get("label"), bool) or {"completion", "label"} <= row.keys()
    if is_kto or {"completions", "labels"} <= row.keys():
        refuse("not_a_pair", "it labels single replies (KTO, steps): there are no two to compare")
    return None


FORMATS: tuple[Callable[[Row], Pair | None], ...] = (
    _token_ids,
    _transcripts,
    _plain_texts,
    _conversations,
    _arena_votes,
    _scored_completions,
    _single_replies,
)
"""The layouts, in the order in which they are tried: each returns a pair, refuses the row, or
returns None where the row is laid out otherwise."""


def _conversation_pair(
    row: Row,
    prompt: list[Message],
    chosen: list[Message],
    rejected: list[Message],
    *,
    transcripts: tuple[str, str] | None = None,
) -> ConversationPair:
    check_ends_in_reply(chosen, "chosen")
    check_ends_in_reply(rejected, "rejected")
    chosen, rejected = put_behind_prompt(prompt, chosen, rejected)
    shared = num_shared_turns(chosen, rejected)
    return ConversationPair(
        prompt=chosen[:shared],
        chosen=chosen[shared:],
        rejected=rejected[shared:],
        margin=read_margin(row),
        tools=read_tools(row),
        chat_template_kwargs=read_chat_template_kwargs(row),
        transcripts=transcripts,
    )


def _context_column(row: Row) -> str | None:
    if "prompt" in row:
        return "prompt"
    return next((name for name in ("messages", "conversations") if row.get(name)), None)


def _texts(row: Row) -> tuple[str, str, str] | None:
    prompt, chosen, rejected = row.get("prompt", ""), row.get("chosen"), row.get("rejected")
    if _context_column(row) not in (None, "prompt"):
        return None
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        return prompt, chosen, rejected
    return None


def _with_prompt_once(prompt: str, chosen: str, rejected: str) -> tuple[str, str, str]:
    """Cut the prompt off the replies if both repeat it.

    A short one may open both by chance ("Hi": "Hi!", "Hiking"): that it is repeated, and not just
    echoed, shows in a space behind it or in its own last character ("2+2=").
    """
    if not (prompt.strip() and chosen.startswith(prompt) and rejected.startswith(prompt)):
        return prompt, chosen, rejected
    rests = chosen[len(prompt) :], rejected[len(prompt) :]
    by_chance = prompt[-1].isalnum() and not all(rest[:1].isspace() for rest in rests)
    return (prompt, chosen, rejected) if by_chance and len(prompt) < 16 else (prompt, *rests)


def _arena_turns(row: Row, name: str) -> list[Json]:
    questions, answers = (_turn_texts(row.get(column)) for column in ("prompt", name))
    if len(questions) != len(answers):
        refuse("wrong_type", f"{len(questions)} turns in prompt, {len(answers)} in {name}")
    turns: list[Json] = []
    for question, answer in zip(questions, answers, strict=True):
        turns += {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    return turns


def _turn_texts(value: Json) -> list[Json]:
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):
            value = decode(value)
    return value if isinstance(value, list) else [value]


def _extras(row: Row) -> dict[str, Json]:
    return {name: row[name] for name in ("margin", "tools", "chat_template_kwargs") if name in row}
