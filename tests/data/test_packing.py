from itertools import compress

import pytest
import torch

from rayrm.data.packing import PackedBatch, Segments, pack_pairs, pack_replies
from rayrm.data.plan import Layout
from tests.builders import pair_of

FLAT: list[Layout] = ["shared_prompt", "packed"]
PAIRS = [pair_of([5], [6, 7], [8], 0.5), pair_of([1, 2], [3], [4], -1.0)]


def seen_by(inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """Which flat positions each flat position sees, as the padded groups tell it."""
    segments = inputs["segments"]
    assert isinstance(segments, Segments)
    found: dict[int, list[int]] = {}
    queries, keys = segments.query_slots.tolist(), segments.key_slots.tolist()
    outputs = segments.output_slots.tolist()
    slot = 0
    for group in segments.groups:
        mask = group.mask(None)
        for row in range(group.num_rows):
            row_keys, keys = keys[: group.num_keys], keys[group.num_keys :]
            for query in range(group.num_queries):
                if outputs[queries[slot]] == slot:
                    is_seen = [k <= query for k in range(len(row_keys))]
                    if mask is not None:
                        is_seen = mask[row, 0, query].tolist()
                    found[queries[slot]] = list(compress(row_keys, is_seen))
                slot += 1
    assert not keys
    return [found[position] for position in range(len(found))]


def ragged(inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """The same as the segments of unlike length tell it: queries are the last of their keys."""
    segments = inputs["segments"]
    assert isinstance(segments, Segments)
    keys = segments.segment_keys.tolist()
    found: list[list[int]] = []
    ends = zip(segments.query_ends.tolist(), segments.key_ends.tolist(), strict=True)
    query_start, key_start = next(ends)
    for query_end, key_end in ends:
        segment = keys[key_start:key_end]
        num_queries = query_end - query_start
        assert num_queries <= segments.max_queries
        assert len(segment) <= segments.max_keys
        found += [segment[: len(segment) - num_queries + 1 + i] for i in range(num_queries)]
        query_start, key_start = query_end, key_end
    return found


def test_a_flat_row_holds_each_prompt_once_and_restarts_positions():
    batch = pack_pairs(PAIRS, "shared_prompt")
    assert batch.inputs["input_ids"].tolist() == [[5, 1, 2, 6, 7, 8, 3, 4]]
    assert batch.inputs["position_ids"].tolist() == [[0, 0, 1, 1, 2, 1, 2, 2]]
    assert batch.inputs["last_token"].tolist() == [4, 5, 6, 7]
    assert batch.margin.tolist() == [0.5, -1.0]
    assert batch.margin.dtype == torch.float32
    assert (batch.num_pairs, batch.num_tokens, batch.num_slots) == (2, 8, 8)
    assert batch.num_full_tokens == 11


def test_replies_see_their_prompt_and_themselves():
    inputs = pack_pairs(PAIRS, "shared_prompt").inputs
    assert ragged(inputs) == [[0], [1], [1, 2], [0, 3], [0, 3, 4], [0, 5], [1, 2, 6], [1, 2, 7]]


def test_without_sharing_each_side_is_a_text_of_its_own():
    batch = pack_pairs(PAIRS, "packed")
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 5, 8, 1, 2, 3, 1, 2, 4]]
    assert batch.inputs["last_token"].tolist() == [2, 4, 7, 10]
    assert (batch.num_tokens, batch.num_slots, batch.num_full_tokens) == (11, 11, 11)
    expected = [[0], [0, 1], [0, 1, 2], [3], [3, 4]]
    assert ragged(batch.inputs)[:5] == expected


