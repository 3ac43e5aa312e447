"""Masks that transformers asks for, as positions and lengths, equal its own boolean matrices."""

import itertools
import operator

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from transformers import masking_utils as made

from scaledot.transformers._attend import attend
from scaledot.transformers._mask import Visible, mask

LEN_Q = 7
STARTS = torch.tensor([0, 2])


def paddings(length):
    """Masks of tokens (2, length), by name."""
    whole = torch.ones(2, length, dtype=torch.bool)
    found = {"none": None, "whole": whole}
    for name, hidden in {
        "left": slice(0, 3), "right": slice(length - 4, None), "middle": slice(4, 6),
        "all": slice(None), "both rows": slice(length - 2, None),
    }.items():  # fmt: skip
        found[name] = whole.clone()
        found[name][0 if name == "both rows" else 1 :, hidden] = False
    found["short"] = whole[:, :-2]  # a cache is longer than what was seen
    return found


FUNCTIONS = {
    "causal": made.causal_mask_function,
    "bidirectional": made.bidirectional_mask_function,
    "window": made.sliding_window_causal_mask_function(3),
    "window of all": made.sliding_window_causal_mask_function(LEN_Q),
    "wide window": made.sliding_window_causal_mask_function(100),
    "window of both sides": made.sliding_window_bidirectional_mask_function(2),
    "chunks": made.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
    "causal, then a window": made.and_masks(
        made.causal_mask_function, made.sliding_window_overlay(3)
    ),
    "window in a window": made.and_masks(
        made.sliding_window_overlay(5), made.sliding_window_causal_mask_function(3)
    ),
}
# Length of the keys, place of the first query, place of the first key.
PLACES = {
    "alone": (LEN_Q, 0, 0), "behind others": (LEN_Q + 5, 5, 0), "a cache to fill": (15, 0, 0),
    "a cache half full": (15, 4, 0), "a cache that slides": (LEN_Q + 4, 9, 5),
}  # fmt: skip


def asked(function, place, keep, **more):
    """Arguments of a mask function."""
    kv_length, q_offset, kv_offset = PLACES[place]
    return {
        "batch_size": 2, "q_length": LEN_Q, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": function, "attention_mask": keep,
        "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, **more,
    }  # fmt: skip


def numbers(visible):
    """Numbers that the tensors of a mask hold."""
    held = [x for x in visible.options.values() if x is not None]
    tensors = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in held)
    return sum(x.untyped_storage().nbytes() // x.itemsize for x in tensors
               if isinstance(x, torch.Tensor))  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_seen_equals_the_matrix(function, place):
    kv_length, _, kv_offset = PLACES[place]
    for keep in paddings(kv_length + kv_offset).values():
        given = asked(FUNCTIONS[function], place, keep)
        known = made.sdpa_mask(**given)
        found = mask(**given)
        assert isinstance(found, Visible)
        assert found.shape == known.shape
        assert torch.equal(found.dense(), known)
        assert numbers(found) <= 4 * 2 * (kv_length + kv_offset + LEN_Q)


@pytest.mark.parametrize("start", [0, 3])
def test_chunks_begin_behind_the_padding(start):
    keep = torch.ones(2, LEN_Q, dtype=torch.bool)
    keep[1, :start] = False
    function = made.chunked_causal_mask_function(2, torch.tensor([0, start]))
    given = asked(function, "alone", keep)
    assert torch.equal(mask(**given).dense(), made.sdpa_mask(**given))


@pytest.mark.parametrize("function", ["causal", "window", "chunks"])
def test_packed_sequences_are_segments(function):
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    ids = made.find_packed_sequence_indices(places)
    inner = made.remap_positions_for_packed_sequence(FUNCTIONS[function], places)
    whole = made.and_masks(inner, made.packed_sequence_mask_function(ids))
    given = asked(whole, "alone", None)
    found = mask(**given)
    assert isinstance(found, Visible)
    assert torch.equal(found.dense(), made.sdpa_mask(**given))


