"""Real processes of which one fails: the others end with an error, in time.

Run as a program this file forks the ranks of one scene.
"""

import datetime
import functools
import os
import signal
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch is built without torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402 - only where there is one

from ring_calls import FUNCTIONS, fork_ranks, left_by, run_program  # noqa: E402 - imports PyTorch
from scaledot import _ring_plan, _ring_transport  # noqa: E402

pytestmark = pytest.mark.heavy

WORLD_SIZE = 3
BAD = 1  # the rank that fails
TIMEOUT = datetime.timedelta(seconds=8)
SCENES = ("dies going forward", "dies going back", "never calls", "never goes back")


class Dying:
    """Makes a rank kill itself at a certain exchange of keys, with others waiting for it."""

    def __init__(self, rotate):
        self.left = None
        self.rotate = rotate

    def __call__(self, ring, arrays, shapes, hop=1):
        if self.left is not None and arrays[0].ndim > 1:  # no agreement about the call
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.rotate(ring, arrays, shapes, hop)


def play(function, scene, rank):
    """What happened on this rank, and seconds from the start of the call that failed."""
    _ring_plan.PIECE_BYTES = 1  # many messages
    dying = Dying(_ring_transport.ProcessGroupRing.rotate)
    _ring_transport.ProcessGroupRing.rotate = functools.partialmethod(
        lambda ring, *args: dying(ring, *args)
    )
    is_bad = rank == BAD
    x = torch.ones(6, 32, 8, requires_grad=True)
    start = time.monotonic()
    try:
        if scene == "never calls" and is_bad:
            time.sleep(2.5 * TIMEOUT.total_seconds())
            return None
        if scene == "dies going forward" and is_bad:
            dying.left = 1
        out = FUNCTIONS[function](x, x, x, causal=True, layout="zigzag")
        dist.barrier()  # all have come through
        start = time.monotonic()
        if scene == "dies going back" and is_bad:
            dying.left = 1
        if scene == "never goes back" and is_bad:
            time.sleep(2.5 * TIMEOUT.total_seconds())
            return None
        out.sum().backward()
    except Exception as error:
        notes = list(getattr(error, "__notes__", []))
        return type(error).__name__, notes, time.monotonic() - start
    return "no error", [], 0.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_rank_that_fails_is_an_error_of_all_others(function, scene, tmp_path):
    run_program(__file__, function, scene, tmp_path, timeout=20 * TIMEOUT.total_seconds())
    found = left_by(tmp_path, WORLD_SIZE)
    assert found[BAD] is None
    for rank in set(range(WORLD_SIZE)) - {BAD}:
        kind, notes, seconds = found[rank]
        assert kind == "RuntimeError"
        assert f"scaledot: rank {rank} of {WORLD_SIZE} was sending to process " in notes[0]
        # Each of the few messages under way may wait as long as the group allows.
        assert seconds < 2 * TIMEOUT.total_seconds()


if __name__ == "__main__":
    name, what, where = sys.argv[1:]
    codes = fork_ranks(WORLD_SIZE, functools.partial(play, name, what), Path(where), TIMEOUT)
    expected = [0, -signal.SIGKILL if "dies" in what else 0, 0]
    sys.exit(codes != expected)
