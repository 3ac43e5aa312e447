"""Who looks on while a model attends: what computes attention shows its calls to whoever asked.

It is one list for each thread, so that what looks on need not know what computes, nor the reverse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

Watcher = Callable[[Any, Any, Any, Mapping[str, Any]], None]
"""Called with the module that attends, query, key and the options of `attention_weights`."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("scaledot_watchers", default=())


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show the calls of this thread, or of this asynchronous task, to watcher."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def show(module: Any, query: Any, key: Any, options: Mapping[str, Any]) -> None:
    """Tell all who look on about one call, query (..., num_heads, len_q, d_k)."""
    for watcher in _watchers.get():
        watcher(module, query, key, options)