@pytest.mark.parametrize("function", [
    made.or_masks(made.causal_mask_function, made.bidirectional_mask_function),
    made.and_masks(made.causal_mask_function, lambda b, h, q, k: (q + k) % 2 == 0),
    made.packed_sequence_mask_function(torch.zeros(2, LEN_Q, dtype=torch.int64)),
    made.and_masks(FUNCTIONS["chunks"], FUNCTIONS["chunks"]),
    lambda b, h, q, k: q >= k,
], ids=["or", "and", "packed alone", "chunks twice", "unknown"])  # fmt: skip
def test_anything_else_is_a_boolean_matrix(function):
    given = asked(function, "alone", paddings(LEN_Q)["left"])
    found = mask(**given)
    assert found.options.keys() == {"mask"}
    assert torch.equal(found.options["mask"], made.sdpa_mask(**given))


def test_custom_functions_that_need_vmap_are_evaluated():
    table = torch.arange(LEN_Q) % 3 != 1
    function = made.and_masks(made.causal_mask_function, lambda b, h, q, k: table[k])
    found = mask(**asked(function, "alone", None, use_vmap=True))
    seen = torch.ones(LEN_Q, LEN_Q, dtype=torch.bool).tril() & table
    assert torch.equal(found, seen.expand(2, 1, -1, -1))


SKIPS = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": True}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_handed_over_only_where_all_is_seen(function, place):
    kv_length, _, kv_offset = PLACES[place]
    for keep in paddings(kv_length + kv_offset).values():
        found = mask(**asked(FUNCTIONS[function], place, keep, **SKIPS))
        known = made.sdpa_mask(**asked(FUNCTIONS[function], place, keep))
        assert (found is None) == bool(known.all())
        assert found is None or torch.equal(found[:, :, -3:], known[:, :, -3:])  # rows are right
    kept = {"allow_is_bidirectional_skip": False}
    assert mask(**asked(FUNCTIONS[function], place, None, **SKIPS | kept)) is not None


def test_causal_masks_that_are_not_recognised_are_always_matrices():
    function = made.causal_mask_function
    skip = {"allow_is_causal_skip": True}
    found = mask(**asked(lambda *places: function(*places), "alone", None, **skip))
    assert torch.equal(found, made.sdpa_mask(**asked(function, "alone", None)))


def test_masks_that_are_not_recognised_are_not_added_to_scores_either():
    whole = made.sdpa_mask(**asked(made.causal_mask_function, "behind others", None))
    given = asked(lambda *places: made.causal_mask_function(*places), "behind others", None)
    found = mask(**given)
    assert isinstance(found, Visible)
    assert torch.equal(found.dense(), whole)
    with pytest.raises(TypeError, match=ADDED):
        torch.zeros(whole.shape) + found


def test_a_model_that_attends_by_itself_in_a_larger_one_gets_the_masks_of_eager():
    given = asked(FUNCTIONS["window"], "alone", paddings(LEN_Q)["left"])
    config = transformers.Gemma4AudioConfig()
    for dtype in (torch.float32, torch.bfloat16):
        found = mask(**given, config=config, dtype=dtype)
        assert torch.equal(found, made.eager_mask(**given, dtype=dtype))


def test_a_single_query_has_one_row():
    given = asked(FUNCTIONS["window"], "behind others", paddings(12)["left"])
    given |= {"q_length": 1, "q_offset": 11}
    found = mask(**given)
    assert found.shape == (2, 1, 1, 12)
    assert torch.equal(found, made.sdpa_mask(**given))


def test_a_prepared_mask_is_passed_on():
    first = mask(**asked(FUNCTIONS["window"], "alone", None))
    assert mask(**asked(FUNCTIONS["causal"], "alone", first)) is first


def test_offsets_of_static_caches_are_tensors():
    given = asked(FUNCTIONS["window"], "a cache half full", None)
    expected = made.sdpa_mask(**given)
    found = mask(**given | {"q_offset": torch.tensor(4)})
    assert isinstance(found.options["q_offset"], int)
    assert torch.equal(found.dense(), expected)