@pytest.mark.parametrize("layout", FLAT)
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(0, 1, 1)], id="one token, no prompt"),
        pytest.param([(1, 1, 1), (0, 4, 2)], id="short"),
        pytest.param([(90, 2, 3), (70, 1, 9)], id="prompts longer than replies"),
        pytest.param([(2, 90, 3), (3, 7, 80), (1, 60, 61)], id="replies longer than prompts"),
        pytest.param([(90, 2, 3), (2, 90, 3), (0, 5, 70), (30, 40, 50)], id="a mixture"),
    ],
)
def test_padded_groups_and_ragged_segments_say_the_same(
    lengths: list[tuple[int, int, int]], layout: Layout
):
    pairs = [pair_of([1] * p, [2] * c, [3] * r) for p, c, r in lengths]
    inputs = pack_pairs(pairs, layout).inputs
    assert seen_by(inputs) == ragged(inputs)
    seen = [len(keys) - 1 for keys in ragged(inputs)]
    assert seen == inputs["position_ids"][0].tolist()


def test_any_number_of_replies_shares_a_prompt():
    replies = [[[6], [7, 8], []], [[9]]]
    inputs = pack_replies([[5, 4], [3]], replies)  # type: ignore[arg-type]
    assert inputs["input_ids"].tolist() == [[5, 4, 3, 6, 7, 8, 9]]
    assert inputs["last_token"].tolist() == [3, 5, 1, 6]  # the empty reply ends with its prompt
    expected = [[0], [0, 1], [2], [0, 1, 3], [0, 1, 4], [0, 1, 4, 5], [2, 6]]
    assert ragged(inputs) == seen_by(inputs) == expected


def test_a_window_hides_what_lies_further_back():
    pairs = [pair_of([1] * 60, [2, 3], [4]), pair_of([], [1] * 9, [2])]
    groups = pack_pairs(pairs, "shared_prompt").inputs["segments"].groups
    assert {group.first_position is None for group in groups} == {False, True}
    for group in groups:
        whole, near = group.mask(None), group.mask(3)
        seen = torch.ones(group.num_queries, group.num_keys, dtype=torch.bool).tril()
        seen = seen if whole is None else whole
        if group.num_keys <= 3:
            assert near is None or torch.equal(near, seen)
        else:
            assert near is not None
            assert near.sum(-1).max() == 3
            assert not (near & ~seen).any()


def test_sides_become_right_padded_rows():
    batch = pack_pairs(PAIRS, "padded")
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7], [5, 8, 0], [1, 2, 3], [1, 2, 4]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert batch.inputs["last_token"].tolist() == [2, 4, 8, 11]
    assert (batch.num_pairs, batch.num_tokens, batch.num_slots) == (2, 11, 12)
    assert batch.num_full_tokens == 11


def test_last_tokens_are_found_by_length_and_not_by_id():
    pad = eos = 0
    pair = pair_of([pad, eos], [3, pad, pad], [eos, 4, eos, eos, 5])
    assert pack_pairs([pair], "padded").inputs["last_token"].tolist() == [4, 7 + 6]
    assert pack_pairs([pair], "shared_prompt").inputs["last_token"].tolist() == [4, 9]


@pytest.mark.parametrize("layout", [*FLAT, "padded"])
def test_no_pairs_are_one_forward_of_one_token_without_a_reward(layout: Layout):
    batch = pack_pairs([], layout)
    assert batch.inputs["input_ids"].tolist() == [[0]]
    assert batch.inputs["last_token"].shape == (0,)
    assert batch.inputs["last_token"].dtype == torch.int64
    assert (batch.num_pairs, batch.num_tokens, batch.num_slots) == (0, 0, 0)
    assert batch.num_full_tokens == 0


@pytest.mark.parametrize("layout", [*FLAT, "padded"])
def test_ids_are_copied_so_that_a_batch_cannot_change_its_pairs(layout: Layout):
    pair = pair_of([5], [6], [7])
    pack_pairs([pair], layout).inputs["input_ids"].fill_(9)
    assert (pair.prompt_ids.tolist(), pair.chosen_ids.tolist()) == ([5], [6])


def test_the_cpu_needs_no_copy():
    batch = pack_pairs(PAIRS, "shared_prompt")
    assert batch.to(torch.device("cpu")) is batch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_moves_as_a_whole():
    batch: PackedBatch = pack_pairs(PAIRS, "shared_prompt").to(torch.device("cuda"))
    segments = batch.inputs["segments"]
    assert {x.device.type for x in (batch.margin, segments.query_slots, segments.key_ends)} == {
        "cuda"
    }
