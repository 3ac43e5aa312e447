"""What the ranks of a ring agree on, who computes what and when, and how a ring ends."""

import threading
import weakref

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from ring_calls import LAYOUTS, errors_of, normal, shards_of
from scaledot import _passes, _ring_plan
from scaledot._ring import ring_attention
from scaledot._ring_plan import begin, runs_of
from scaledot._ring_transport import InProcessRing
from scaledot._spec import Options

BY_ROWS = ("query", "key", "value")

# Who computes what


class Watched:
    """A member of a ring that writes down what happens."""

    def __init__(self, member, log):
        self.rank, self.world_size, self._member, self._log = (
            member.rank, member.world_size, member, log
        )  # fmt: skip

    def rotate(self, arrays, shapes, hop=1):
        wait = self._member.rotate(arrays, shapes, hop)
        if arrays[0].dtype == torch.float64:
            self._log.append("start")

        def logged():
            found = wait()
            if arrays[0].dtype == torch.float64:
                self._log.append("wait")
            return found

        return logged


def plans(lengths, layout, **options):
    """Blocks of every rank, per source, of a call that is not run."""
    def work(group):
        query = np.zeros((1, lengths[group.rank], 1))
        shards = begin("f", group, query, query, query, Options(**options), layout)
        return [list(shards.blocks(source)) for source in range(len(lengths))]

    return InProcessRing(len(lengths)).run(work)


def positions_of(start, part):
    return start + np.arange(part.stop - part.start)


def seen(q_pos, kv_pos, causal=False, window=None):
    left, right = window or (None, None)
    far = np.subtract.outer(q_pos, kv_pos)
    visible = np.ones(far.shape, bool)
    if causal:
        visible &= far >= 0
    if left is not None:
        visible &= far <= left
    if right is not None:
        visible &= -far <= right
    return visible


def pairs_of(blocks, **options):
    """Query-key pairs that a rank has to compute."""
    return sum(
        int(seen(positions_of(b.q_offset, b.rows), positions_of(b.kv_offset, b.columns),
                 **options).sum())
        for source in blocks for b in source
    )  # fmt: skip


@pytest.mark.parametrize("length", [64, 1000, 1003])
def test_zigzag_balances_causal_attention(length):
    lengths = [len(x) for x in shards_of(length, 4, "zigzag")]
    work = [pairs_of(blocks, causal=True) for blocks in plans(lengths, "zigzag", causal=True)]
    assert sum(work) == length * (length + 1) // 2
    assert max(abs(w - np.mean(work)) for w in work) <= np.mean(work) / 10
    uneven = [pairs_of(b, causal=True) for b in plans(lengths, "contiguous", causal=True)]
    assert max(uneven) > 1.5 * np.mean(uneven)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (5, 2)},
                                     {"causal": True, "window": (7, None)}])  # fmt: skip
@pytest.mark.parametrize("lengths", [(6, 6, 6, 6), (1, 9, 0, 12), (23,)])
def test_blocks_hold_every_visible_pair_once_and_none_is_hidden(lengths, options, layout):
    total = sum(lengths)
    count = np.zeros((total, total), int)
    shards = shards_of(total, len(lengths), layout, lengths)
    for rank, sources in enumerate(plans(lengths, layout, **options)):
        for source, blocks in enumerate(sources):
            for b in blocks:
                q_pos, kv_pos = shards[rank][b.rows], shards[source][b.columns]
                assert q_pos.tolist() == positions_of(b.q_offset, b.rows).tolist()
                assert kv_pos.tolist() == positions_of(b.kv_offset, b.columns).tolist()
                visible = seen(q_pos, kv_pos, **options)
                assert visible.any()
                count[np.ix_(q_pos, kv_pos)] += visible
    everywhere = np.arange(total)
    np.testing.assert_array_equal(count, seen(everywhere, everywhere, **options))


def test_neighbouring_pieces_are_one_block():
    assert [len(runs) for runs in runs_of([4, 4, 4], "zigzag")] == [2, 2, 1]
    assert len(plans([8, 8], "zigzag")[0][1]) == 1  # nothing depends on positions
    assert len(plans([8, 8], "zigzag", causal=True)[0][1]) == 1  # late queries, early keys: pieces
    assert plans([8, 8], "contiguous", causal=True)[0][1] == []


