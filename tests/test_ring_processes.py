"""Ring and Ulysses attention between real processes over gloo, in the order of `SCENES`.

Run as a program this file loads everything once and forks all ranks, each of which plays its
scenes and leaves what it found as a file.
"""

import datetime
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

import cases
from compare import EPS, as_float64, assert_close

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch is built without torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402 - only where there is one

from ring_calls import (  # noqa: E402 - imports PyTorch
    FUNCTIONS,
    OPTIONS,
    Found,
    as_tensors,
    differentiate,
    own_share,
    shards_of,
    tensor,
)
from scaledot._ring_transport import ProcessGroupRing  # noqa: E402

pytestmark = pytest.mark.heavy

LENGTH = 13
SIZE = cases.Size(len_q=LENGTH, len_kv=LENGTH, d_k=4, d_v=3, num_heads=8, num_kv_heads=4, lead=(2,))
LENGTHS = {2: (5, 8), 4: (4, 0, 6, 3)}
# Name, function, layout, dtype, even shards, option: small, since every one costs many messages.
CALLS = [
    ("ring", "contiguous", "float64", False, "everything"),
    ("ring", "zigzag", "float32", True, "everything"),
    ("ring", "zigzag", "bfloat16", True, "causal"),
    ("ulysses", "contiguous", "float32", False, "everything"),
    ("ulysses", "zigzag", "float64", True, "everything"),
]
GROUP_TIMEOUT = datetime.timedelta(seconds=120)  # a busy machine is no failure
LATE = datetime.timedelta(seconds=2)


def arguments_of(dtype, option):
    arrays = SIZE.arrays(np.random.default_rng(5))
    return {n: x.astype(cases.dtype_named(dtype)) for n, x in arrays.items()} | OPTIONS[option]


def grad_out_of(dtype):
    shape = (2, SIZE.num_heads, LENGTH, SIZE.d_v)
    return np.random.default_rng(6).standard_normal(shape).astype(cases.dtype_named(dtype))


def shards_for(world_size, layout, is_even):
    return shards_of(LENGTH, world_size, layout, None if is_even else LENGTHS[world_size])


# What a rank does


def play_calls(rank, world_size):
    """Results and gradients of this rank for each of the calls."""
    found = []
    for function, layout, dtype, is_even, option in CALLS:
        own = shards_for(world_size, layout, is_even)[rank]
        share = as_tensors(own_share(arguments_of(dtype, option), own, own))
        grad_out = tensor(grad_out_of(dtype)[..., own, :])
        found.append(differentiate(FUNCTIONS[function], share, grad_out, layout=layout))
    return found


def play_numpy(rank, world_size):
    """Arrays of NumPy travel, too."""
    own = shards_for(world_size, "contiguous", True)[rank]
    share = own_share(arguments_of("bfloat16", "causal"), own, own)
    return FUNCTIONS["ring"](**share)


def play_subgroup(rank, world_size):
    """Ranks of a group count from 0, whatever the processes are called."""
    last = world_size - 2
    group = dist.new_group([last, last + 1])
    if rank < last:
        return None
    x = torch.full((1, 2, 3), float(rank - last), dtype=torch.float64)
    return FUNCTIONS["ring"](x, x, x, group=group, scale=0.0)


