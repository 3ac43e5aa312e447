"""The pool of threads: what is to be done is done once, whoever comes, stops, forks or exits."""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numba
import numpy as np
import pytest

from scaledot._kernels import atomics, threads
from scaledot._kernels.atomics import add, load, pause, store

once = pytest.mark.parametrize("pool", ["futex" if atomics.HAS_FUTEX else "python"], indirect=True)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

# Numbers at a call's address: the next task, the number of tasks, how long each takes, threads
# inside, visits of the caller, threads that have met, threads to meet; then one for each task or
# worker.
COUNTER, NUM_TASKS, PAUSES, INSIDE, VISITS, MET, TO_MEET = range(7)
FIRST, ROOM = 8, 512
UNITS = 256  # of work, for each pause
STOPPED = 2**62


def do_tasks(call, worker, budget):
    """Count each task that is done; tasks beyond the room begin again at the first count."""
    add(call + 8 * INSIDE, 1)
    if worker == 0:
        add(call + 8 * VISITS, 1)
    status = 1
    while budget > 0:
        task = add(call, 1)
        if task >= load(call + 8 * NUM_TASKS):
            status = 0
            break
        pauses = load(call + 8 * PAUSES)
        for _ in range(pauses):
            pause()
        add(call + 8 * (FIRST + task % ROOM), 1)
        budget -= UNITS * pauses
    add(call + 8 * INSIDE, -1)
    return status


def meet(call, worker, budget):
    """Wait until all have come; the status is what lies at the worker's number, which it takes."""
    place = call + 8 * (FIRST + worker)
    status = load(place)
    store(place, budget)
    add(call + 8 * MET, 1)
    for _ in range(10**8):  # a lost worker is a failure, not a test that hangs
        if load(call + 8 * MET) >= load(call + 8 * TO_MEET):
            return status
        pause()
    return -1000


def hold(call, worker, budget):
    """Come back again and again, or, as a worker, stay, until the counter is moved."""
    store(call + 8 * (FIRST + worker), 1)
    if worker > 0:
        while load(call) == 0:
            pause()
    return 1 if load(call) == 0 else 0


@functools.cache
def compiled(function):
    return numba.cfunc("int64(int64, int64, int64)")(function)


class Call:
    """Memory of one call, and what a caller passes with it."""

    def __init__(self, num_tasks=0, pauses=1, to_meet=0):
        self.numbers = np.zeros(FIRST + ROOM, dtype=np.int64)
        self.numbers[[NUM_TASKS, PAUSES, TO_MEET]] = num_tasks, pauses, to_meet
        self.stops = 0

    def stop(self):
        self.stops += 1
        self.numbers[COUNTER] = STOPPED

    def run(self, function, num_threads):
        address = compiled(function).address
        return threads.run(address, self.numbers.ctypes.data, num_threads, self.stop, self)

    def counts(self):
        return self.numbers[FIRST:].tolist()


def is_done_once(num_tasks, num_threads, pauses=1):
    call = Call(num_tasks, pauses)
    status = call.run(do_tasks, num_threads)
    expected = [1] * num_tasks + [0] * (ROOM - num_tasks)
    return status == 0 and call.counts() == expected and call.numbers[INSIDE] == 0


@pytest.fixture(params=["futex", "python"], autouse=True)
def pool(request, monkeypatch):
    """A pool of its own for each test, and one that waits without the help of the system."""
    if request.param == "futex" and not atomics.HAS_FUTEX:
        pytest.skip("there is no futex here")
    new = threads._Pool() if request.param == "futex" else threads._Pool(0)
    monkeypatch.setattr(threads, "_pool", new)
    return new


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 5])
def test_every_task_is_done_once(num_threads):
    for pauses in (1, 300):
        for num_tasks in (0, 1, 2, 7, ROOM):
            assert is_done_once(num_tasks, num_threads, pauses)


def test_many_calls_in_a_row(pool):
    """Workers are called again while they look, fall asleep or have just missed a call."""
    for number in range(1500):
        assert is_done_once(number % 8, 3, 1 + 100 * (number % 5))
    assert len(pool.threads) == 2


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_workers_take_part(num_threads):
    """Each thread with a number and, the workers, without a limit; twice, the second from sleep."""
    for _ in range(2):
        call = Call(to_meet=num_threads)
        assert call.run(meet, num_threads) == 0
        budgets = [threads.SLICE] + [threads.NO_LIMIT] * (num_threads - 1)
        assert call.counts()[: num_threads + 1] == [*budgets, 0]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_an_error_reaches_the_caller(num_threads):
    """Whoever has it; of several, the smallest."""
    for worker in range(num_threads):
        call = Call(to_meet=num_threads)
        call.numbers[FIRST + worker] = -7
        assert call.run(meet, num_threads) == -7
    call = Call(to_meet=num_threads)
    call.numbers[FIRST : FIRST + num_threads] = -1 - np.arange(num_threads)
    assert call.run(meet, num_threads) == -num_threads
    assert is_done_once(9, num_threads)