def test_the_next_shard_is_on_its_way_while_this_one_is_computed(monkeypatch):
    logs = {}
    real = {name: getattr(_passes, name) for name in ("forward", "backward")}

    def logging(name):
        def run(*args, **options):
            logs[threading.get_ident()].append(name)
            return real[name](*args, **options)

        return run

    for name in real:
        monkeypatch.setattr(_passes, name, logging(name))
    x = torch.tensor(normal(2, 9, 4))

    def work(member):
        log = logs[threading.get_ident()] = []
        shard = x[:, 3 * member.rank :][:, :3].clone().requires_grad_()
        ring_attention(shard, shard, shard, group=Watched(member, log)).sum().backward()
        return log

    there = ["start", "forward", "wait", "start", "forward", "wait", "forward"]
    # Keys start, are computed with, and gradients start; these arrive a shard later.
    back = ["start", "backward", "start", "wait", "start", "backward", "wait", "start", "wait",
            "backward", "wait", "start", "wait"]  # fmt: skip
    for log in InProcessRing(3).run(work):
        assert log == there + back


class Slow:
    """A member of a ring whose messages arrive when they are waited for, and that keeps account."""

    def __init__(self, member, log):
        self.rank, self.world_size, self._member, self._log = (
            member.rank, member.world_size, member, log
        )  # fmt: skip
        self._started = 0

    def rotate(self, arrays, shapes, hop=1):
        wait = self._member.rotate(arrays, shapes, hop)
        if arrays[0].ndim == 1:  # agreement about the call
            return wait
        number, self._started = self._started, self._started + 1
        self._log.append(("start", number))

        def waited():
            self._log.append(("wait", number))
            return wait()

        return waited


@pytest.mark.parametrize(("pieces", "size"), [(1, 2**30), (4, 1)])
def test_a_slow_network_has_the_time_of_a_block(pieces, size, monkeypatch):
    """Hop k + 1 starts before block k is computed and is waited for after it, piece by piece."""
    monkeypatch.setattr(_ring_plan, "PIECE_BYTES", size)
    logs, real = {}, _passes.forward

    def forward(query, key, value, options, **more):
        log = logs[threading.get_ident()]
        log.append(("compute", sum(kind == "compute" for kind, _ in log)))
        return real(query, key, value, options, **more)

    monkeypatch.setattr(_passes, "forward", forward)
    x = torch.tensor(normal(4, 9, 4))

    def work(member):
        log = logs[threading.get_ident()] = []
        shard = x[:, 3 * member.rank :][:, :3]
        ring_attention(shard, shard, shard, group=Slow(member, log))
        return log

    for log in InProcessRing(3).run(work):
        assert len(log) == 2 * 2 * pieces + 3 * pieces
        for number in range(2 * pieces):
            start, computed, waited = (
                log.index((kind, number)) for kind in ("start", "compute", "wait")
            )
            assert start < computed < waited
            assert waited < log.index(("compute", number + pieces))  # which needs what arrived


class Copying:
    """A member of a ring that receives into memory of its own, and counts how much it holds."""

    def __init__(self, member):
        self.rank, self.world_size, self._member = member.rank, member.world_size, member
        self.held, self.most = 0, 0

    def rotate(self, arrays, shapes, hop=1):
        wait = self._member.rotate([x.copy() if isinstance(x, np.ndarray) else x.clone()
                                    for x in arrays], shapes, hop)  # fmt: skip
        if isinstance(arrays[0], np.ndarray):
            return wait
        received = [torch.empty(shape, dtype=x.dtype) for x, shape in zip(arrays, shapes,
                                                                          strict=True)]  # fmt: skip
        for x in received:
            self._hold(x.numel())
            weakref.finalize(x, self._hold, -x.numel())
        buffers = list(received)
        received.clear()

        def waited():
            for x, y in zip(buffers, wait(), strict=True):
                x.copy_(y)
            found = list(buffers)
            buffers.clear()
            return found

        return waited

    def _hold(self, count):
        self.held += count
        self.most = max(self.most, self.held)