def message_of(call):
    """Kind and text of the error of a call."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), list(getattr(error, "__notes__", []))
    return None


def play_outsider(rank, world_size):
    """Only those who belong to a group may call."""
    group = dist.new_group([0])
    x = torch.ones(1, 2, 3)
    return message_of(lambda: FUNCTIONS["ring"](x, x, x, group=group))


def play_different(rank, world_size):
    """One rank has other options, one has arguments that are wrong."""
    x = torch.ones(4, 2, 3)
    last = rank == world_size - 1
    wide = torch.ones(4, 2, 5) if last else x
    texts = [message_of(lambda f=f: f(x, x, x, causal=last)) for f in FUNCTIONS.values()]
    texts += [message_of(lambda f=f: f(wide, x, x)) for f in FUNCTIONS.values()]
    more = torch.ones(8, 2, 3) if last else x  # right by itself
    return texts + [message_of(lambda f=f: f(more, x, x)) for f in FUNCTIONS.values()]


def play_arrival(rank, world_size):
    """Whether a message arrives while this process is busy and calls nothing of the ring."""
    received, real = [], torch.empty

    def empty(*args, **options):
        received.append(real(*args, **options).zero_())
        return received[-1]

    x = torch.full((2**21,), rank + 1.0)
    torch.empty = empty
    try:
        wait = ProcessGroupRing(None).rotate([x], [tuple(x.shape)])
    finally:
        torch.empty = real
    end = time.monotonic() + GROUP_TIMEOUT.total_seconds() / 2
    while received[0][-1] == 0 and time.monotonic() < end:
        x.sum()
    arrived = float(received[0][-1])
    wait()
    return arrived


def play_late(rank, world_size):
    """Rank 1 comes when the others have given up."""
    group = dist.new_group(timeout=LATE)
    x = torch.ones(1, 2, 3)
    if rank == 1:
        time.sleep(2 * LATE.total_seconds())
        return None
    return message_of(lambda: FUNCTIONS["ring"](x, x, x, group=group))


def play_death(rank, world_size):
    """Rank 1 dies between forward and backward."""
    x = torch.ones(1, 2, 3, requires_grad=True)
    out = FUNCTIONS["ring"](x, x, x)
    if rank == 1:
        os._exit(9)
    return message_of(lambda: out.sum().backward())


SCENES = {
    2: [play_calls, play_numpy, play_outsider, play_different, play_arrival, play_late],
    4: [play_calls, play_subgroup, play_different, play_death],
}


def play(rank, world_size, folder):
    """Be one rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{world_size}", rank=rank,
        world_size=world_size, timeout=GROUP_TIMEOUT,
    )  # fmt: skip
    found = {}
    for scene in SCENES[world_size]:
        found[scene.__name__] = scene(rank, world_size)
        (folder / f"{world_size}-{rank}.pickle").write_bytes(pickle.dumps(found))


def fork_all(folder):
    """Start all ranks and leave their exit codes as a file."""
    torch.set_num_threads(1)
    started = {}
    for world_size in SCENES:
        for rank in range(world_size):
            process = os.fork()
            if process == 0:
                try:
                    play(rank, world_size, folder)
                    os._exit(0)  # groups with a dead member do not end well
                finally:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
            started[process] = world_size, rank
    codes = {}
    while len(codes) < len(started):
        process, status = os.wait()
        codes[started[process]] = os.waitstatus_to_exitcode(status)
    (folder / "codes.pickle").write_bytes(pickle.dumps(codes))


# What they found


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """What all ranks found, by number of ranks and rank."""
    if not hasattr(os, "fork"):
        pytest.skip("processes are forked here")
    folder, here = tmp_path_factory.mktemp("ring"), Path(__file__).resolve().parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent / "src"), str(here)]),
        "OMP_NUM_THREADS": "1", "SCALEDOT_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the session that was started here
        pytest.fail(f"ranks hang: {process.communicate()[0]}")
    assert process.returncode == 0, said
    codes = pickle.loads((folder / "codes.pickle").read_bytes())
    for (world_size, rank), code in codes.items():
        dies = rank == 1 and play_death in SCENES[world_size]
        assert code == (9 if dies else 0), said
    return {key: pickle.loads((folder / f"{key[0]}-{key[1]}.pickle").read_bytes()) for key in codes}


def scene_of(everything, world_size, scene):
    """What each rank found in one scene; None for one that did not live through it."""
    return [everything[world_size, rank].get(scene.__name__) for rank in range(world_size)]


def whole(arguments, grad_out):
    """The same call in one process, in float64."""
    import scaledot as sd

    wide = {n: x.astype(np.float64) if n in ("query", "key", "value") else x
            for n, x in arguments.items()}  # fmt: skip
    return differentiate(sd.attention, as_tensors(wide), tensor(grad_out.astype(np.float64)))


