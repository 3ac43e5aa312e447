"""Scaled dot-product attention, ``softmax(Q Kᵀ / √d_k) V``, for NumPy, PyTorch and JAX arrays."""

from scaledot._attention import (
    attention,
    attention_state,
    attention_weights,
    scaled_dot_product_attention,
)
from scaledot._attention_stats import attention_stats
from scaledot._cache import KVCache
from scaledot._chunks import Chunk, attend_chunks
from scaledot._derivatives import Grads
from scaledot._explain import Plan, explain
from scaledot._family import (
    additive_attention,
    additive_attention_state,
    multi_head_attention,
    multiplicative_attention,
    retrieve,
)
from scaledot._gradients import attention_jvp, attention_vjp
from scaledot._paged import paged_attention
from scaledot._paged_cache import PagedKVCache
from scaledot._ring import ring_attention
from scaledot._ring_transport import InProcessRing
from scaledot._state import State, merge
from scaledot._stats import Stats
from scaledot._stream import read_ahead, read_chunks
from scaledot._threads import get_num_threads, set_num_threads
from scaledot._ulysses import ulysses_attention
from scaledot._varlen import varlen_attention, varlen_attention_vjp

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "Grads",
    "InProcessRing",
    "KVCache",
    "PagedKVCache",
    "Plan",
    "State",
    "Stats",
    "additive_attention",
    "additive_attention_state",
    "attend_chunks",
    "attention",
    "attention_jvp",
    "attention_state",
    "attention_stats",
    "attention_vjp",
    "attention_weights",
    "explain",
    "get_num_threads",
    "merge",
    "multi_head_attention",
    "multiplicative_attention",
    "paged_attention",
    "read_ahead",
    "read_chunks",
    "retrieve",
    "ring_attention",
    "scaled_dot_product_attention",
    "set_num_threads",
    "ulysses_attention",
    "varlen_attention",
    "varlen_attention_vjp",
]