@pytest.mark.parametrize("world_size", [4, 8])
def test_shards_that_a_rank_holds(world_size):
    """Keys and values in use and on their way, and gradients on theirs, however long the ring."""
    x = torch.tensor(normal(2, 3 * world_size, 4))
    shard = 2 * 2 * 3 * 4  # key and value

    def work(member):
        group = Copying(member)
        q, k, v = (x[:, 3 * member.rank :][:, :3].clone().requires_grad_() for _ in range(3))
        out = ring_attention(q, k, v, group=group)
        there, group.most = group.most, 0
        out.sum().backward()
        return there, group.most

    for there, back in InProcessRing(world_size).run(work):
        assert there <= 2 * shard
        assert back <= 3 * shard


@pytest.mark.parametrize("world_size", [4, 8])
def test_pieces_that_a_rank_holds(world_size, monkeypatch):
    """One shard of keys and one of gradients, and of each a piece that is on its way."""
    monkeypatch.setattr(_ring_plan, "PIECE_BYTES", 1)
    x = torch.tensor(normal(8, 3 * world_size, 4))
    shard = 2 * 8 * 3 * 4  # key and value
    piece = shard // 8

    def work(member):
        group = Copying(member)
        q, k, v = (x[:, 3 * member.rank :][:, :3].clone().requires_grad_() for _ in range(3))
        out = ring_attention(q, k, v, group=group)
        there, group.most = group.most, 0
        out.sum().backward()
        return there, group.most

    for there, back in InProcessRing(world_size).run(work):
        assert there <= shard + piece
        assert back <= 2 * shard + 2 * piece


@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (97, 90, 110, 83)])
def test_zigzag_balances_uneven_lengths(lengths):
    """Within the unevenness of the shards themselves."""
    work = [pairs_of(blocks, causal=True) for blocks in plans(lengths, "zigzag", causal=True)]
    assert sum(work) == sum(lengths) * (sum(lengths) + 1) // 2
    for done, length in zip(work, lengths, strict=True):
        share = length / np.mean(lengths)
        assert abs(done / np.mean(work) - share) <= 0.1


# The ring of threads


def test_a_rank_that_fails_ends_the_ring():
    x = torch.ones(2, 3, 4)

    def attend(group):
        return ring_attention(x, x, x, group=group)

    def work(group):
        if group.rank == 2:
            raise ZeroDivisionError("mine")
        return attend(group)

    with pytest.raises(ZeroDivisionError, match="mine"):
        InProcessRing(4).run(work)
    errors = errors_of(3, lambda group: attend(group) if group.rank else None)
    assert [type(error) for error in errors] == [type(None), ConnectionError, ConnectionError]


def test_a_ring_waits_no_longer_than_it_may():
    def work(group):
        if group.rank == 0:
            group.rotate([np.ones(1)], [(1,)])()
        else:
            done.wait(30)

    done = threading.Event()
    timer = threading.Timer(1.0, done.set)
    timer.start()
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.1 s for rank 1"):
        InProcessRing(2, timeout=0.1).run(work)


def test_a_ring_checks_what_arrives():
    with pytest.raises(ConnectionError, match="expected were"):
        InProcessRing(2).run(lambda group: group.rotate([np.ones(2)], [(3,)])())
    with pytest.raises(ValueError, match="world_size must be a positive int, got 0"):
        InProcessRing(0)


MODES = {
    "default": (torch.enable_grad, True, False),
    "no_grad": (torch.no_grad, False, False),
    "inference": (torch.inference_mode, False, True),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_caller_are_those_of_its_ranks(mode):
    entered, is_grad, is_inference = MODES[mode]
    x = torch.ones(2, 3, 4, requires_grad=True)

    def work(group):
        out = ring_attention(x, x, x, group=group)
        return torch.is_grad_enabled(), out.requires_grad, out.is_inference()

    with entered():
        assert InProcessRing(2).run(work) == [(is_grad, is_grad, is_inference)] * 2


@pytest.mark.parametrize("hop", [1, 2, 3])
def test_hops(hop):
    def work(group):
        return int(group.rotate([np.array([group.rank])], [(1,)], hop)()[0][0])

    assert InProcessRing(3).run(work) == [(rank - hop) % 3 for rank in range(3)]