@pytest.mark.parametrize("number", range(len(CALLS)))
@pytest.mark.parametrize("world_size", [2, 4])
def test_calls(everything, world_size, number):
    import scaledot as sd

    _, layout, dtype, is_even, option = CALLS[number]
    arguments, grad_out = arguments_of(dtype, option), grad_out_of(dtype)
    shards = shards_for(world_size, layout, is_even)
    results = [calls[number] for calls in scene_of(everything, world_size, play_calls)]
    found = Found(arguments, results, shards, shards)
    truth = whole(arguments, grad_out)
    near = differentiate(sd.attention, as_tensors(arguments), tensor(grad_out))
    assert_close(found.out, truth[0], near[0], eps=EPS[dtype], len_kv=LENGTH)
    for name, got in found.grads.items():
        # Gradients cancel: their floor is that of the gradient of values, whose terms do not.
        size = max(np.abs(as_float64(truth[1][n])).max() for n in ("value", name))
        error = np.abs(as_float64(near[1][name]) - as_float64(truth[1][name])).max()
        yardstick = as_float64(truth[1][name]) + error + EPS[dtype] * LENGTH**0.5 * size / 3
        assert_close(got, truth[1][name], yardstick, eps=EPS[dtype], len_kv=LENGTH, factor=3.0)


def test_arrays_of_numpy(everything):
    parts = scene_of(everything, 2, play_numpy)
    out = np.concatenate(parts, axis=-2)
    assert out.dtype.name == "bfloat16"
    arguments = arguments_of("bfloat16", "causal")
    truth, _ = whole(arguments, grad_out_of("bfloat16"))
    assert_close(out, truth, eps=EPS["bfloat16"], len_kv=LENGTH)


def test_a_group_of_some_processes(everything):
    outs = scene_of(everything, 4, play_subgroup)
    assert outs[:-2] == [None] * (len(outs) - 2)
    assert all((out == 0.5).all() for out in outs[-2:])  # the mean of the values 0 and 1


def test_a_process_outside_the_group(everything):
    inside, outside = scene_of(everything, 2, play_outsider)
    assert inside is None
    kind, text, _ = outside
    assert kind == "ValueError"
    assert text.startswith("this process must belong to group, got a group without it.")


@pytest.mark.parametrize("world_size", [2, 4])
def test_differences_are_errors_on_every_rank(everything, world_size):
    found = scene_of(everything, world_size, play_different)
    last = len(found) - 1
    for rank, texts in enumerate(found):
        for kind, text, _ in texts[:2]:
            assert kind == "ValueError"
            assert text.startswith(
                f"causal and window must be the same on every rank, got another on rank {last}"
            )
        for kind, text, _ in texts[2:4] if rank < last else []:
            assert kind == "ValueError"
            assert text.startswith(f"the arguments must be valid on every rank, got an error on "
                                   f"rank {last}.")  # fmt: skip
        for kind, text, _ in texts[2:4] if rank == last else []:
            assert (kind, text.partition(",")[0]) == (
                "ValueError", "query and key must have the same d_k"
            )  # fmt: skip
        for kind, text, _ in texts[4:]:
            heads = ", ".join(f"{8 if r == last else 4} on rank {r}" for r in range(last + 1))
            assert kind == "ValueError"
            assert text.startswith(f"num_heads must be the same on every rank, got {heads}")


def test_the_next_hop_arrives_while_a_block_is_computed(everything):
    assert scene_of(everything, 2, play_arrival) == [2.0, 1.0]


def test_a_late_process_is_an_error_of_those_that_wait(everything):
    waiting, late = scene_of(everything, 2, play_late)
    assert late is None
    kind, text, notes = waiting
    assert kind == "RuntimeError"
    assert "Timed out" in text
    assert "one of them has failed or is late" in notes[0]


def test_a_dead_process_is_an_error_of_all_others(everything):
    found = scene_of(everything, 4, play_death)
    assert found[1] is None
    for rank in (0, 2, 3):
        kind, _, notes = found[rank]
        assert kind == "RuntimeError"
        assert notes[0].startswith(f"scaledot: rank {rank} of 4 was sending to process ")


if __name__ == "__main__":
    fork_all(Path(sys.argv[1]))