def test_the_caller_works_in_slices(monkeypatch):
    monkeypatch.setattr(threads, "SLICE", 3 * UNITS)
    call = Call(num_tasks=10)
    assert call.run(do_tasks, 1) == 0
    assert call.numbers[VISITS] == 4
    assert call.counts()[:11] == [1] * 10 + [0]


def test_numbers_of_threads_change(pool):
    """Threads are started when they are first wanted, and kept."""
    for num_threads, expected in ((1, 0), (4, 3), (2, 3), (5, 4), (3, 4), (1, 4)):
        assert is_done_once(50, num_threads, 100)
        assert len(pool.threads) == expected
        assert all(thread.is_alive() and thread.daemon for thread in pool.threads)


def test_calls_from_several_threads(pool):
    """They share the workers there are, and each gets its own tasks done."""
    barrier, wrong = threading.Barrier(4), []

    def work(number):
        barrier.wait(30)
        for i in range(150):
            if not is_done_once((7 * i + number) % 40, 2 + number % 2, 1 + 30 * number):
                wrong.append((number, i))

    callers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)
    assert not pool.held


def test_a_call_while_all_workers_are_busy(pool):
    """It is done by its caller alone, and the other call goes on."""
    long = Call()
    status = []

    def work():
        status.append(long.run(hold, 2))

    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    while long.counts()[1] == 0:
        time.sleep(0.001)
    assert is_done_once(100, 2)
    call = Call(to_meet=1)
    assert call.run(meet, 2) == 0
    assert call.counts()[:2] == [threads.SLICE, 0]
    assert caller.is_alive()
    long.stop()
    caller.join(30)
    assert status == [0]
    assert len(pool.threads) == 1


def test_threads_that_cannot_be_started(pool, monkeypatch):
    """A call goes on with those there are; later calls try again."""
    start = threading.Thread.start

    def fail(thread):
        raise RuntimeError("can't start new thread")

    def start_one(thread):
        monkeypatch.setattr(threading.Thread, "start", fail)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert is_done_once(20, 4)
    assert len(pool.threads) == 0
    monkeypatch.setattr(threading.Thread, "start", start_one)
    assert is_done_once(20, 4)
    assert len(pool.threads) == 1
    monkeypatch.setattr(threading.Thread, "start", start)
    assert Call(to_meet=4).run(meet, 4) == 0
    assert len(pool.threads) == 3


