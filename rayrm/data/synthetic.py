"""Generated preference pairs for the quickstart: plain English, and the same rows everywhere.

The prompt asks for one thing each of two to four kinds ("a bird, a tool and a drink"). The chosen
reply names them; in the rejected reply two or more things are of kinds that were not asked for.
Hide the prompt, and either reply is as likely to be the chosen one: neither length nor words nor
mixture tells, so a model has to read prompt and reply together.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

Split = Literal["train", "eval"]

KINDS: dict[str, tuple[str, ...]] = {
    "bird": ("robin", "sparrow", "eagle", "owl", "heron", "penguin"),
    "country": ("Japan", "Brazil", "Kenya", "Norway", "Peru", "Vietnam"),
    "drink": ("tea", "coffee", "milk", "juice", "lemonade", "cocoa"),
    "fruit": ("apple", "pear", "plum", "mango", "cherry", "banana"),
    "metal": ("zinc", "copper", "nickel", "gold", "silver", "titanium"),
    "sport": ("tennis", "hockey", "golf", "judo", "rowing", "fencing"),
    "tool": ("hammer", "saw", "chisel", "wrench", "shovel", "mallet"),
    "vegetable": ("carrot", "onion", "leek", "spinach", "cabbage", "celery"),
}
"""What can be asked for, and six things of each kind; no thing is of two kinds."""

_NUMBER = {thing: number for things in KINDS.values() for number, thing in enumerate(things)}
_REQUESTS = ("Please name {}.", "Can you give me {}?", "I need {}.", "Think of {}.")
_REPLIES = (
    "Sure: {}.",
    "How about {}?",
    "You could take {}.",
    "Let me think. My answer is {}.",
    "Happy to help! Here is my list: {}.",
)
_NUM_PAIRS: dict[Split, int] = {"train": 4000, "eval": 400}


def generate_pairs(
    split: Split, num_pairs: int | None = None, *, seed: int = 0
) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield the pairs of a split as rows of ``prompt``, ``chosen`` and ``rejected`` messages.

    The same arguments give the same rows on every machine and Python, and fewer pairs are the first
    of more. Things named together in a reply of one split never are in a reply of the other.

    Args:
        split: ``"train"`` or ``"eval"``.
        num_pairs: how many; null takes 4,000 and 400.
        seed: another seed gives other pairs by the same rule, and keeps the splits apart.
    """
    default_num_pairs = _NUM_PAIRS[split]
    rng = random.Random(seed)
    for _ in range(default_num_pairs if num_pairs is None else num_pairs):
        asked = _draw(KINDS, _integer(2, 4, rng), rng)
        request = _pick(_REQUESTS, rng).format(_enumerate(f"a {kind}" for kind in asked))
        yield {
            "prompt": [{"role": "user", "content": request}],
            "chosen": [_reply(asked, split, rng)],
            "rejected": [_reply(_stray(asked, rng), split, rng)],
        }


def split_of(things: Iterable[str]) -> Split:
    """Return the one split whose replies may name these things together, in whatever order.

    A thing's number is its place among its kind, and in eval the numbers add up to a multiple of
    six. So, whatever the kinds, one combination in six is held out, and no thing is rarer for it.
    """
    return "train" if sum(_NUMBER[thing] for thing in things) % 6 else "eval"


def _stray(asked: Sequence[str], rng: random.Random) -> list[str]:
    """Return the kinds asked for, two or more of them replaced by kinds that were not."""
    num_strays = _integer(2, len(asked), rng)
    strays = _draw((kind for kind in KINDS if kind not in asked), num_strays, rng)
    replaced = dict(zip(_draw(asked, num_strays, rng), strays, strict=True))
    return [replaced.get(kind, kind) for kind in asked]


def _reply(kinds: Sequence[str], split: Split, rng: random.Random) -> dict[str, str]:
    """Return a message that names a thing of each kind, in a combination of this split."""
    things = [_pick(KINDS[kind], rng) for kind in kinds]
    while split_of(things) != split:
        things = [_pick(KINDS[kind], rng) for kind in kinds]
    return {"role": "assistant", "content": _pick(_REPLIES, rng).format(_enumerate(things))}


def _enumerate(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}"


# Python promises the same numbers in later versions for random() alone, not for choice, sample or
# randint; so every draw below is made of it.


def _integer(low: int, high: int, rng: random.Random) -> int:
    return low + int((high - low + 1) * rng.random())


def _pick(options: Sequence[str], rng: random.Random) -> str:
    return options[_integer(0, len(options) - 1, rng)]


def _draw(options: Iterable[str], num_drawn: int, rng: random.Random) -> list[str]:
    return sorted(options, key=lambda _: rng.random())[:num_drawn]
