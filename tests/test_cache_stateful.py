"""The key-value cache driven by random operations, beside plain lists of tokens."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import naive
import textbook
from compare import EPS, assert_close
from conftest import Library
from scaledot._cache import KVCache
from test_cache import poison, unused

HEADS, KV_HEADS, D_K, D_V = 2, 1, 3, 2
SIZES = st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 3))  # window, sinks, slack


class Cache(RuleBasedStateMachine):
    """A list of the (query, key, value) of each token, for every entry, is the model.

    In a ring, `first` of an entry is the position from which on tokens after the sinks are there.
    """

    @initialize(
        batch=st.integers(1, 3), library=st.sampled_from(["numpy", "numpy", "torch"]),
        sizes=st.none() | SIZES, capacity=st.integers(1, 9), seed=st.integers(0, 2**32),
    )
    def start(self, batch, library, sizes, capacity, seed):
        self.rng, self.library = np.random.default_rng(seed), Library(library)
        self.window, self.sinks, options = None, 0, {}
        if sizes is not None:
            self.window, self.sinks, slack = sizes
            capacity = self.window + self.sinks + slack
            options = {"window": self.window, "num_sinks": self.sinks}
        like = self.library.array(np.zeros(1))
        self.capacity = capacity
        self.cache = KVCache(
            batch, KV_HEADS, D_K, D_V, capacity, "float32", like=like, **options
        )
        self.entries = [[] for _ in range(batch)]
        self.first = [self.sinks] * batch

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.lengths.tolist() == [len(tokens) for tokens in self.entries]
        assert self.cache.capacity == self.capacity
        held = [min(len(tokens), self.sinks) + max(len(tokens) - first, 0)
                for tokens, first in zip(self.entries, self.first, strict=True)]
        assert (~unused(self.cache)).sum(axis=1).tolist() == held
        poison(self.cache)

    @rule(data=st.data(), new=st.integers(0, 6))
    def append(self, data, new):
        batch = len(self.entries)
        counts = data.draw(st.none() | st.lists(st.integers(0, new), min_size=batch,
                                                max_size=batch))
        tokens = [self.rng.standard_normal((batch, h, new, d)).astype(np.float32)
                  for h, d in ((HEADS, D_K), (KV_HEADS, D_K), (KV_HEADS, D_V))]
        numbers = [new] * batch if counts is None else counts
        for b, count in enumerate(numbers):
            for x in tokens:
                x[b, :, count:] = np.nan
        given = [self.library.array(x) for x in tokens[1:]]
        full = [len(x) + n > self.capacity for x, n in zip(self.entries, numbers, strict=True)]
        if self.window is None and any(full):
            self.refused("must have room", self.cache.append, *given, lengths=counts)
            return
        self.cache.append(*given, lengths=counts)
        for b, count in enumerate(numbers):
            self.entries[b] += [[x[b, :, t] for x in tokens] for t in range(count)]
            end = len(self.entries[b]) - (self.capacity - self.sinks)
            self.first[b] = max(self.first[b], end)

    @rule(more=st.integers(0, 4))
    def grow(self, more):
        self.cache.grow(self.capacity + more)
        self.capacity += more

    @rule()
    def shrink(self):
        self.refused("at least the present one", self.cache.grow, self.capacity - 1)

    @rule(data=st.data())
    def truncate(self, data):
        lengths = [data.draw(st.integers(0, len(tokens))) for tokens in self.entries]
        first = list(self.first)
        for b, length in enumerate(lengths):
            if length <= self.sinks:
                first[b] = self.sinks
            elif self.window and max(self.sinks, length - self.window + 1) < first[b]:
                self.refused("every token that the next one sees", self.cache.truncate, lengths)
                return
        self.cache.truncate(lengths)
        self.first = first
        self.entries = [x[:n] for x, n in zip(self.entries, lengths, strict=True)]

    @rule(data=st.data(), batch=st.integers(1, 3))
    def reorder(self, data, batch):
        among = st.integers(0, len(self.entries) - 1)
        source = data.draw(st.lists(among, min_size=batch, max_size=batch))
        self.cache.reorder(source)
        self.entries = [list(self.entries[b]) for b in source]
        self.first = [self.first[b] for b in source]

    @rule()
    def through_pickle(self):
        self.cache = pickle.loads(pickle.dumps(self.cache))

    @rule(data=st.data(), len_q=st.integers(1, 4), causal=st.booleans(), ragged=st.booleans())
    def attention(self, data, len_q, causal, ragged):
        present = [min(len_q, len(tokens)) for tokens in self.entries]
        counts = [data.draw(st.integers(0, n)) for n in present] if ragged else None
        numbers = counts if ragged else [len_q] * len(present)
        query = np.full((len(present), HEADS, len_q, D_K), np.nan, np.float32)
        if not ragged:
            query[:] = 1  # before the first token
        for b, tokens in enumerate(self.entries):
            for row in range(numbers[b]):
                position = len(tokens) - numbers[b] + row
                if position >= 0:
                    query[b, :, row] = tokens[position][0]
        given, options = self.library.array(query), {"causal": causal, "lengths": counts}
        for tokens, first, n in zip(self.entries, self.first, numbers, strict=True):
            sees = self.window and max(self.sinks, len(tokens) - n - self.window + 1)
            if self.window and n and sees < first:
                self.refused("still in memory", self.cache.attention, given, **options)
                return
        out = np.asarray(self.cache.attention(given, **options))
        for b, n in enumerate(numbers):
            self.compare(out[b, :, :n], query[b, :, :n], self.entries[b], causal)
            assert not out[b, :, n:].any()

    def compare(self, out, query, tokens, causal):
        """One entry with attention over its whole history."""
        if not tokens:
            assert not out.any()
            return
        key, value = (np.stack([token[i] for token in tokens], axis=1) for i in (1, 2))
        kv_pos, len_q = np.arange(len(tokens)), query.shape[1]
        q_pos = len(tokens) - len_q + np.arange(len_q)[:, None]
        mask = np.ones((len_q, len(tokens)), bool)
        if self.window is not None:
            mask = (kv_pos < self.sinks) | (q_pos - kv_pos < self.window)
        truth, _, weights = naive.attention(query, key, value, mask=mask, causal=causal)
        yardstick, _ = textbook.attention(query, key, value, weights > 0)
        assert_close(out, truth, yardstick, eps=EPS["float32"], len_kv=len(tokens))

    def refused(self, message, call, *arguments, **options):
        before = copy.deepcopy(self.cache)
        with pytest.raises(ValueError, match=message):
            call(*arguments, **options)
        now, then = self.cache._memory, before._memory
        np.testing.assert_array_equal(now.lengths, then.lengths)
        np.testing.assert_array_equal(now.oldest, then.oldest)
        for part, x in then.arrays.items():
            np.testing.assert_array_equal(np.asarray(now.arrays[part]), np.asarray(x))


TestCache = Cache.TestCase
TestCache.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