def test_any_other_use_is_one_of_the_matrix():
    found = mask(**asked(FUNCTIONS["window"], "alone", paddings(LEN_Q)["left"]))
    whole = found.dense()
    assert (found.ndim, found.dtype, found.dim()) == (4, torch.bool, 4)
    assert found.to("cpu") is found
    assert found.to(device="cpu", non_blocking=True) is found
    assert torch.equal(found.to(torch.float32), whole.float())
    assert torch.equal(found[:, :, 2:5], whole[:, :, 2:5])
    assert torch.equal(found.expand(2, 3, -1, -1), whole.expand(2, 3, -1, -1))
    assert torch.equal(~found, ~whole)
    assert torch.equal(found & whole, whole)
    assert torch.equal(torch.cat([found, whole], -1), torch.cat([whole, whole], -1))
    assert torch.equal(torch.where(found, 1.0, 0.0), whole.float())
    assert not hasattr(found, "no_method_of_tensors")
    with pytest.raises(AttributeError):
        found.__array_interface__  # noqa: B018


ADDED = "must not be added or multiplied"
CHANGED = "must not be changed in place, got"


@pytest.mark.parametrize(("use", "message"), [
    (lambda seen, x: seen + x, ADDED), (lambda seen, x: x + seen, ADDED),
    (lambda seen, x: x - seen, ADDED), (lambda seen, x: x * seen, ADDED),
    (lambda seen, x: seen * -1e9, ADDED), (lambda seen, x: seen.mul(x), ADDED),
    (lambda seen, x: torch.add(x, other=seen), ADDED), (lambda seen, x: x.add_(seen), ADDED),
    (lambda seen, x: operator.iadd(x, seen), ADDED),
    (lambda seen, x: seen.masked_fill_(~seen, True), f"{CHANGED} masked_fill_"),
    (lambda seen, x: torch.relu_(seen), f"{CHANGED} relu_"),
    (lambda seen, x: torch.logical_not(x, out=seen), f"{CHANGED} logical_not"),
])  # fmt: skip
def test_uses_that_cannot_be_right_are_errors(use, message):
    seen = mask(**asked(FUNCTIONS["window"], "alone", None))
    with pytest.raises(TypeError, match=message):
        use(seen, torch.zeros(LEN_Q, LEN_Q))


def test_sums_of_booleans_and_changes_of_others_are_those_of_the_matrix():
    seen = mask(**asked(FUNCTIONS["window"], "alone", None))
    whole = seen.dense()
    assert torch.equal(seen + torch.ones(1, dtype=torch.int64), whole + 1)
    assert torch.equal(seen * whole, whole)
    scores = torch.zeros(whole.shape)
    assert torch.equal(scores.clone().masked_fill_(seen, 1.0), scores.masked_fill(whole, 1.0))


def test_a_mask_has_no_truth():
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        bool(mask(**asked(FUNCTIONS["window"], "alone", None)))


def test_arguments_of_masks_that_are_not_understood_are_errors():
    given = asked(FUNCTIONS["window"], "alone", None)
    plain = mask(**given).dense()
    assert torch.equal(mask(**given, dtype=torch.float32, block_ids=None).dense(), plain)
    with pytest.raises(ValueError, match="known to scaledot, but block_ids is not, got Tensor"):
        mask(**given, block_ids=torch.zeros(2, LEN_Q))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_sees_what_the_matrix_says(function, place):
    kv_length, _, kv_offset = PLACES[place]
    torch.manual_seed(0)
    query = torch.randn(2, 4, LEN_Q, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, kv_length, 8, dtype=torch.float64)
    bias = torch.randn(1, 4, LEN_Q, kv_length, dtype=torch.float64)
    for keep in paddings(kv_length + kv_offset).values():
        given = asked(FUNCTIONS[function], place, keep)
        whole = made.sdpa_mask(**given)
        found, weights = attend(
            torch.nn.Identity(), query, key, value, mask(**given), position_bias=bias,
            output_attentions=True,
        )  # fmt: skip
        scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5 + bias
        known = scores.masked_fill(~whole, -torch.inf).softmax(-1).nan_to_num(0.0)
        out = (known @ value.repeat_interleave(2, 1)).transpose(1, 2)
        assert weights.shape == known.shape
        limit = 2.0**-52 * kv_length * max(1.0, float(value.abs().max()))
        assert (weights - known).abs().max() <= limit
        assert (found - out).abs().max() <= limit