def test_more_threads_than_there_are_places(pool, monkeypatch):
    """Where no place is left a thread ends, and no call counts on it."""
    assert is_done_once(10, 3)
    pool.board[0, threads.NUM_WORKERS // 8] = threads.MAX_WORKERS - 1
    assert is_done_once(10, 6)
    deadline = time.monotonic() + 30
    while sum(thread.is_alive() for thread in pool.threads) > 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sum(thread.is_alive() for thread in pool.threads) == 3
    assert is_done_once(200, 6, 100)


class Owner(list):
    """Something with an end that can be seen."""


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("interrupted", [False, True])
def test_what_owns_the_memory_is_kept(pool, num_threads, interrupted, monkeypatch):
    """While anyone is inside, and no longer."""
    call, alive = Call(to_meet=num_threads), []
    owner = Owner([call])
    seen = weakref.ref(owner)

    def stop():
        alive.append(seen() is not None and (num_threads == 1 or owner_is_held()))

    def owner_is_held():
        return [id(kept) for kept in pool.held.values()] == [id(seen())]

    if interrupted:
        # Between a slice and the look at what it has brought, where Ctrl-C is raised.
        real = threads._native

        def native(address):
            def function(*arguments):
                if function.visits:
                    return real(address)(*arguments)
                function.visits += 1
                real(address)(*arguments)
                raise KeyboardInterrupt

            function.visits = 0
            return function

        pool.grow(num_threads - 1)
        monkeypatch.setattr(threads, "_native", functools.cache(native))
    raised = pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext()
    with raised:
        arguments = [call.numbers.ctypes.data, num_threads, stop, owner]
        del owner
        threads.run(compiled(meet).address, *arguments)
    del arguments, raised
    gc.collect()
    assert alive == [True] * interrupted
    assert seen() is None
    assert not pool.held


def in_a_fresh_process(way, body):
    """Run code in a Python of its own, with the kernels above; what it prints."""
    prelude = """
        import atexit, os, signal, sys, threading, time, warnings
        import pytest
        from test_pool import *
        from test_pool import threads

        signal.alarm(100)  # what hangs ends by a signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
        warnings.filterwarnings("ignore", r".*multi-threaded.*fork", DeprecationWarning)
        if sys.argv[1] == "python":
            make = threads._Pool
            threads._Pool = lambda: make(0)
            threads._pool = make(0)

        def status_of(number):
            return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    code = textwrap.dedent(prelude) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, way],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def way(request):
    return request.node.callspec.params["pool"]


def test_interrupts(way):
    """By Ctrl-C once, and once more while the workers have not left yet."""
    in_a_fresh_process(way, """
        class Stubborn(Call):
            def stop(self):
                self.stops += 1
                if self.stops < 3:
                    interrupt(self)
                else:
                    self.numbers[COUNTER] = STOPPED

        def interrupt(call):
            def work():
                while call.numbers[VISITS] < 2:
                    time.sleep(0.001)
                time.sleep(0.01)
                signal.raise_signal(signal.SIGINT)
            threading.Thread(target=work, daemon=True).start()

        class Early(Call):  # the second comes before anything is stopped
            def stop(self):
                self.stops += 1
                if self.stops == 1:
                    raise KeyboardInterrupt
                self.numbers[COUNTER] = STOPPED

        kinds = ((1, Call, 1), (2, Call, 1), (3, Stubborn, 3), (2, Early, 2))
        for num_threads, kind, stops in kinds:
            call = kind(num_tasks=STOPPED - 1, pauses=1000)
            interrupt(call)
            with pytest.raises(KeyboardInterrupt):
                call.run(do_tasks, num_threads)
            assert call.numbers[INSIDE] == 0
            assert call.stops == stops
            before = call.counts()
            assert sum(before) > 0
            assert not threads._pool.held
            assert is_done_once(300, num_threads, 100)
            assert call.counts() == before
        assert Call(to_meet=3).run(meet, 3) == 0
    """)  # fmt: skip


@once
def test_a_worker_wakes_its_caller(way):
    """Who sleeps until the last task of another is done, and would sleep on for long."""
    in_a_fresh_process(
        way,
        """
        threads._pool = threads._Pool(10**12 if sys.argv[1] == "futex" else 0)
        for number in range(20):
            assert is_done_once(3 + number % 2, 2, 200_000)
    """,
    )


@once
def test_a_stop_that_fails(way):
    """The workers are waited for all the same, and the first exception is raised."""
    in_a_fresh_process(way, """
        class Failing(Call):
            def stop(self):
                super().stop()
                raise OSError

        def interrupt(call):
            while call.counts()[1] == 0:
                time.sleep(0.001)
            signal.raise_signal(signal.SIGINT)

        call = Failing()
        threading.Thread(target=interrupt, args=(call,), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            call.run(hold, 2)
        assert call.stops == 1
        assert is_done_once(300, 2, 100)
    """)  # fmt: skip


@needs_fork
def test_forks_while_calls_run(way):
    """At any moment; parent and child both have a pool that works."""
    in_a_fresh_process(way, """
        stop, wrong = threading.Event(), []

        def work():
            while not stop.is_set():
                if not is_done_once(40, 3, 100):
                    wrong.append(1)

        assert is_done_once(10, 3)
        callers = [threading.Thread(target=work) for _ in range(2)]
        for caller in callers:
            caller.start()
        for number in range(8):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                good = not threads._pool.threads and is_done_once(300, 3, 10)
                os._exit(0 if good and Call(to_meet=3).run(meet, 3) == 0 else 1)
            assert status_of(child) == 0
            time.sleep(0.002)
        stop.set()
        for caller in callers:
            caller.join(30)
        assert not wrong and Call(to_meet=3).run(meet, 3) == 0
    """)  # fmt: skip


@needs_fork
@once
def test_a_fork_in_the_middle_of_a_call(way):
    """By a signal handler: the child learns that what its worker did is lost, and goes on."""
    in_a_fresh_process(way, """
        call, children = Call(), []

        def handler(number, frame):
            children.append(os.fork())
            if children[-1] == 0:
                signal.alarm(60)
                call.stop()

        def interrupt():
            while call.counts()[:2] != [1, 1]:
                time.sleep(0.001)
            signal.raise_signal(signal.SIGUSR1)
            while not children:
                time.sleep(0.001)
            call.stop()

        signal.signal(signal.SIGUSR1, handler)
        caller = threading.Thread(target=interrupt)
        caller.start()
        status = call.run(hold, 2)
        if children == [0]:
            good = status == threads.LOST and Call(to_meet=2).run(meet, 2) == 0
            os._exit(0 if good else 1)
        assert status == 0
        assert status_of(children[0]) == 0
        assert is_done_once(100, 2)
    """)  # fmt: skip


@pytest.mark.parametrize("has_workers", [True, False])
def test_a_call_at_exit(way, has_workers):
    """Workers never keep a process from its end, nor is it too late for a call."""
    out = in_a_fresh_process(
        way,
        f"""
        atexit.register(lambda: print(is_done_once(100, 3, 100)))
        assert not {has_workers} or is_done_once(100, 2)
    """,
    )
    assert out.split() == ["True"]


@once
def test_an_exit_while_a_call_runs(way):
    """Of a thread that does not keep the process alive."""
    in_a_fresh_process(
        way,
        """
        call = Call(num_tasks=STOPPED - 1, pauses=1000)
        threading.Thread(target=call.run, args=(do_tasks, 3), daemon=True).start()
        while call.numbers[INSIDE] < 3:
            time.sleep(0.001)
    """,
    )


@once
def test_idle_workers_cost_nothing(way):
    in_a_fresh_process(
        way,
        """
        assert is_done_once(100, 4, 100)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1
    """,
    )
