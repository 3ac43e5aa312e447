"""Chunks made in a thread, ahead of their use."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import scaledot as sd
from cli_runs import SOURCES
from test_stream import _no_thread_is_left, arrays, slices, threads, wait_until  # noqa: F401


def numbered(count, made):
    for i in range(count):
        made.append(i)
        yield sd.Chunk(np.full((1, 1), i), np.ones((1, 1)), i)


def test_order_is_kept_and_all_come():
    assert [c.kv_offset for c in sd.read_ahead(numbered(100, []), depth=3)] == list(range(100))
    assert list(sd.read_ahead([])) == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_further_ahead_than_asked(depth):
    made = []
    chunks = sd.read_ahead(numbered(20, made), depth=depth)
    assert made == []  # nothing before the first is asked for
    for taken in range(1, 21):
        next(chunks)
        wait_until(lambda n=taken: len(made) == min(20, n + depth))
        time.sleep(0.01)
        assert len(made) <= taken + depth
    assert next(chunks, None) is None


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_chunks_are_alive_than_told(depth):
    alive, most = weakref.WeakSet(), []

    class Tracked(np.ndarray):
        __hash__ = object.__hash__

    def making():
        for i in range(15):
            key = np.zeros((1, 1)).view(Tracked)
            alive.add(key)
            most.append(len(alive))
            chunk = sd.Chunk(key, key, i)
            del key
            yield chunk
            del chunk

    for chunk in sd.read_ahead(making(), depth=depth):
        time.sleep(0.005)
        del chunk
    assert max(most) <= depth + 1
    assert max(most) > 1
    assert not alive


def test_an_error_comes_in_its_place():
    def failing():
        yield from numbered(3, [])
        raise OSError("the disk is gone")

    got = []
    with pytest.raises(OSError, match="the disk is gone"):  # noqa: PT012
        for chunk in sd.read_ahead(failing(), depth=5):
            got.append(chunk.kv_offset)
    assert got == [0, 1, 2]
    wait_until(lambda: not threads())


def test_an_error_of_the_first_step_and_of_iter():
    class NoIterator:
        def __iter__(self):
            raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        next(sd.read_ahead(NoIterator()))


@pytest.mark.parametrize("end", ["close", "forget", "raise"])
def test_the_thread_ends_with_the_iterator(end):
    closed = threading.Event()

    def endless():
        try:
            yield from numbered(10**9, [])
        finally:
            closed.set()

    chunks = sd.read_ahead(endless(), depth=2)
    next(chunks)
    assert len(threads()) == 1
    if end == "close":
        chunks.close()
    elif end == "forget":
        del chunks
    else:
        def use():
            for _ in chunks:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            use()
        chunks.close()
    wait_until(lambda: not threads())
    assert closed.is_set()


@pytest.mark.parametrize("end", ["close", "forget", "throw"])
def test_the_source_is_closed_though_no_chunk_was_asked_for(end):
    class Source(Iterator):
        closed = 0

        def __next__(self):
            pytest.fail("it was advanced")

        def close(self):
            self.closed += 1

    source = Source()
    chunks = sd.read_ahead(source)
    if end == "close":
        chunks.close()
    elif end == "throw":
        with pytest.raises(ZeroDivisionError):
            chunks.throw(ZeroDivisionError)
    del chunks
    gc.collect()
    assert source.closed == 1
    sd.read_ahead([]).close()  # has nothing to close


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_no_thread():
    program = (
        "import os, signal, sys, scaledot as sd, numpy as np\n"
        "def numbered():\n"
        "    for i in range(9):\n"
        "        yield sd.Chunk(np.ones((1, 1)), np.ones((1, 1)), i)\n"
        "begun, fresh = sd.read_ahead(numbered()), sd.read_ahead(numbered())\n"
        "next(begun)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    assert [chunk.kv_offset for chunk in begun] == list(range(1, 9))\n"
        "    sys.exit(code)\n"
        "signal.alarm(20)\n"
        "assert [chunk.kv_offset for chunk in fresh] == list(range(9))\n"
        "try:\n"
        "    next(begun)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "begun.close()\n"
    )
    done = subprocess.run(  # newer versions of Python warn about every fork beside a thread
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], timeout=60,
        env={"PYTHONPATH": str(SOURCES)}, capture_output=True, text=True, check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("chunks must be asked for in the process whose thread reads")


def test_a_consumer_that_fails_inside_attend_chunks(tmp_path):
    given = arrays()
    key, value = slices(tmp_path, given)
    with pytest.raises(ValueError, match="q_offset must be given"):
        sd.attend_chunks(given["query"], sd.read_chunks(key, value, chunk_len=8), causal=True)
    gc.collect()
    wait_until(lambda: not threads())


def test_python_ends_while_a_source_hangs():
    program = (
        "import threading, scaledot as sd, numpy as np\n"
        "def hanging():\n"
        "    yield sd.Chunk(np.ones((1, 1)), np.ones((1, 1)), 0)\n"
        "    threading.Event().wait()\n"
        "chunks = sd.read_ahead(hanging())\n"
        "next(chunks)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCES)}, timeout=60,
        capture_output=True, text=True, check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_reading_goes_on_while_chunks_are_used():
    done = []

    def made():
        for i in range(3):
            done.append(i)
            yield i

    chunks = sd.read_ahead(made())
    assert next(chunks) == 0
    wait_until(lambda: done == [0, 1])  # without asking again
    chunks.close()


@pytest.mark.parametrize(("error", "chunks", "depth"), [
    (TypeError, 3, 1), (TypeError, [], 1.0), (TypeError, [], True), (ValueError, [], 0),
])  # fmt: skip
def test_wrong_arguments(error, chunks, depth):
    with pytest.raises(error, match="must be"):
        sd.read_ahead(chunks, depth=depth)
