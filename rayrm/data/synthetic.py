"""Generated preference pairs for the quickstart: plain English, endless, the same everywhere.

The prompt asks for a few things by kind ("a bird, a tool and a drink"). The chosen reply names one
of each; the rejected reply has at least one thing of a kind that was not asked for. Both replies
are drawn by one rule, and swapping them is as likely as not when the prompt is hidden: their
lengths, words and mixtures tell nothing, so only prompt and reply read together give the answer.
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
"""Things that can be asked for: a kind and its members; no member is of two kinds."""

_REQUESTS = ("Please name {}.", "Can you give me {}?", "I need {}.", "Think of {}.")
_REPLIES = (
    "Sure: {}.",
    "How about {}?",
    "You could take {}.",
    "Let me think. My answer is {}.",
    "Happy to help! Here is my list: {}.",
)
_NUM_PAIRS = {"train": 4000, "eval": 400}
_NUM_MEMBERS = 6
_NUMBER = {thing: number for things in KINDS.values() for number, thing in enumerate(things)}


def generate_pairs(
    split: Split, num_pairs: int | None = None, *, seed: int = 0
) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield the pairs of a split as rows of ``prompt``, ``chosen`` and ``rejected`` messages.

    The same arguments give the same rows on every machine and Python, and fewer pairs are the first
    of more. No set of things named in a reply of one split is ever named in a reply of the other.

    Args:
        split: ``"train"`` or ``"eval"``.
        num_pairs: how many; 4,000 and 400 unless told.
        seed: another seed gives other pairs by the same rule, and keeps the splits apart.
    """
    rng = random.Random(seed)
    for _ in range(_NUM_PAIRS[split] if num_pairs is None else num_pairs):
        asked = _draw(KINDS, 2 + int(3 * rng.random()), rng)
        request = _pick(_REQUESTS, rng).format(_enumerate(f"a {kind}" for kind in asked))
        yield {
            "prompt": [{"role": "user", "content": request}],
            "chosen": [_reply(asked, split, rng)],
            "rejected": [_reply(_stray(asked, rng), split, rng)],
        }


def split_of(things: Sequence[str]) -> Split:
    """Return the one split in whose replies these things may be named together, in any order.

    Their numbers within their kinds add up to a multiple of six in eval; so whatever kinds are
    asked for, one combination of six is held out, and each thing is as frequent in both splits.
    """
    return "train" if sum(_NUMBER[thing] for thing in things) % _NUM_MEMBERS else "eval"


def _stray(asked: Sequence[str], rng: random.Random) -> list[str]:
    """Return the kinds asked for with one or more of them replaced by kinds that were not."""
    num_stray = 1 + int(len(asked) * rng.random())
    strays = _draw([kind for kind in KINDS if kind not in asked], num_stray, rng)
    replaced = dict(zip(_draw(asked, num_stray, rng), strays, strict=True))
    return [replaced.get(kind, kind) for kind in asked]


def _reply(kinds: Sequence[str], split: Split, rng: random.Random) -> dict[str, str]:
    """Return a message that names a thing of each kind, in a combination of this split."""
    things = [_pick(KINDS[kind], rng) for kind in kinds]
    while split_of(things) != split:
        things = [_pick(KINDS[kind], rng) for kind in kinds]
    return {"role": "assistant", "content": _pick(_REPLIES, rng).format(_enumerate(things))}


# Of random.Random only random() is promised to stay the same in later Pythons; choice, sample and
# randrange are not, so every draw is made of it.


def _pick(options: Sequence[str], rng: random.Random) -> str:
    return options[int(len(options) * rng.random())]


def _draw(options: Iterable[str], num: int, rng: random.Random) -> list[str]:
    return sorted(options, key=lambda _: rng.random())[:num]


def _enumerate(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}"
