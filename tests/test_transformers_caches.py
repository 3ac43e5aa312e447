"""Several queries behind a cache: a prompt in pieces gives the logits that it gives as a whole.

Truth is each sequence alone, without padding and without a cache, by the textbook's attention in
float64; the yardstick is the same by the model's own attention in float32.
"""

import functools

import pytest

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, StaticCache

import tiny_models as tiny
from compare import EPS, assert_close
from scaledot import introspect

ROOM = {"eps": EPS["float32"], "len_kv": tiny.LENGTH}
CACHES = {
    "dynamic": lambda config: DynamicCache(),
    "sliding": lambda config: DynamicCache(config=config),  # drops what no window reaches
    "static": lambda config: StaticCache(config=config, max_cache_len=40),
}
# Where pieces begin. Of a padded sequence the first one of three is padding; windows of 5 and
# chunks of 6 end inside pieces and at their ends.
CUTS = {"two pieces": (11,), "three pieces": (5, 12), "a token first": (1,), "a token last": (18,)}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    tiny.register()


def run(model, **given):
    with torch.no_grad():
        return model(**given).logits


@functools.cache
def alone(name, where):
    """Truth and yardstick of the logits (tokens, vocabulary) of all sequences, one by one."""
    ids, keep = tiny.token_ids(), tiny.padding(where)
    seen = torch.ones_like(ids) if keep is None else keep
    rows = [row[valid.bool()] for row, valid in zip(ids, seen, strict=True)]
    found = []
    for dtype, impl in ((torch.float64, "truth"), (torch.float32, "eager")):
        model = tiny.build(name, dtype)
        model.set_attn_implementation(impl)
        parts = [run(model, input_ids=row[None], use_cache=False)[0] for row in rows]
        found.append(torch.cat(parts))
    return found


def piece(where, start, end):
    """What a model is given of the tokens from start to end."""
    keep = tiny.padding(where)
    given = {"input_ids": tiny.token_ids()[:, start:end]}
    if keep is not None:
        places = (keep.cumsum(-1) - 1).clamp(min=0)
        given |= {"attention_mask": keep[:, :end], "position_ids": places[:, start:end]}
    return given


def in_pieces(model, where, cache, cuts):
    """Logits (batch, len, vocabulary) of a prompt, piece by piece."""
    ends = (*cuts, tiny.LENGTH)
    return torch.cat([
        run(model, **piece(where, start, end), cache=cache)
        for start, end in zip((0, *cuts), ends, strict=True)
    ], 1)  # fmt: skip


def cases():
    """All models with all caches; a few are quick, one of each kind of mask."""
    quick = {("mistral", "left", "sliding"), ("llama4", "left", "static"),
             ("gpt_oss", "none", "dynamic")}  # fmt: skip
    return [
        pytest.param(name, where, cache, id=f"{name}, {where}, {cache}",
                     marks=() if (name, where, cache) in quick else pytest.mark.heavy)
        for name in tiny.DECODERS for where in ("none", "left") for cache in CACHES
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "cache"), cases())
def test_a_prompt_in_pieces_is_the_whole(name, where, cache):
    truth, yardstick = alone(name, where)
    keep = tiny.padding(where)
    seen = torch.ones(tiny.token_ids().shape, dtype=torch.bool) if keep is None else keep.bool()
    model = tiny.build(name)
    model.set_attn_implementation("scaledot")
    for cuts in CUTS.values():
        found = in_pieces(model, where, CACHES[cache](model.config), cuts)
        assert torch.isfinite(found).all()  # rows of padding too
        assert_close(found[seen], truth, yardstick, **ROOM)


@pytest.mark.parametrize(("name", "cache"), [
    pytest.param(name, cache, id=f"{name}, {cache}",
                 marks=() if (name, cache) == ("gemma4", "static") else pytest.mark.heavy)
    for name in tiny.DECODERS for cache in CACHES
])  # fmt: skip
def test_the_last_logits_alone_are_those_of_all(name, cache):
    """Some models compute no other token in their last layers: rows are cut out of masks."""
    truth, yardstick = (x[-3:] for x in alone(name, "left"))
    model = tiny.build(name)
    model.set_attn_implementation("scaledot")
    held = CACHES[cache](model.config)
    run(model, **piece("left", 0, 9), cache=held, logits_to_keep=3)
    found = run(model, **piece("left", 9, tiny.LENGTH), cache=held, logits_to_keep=3)
    assert found.shape[:2] == (2, 3)
    assert_close(found[1], truth, yardstick, **ROOM)


def test_continuing_a_static_cache_sees_no_slot_that_is_not_filled():
    model = tiny.build("llama")
    model.set_attn_implementation("scaledot")
    ids = tiny.token_ids()
    cache = StaticCache(config=model.config, max_cache_len=40)
    first = run(model, input_ids=ids[:, :8], cache=cache)
    for layer in cache.layers:  # what lies behind must not matter, whatever it is
        layer.keys[:, :, 8:] = layer.values[:, :, 8:] = torch.nan
    second = run(model, input_ids=ids[:, 8:], cache=cache)
    truth, yardstick = alone("llama", "none")
    assert_close(torch.cat([first, second], 1).flatten(0, 1), truth, yardstick, **ROOM)


def test_what_capture_keeps_is_not_of_a_cache_that_is_written_again():
    model = tiny.build("llama")
    model.set_attn_implementation("scaledot")
    cache = StaticCache(config=model.config, max_cache_len=40)
    with introspect.capture(model, keep=True) as seen:
        run(model, input_ids=tiny.token_ids(1), cache=cache)
    keys = [layer.keys[0, :, : tiny.LENGTH].numpy().copy() for layer in cache.layers]
    cache.reset()
    for layer, key, emptied in zip(seen.layers, keys, cache.layers, strict=True):
        assert not emptied.keys.any()
        assert (layer.key == key).all()
