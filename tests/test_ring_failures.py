"""Real processes of which one fails: the others end with an error and do not hang.

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

from ring_calls import FUNCTIONS, fork_ranks, left_by, run_program  # noqa: E402 - imports PyTorch
from scaledot import _ring_plan, _ring_transport  # noqa: E402

pytestmark = pytest.mark.heavy

WORLD_SIZE = 3
BAD = 1  # the rank that fails
TIMEOUT = datetime.timedelta(seconds=8)
SCENES = (
    "dies going forward", "dies going forward, others late", "dies going back",
    "dies going back, others late", "never calls", "never goes back",
)  # fmt: skip


class Dying:
    """Makes a rank kill itself at its second exchange of keys, with others waiting for it.

    Where these are late, they start that exchange when it is long dead.
    """

    def __init__(self, rotate, folder, is_bad, are_late):
        self.left = None  # exchanges to live through
        self.rotate, self.is_bad, self.are_late = rotate, is_bad, are_late
        self.note = folder / "dying"

    def __call__(self, ring, arrays, shapes, hop=1):
        if self.left is not None and arrays[0].ndim > 1:  # no agreement about the call
            self.left -= 1
            if self.left < 0:
                self.end()
        return self.rotate(ring, arrays, shapes, hop)

    def end(self):
        self.left = None
        if self.is_bad:
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.are_late:
            wait_for([self.note])
            time.sleep(1.0)  # for its connections to close


def wait_for(files):
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def meet(folder, rank):
    """Wait for all ranks; none needs anything of another afterwards, as it would of a barrier."""
    files = [folder / f"{r} went forward" for r in range(WORLD_SIZE)]
    files[rank].touch()
    wait_for(files)


def play(function, scene, folder, rank):
    """Whether this rank ended with the error that is expected, and the notes of the error."""
    _ring_plan.PIECE_BYTES = 1  # many messages
    is_bad = rank == BAD
    dying = Dying(_ring_transport.ProcessGroupRing.rotate, folder, is_bad, "late" in scene)
    _ring_transport.ProcessGroupRing.rotate = functools.partialmethod(
        lambda ring, *args: dying(ring, *args)
    )
    x = torch.ones(6, 32, 8, requires_grad=True)
    try:
        if scene == "never calls" and is_bad:
            time.sleep(2.5 * TIMEOUT.total_seconds())
            return None
        if "dies going forward" in scene:
            dying.left = 1
        out = FUNCTIONS[function](x, x, x, causal=True, layout="zigzag")
        meet(folder, rank)
        if "dies going back" in scene:
            dying.left = 1
        if scene == "never goes back" and is_bad:
            time.sleep(2.5 * TIMEOUT.total_seconds())
            return None
        out.sum().backward()
    except RuntimeError as error:
        return str(error), list(getattr(error, "__notes__", []))
    return "no error", []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_rank_that_fails_is_an_error_of_all_others(function, scene, tmp_path):
    run_program(__file__, function, scene, tmp_path, timeout=20 * TIMEOUT.total_seconds())
    found = left_by(tmp_path, WORLD_SIZE)
    assert found[BAD] is None
    for rank in set(range(WORLD_SIZE)) - {BAD}:
        text, notes = found[rank]
        expected = f"scaledot: rank {rank} of {WORLD_SIZE} was sending to process "
        assert [note[: len(expected)] for note in notes] == [expected], text


if __name__ == "__main__":
    name, what, where = sys.argv[1:]
    place = Path(where)
    act = functools.partial(play, name, what, place)
    codes = fork_ranks(WORLD_SIZE, act, place, TIMEOUT)
    expected = [0, -signal.SIGKILL if "dies" in what else 0, 0]
    sys.exit(codes != expected)
