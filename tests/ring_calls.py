"""One call cut into the shards of several ranks, and what these return put together."""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cases
from scaledot._ring import ring_attention
from scaledot._ring_transport import InProcessRing
from scaledot._ulysses import ulysses_attention

LAYOUTS = ("contiguous", "zigzag")
FUNCTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
SIZE = cases.Size(len_q=13, len_kv=13, d_k=4, d_v=3, num_heads=8, num_kv_heads=4, lead=())
BY_ROWS = ("query", "key", "value")
COUNTED = {"alibi_slopes", "sinks"}  # the same on every rank; their gradients are summed


def normal(*shape, number=0, dtype=np.float64):
    return np.random.default_rng(number).standard_normal(shape).astype(dtype)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "window_causal": {"window": (4, None), "causal": True},
    "segments": {"segment_ids": np.array([0] * 4 + [2] * 6 + [-1] + [5] * 2)},
    "two_segments": {"segment_ids": (np.arange(13) % 3, np.arange(13) % 4), "causal": True},
    "bias": {"bias": normal(8, 13, 13)},
    "bias_of_keys": {"bias": normal(13), "causal": True},
    "bias_of_rows": {"bias": normal(8, 13, 1)},
    "bias_of_heads": {"bias": normal(8, 1, 13)},
    "alibi": {"alibi_slopes": 2.0 ** -np.arange(8)},
    "softcap": {"softcap": 1.5, "scale": -0.7},
    "sinks": {"sinks": normal(8, number=2), "causal": True},
    "dropout": {"dropout": 0.3, "seed": 11, "causal": True},
    "everything": {
        "causal": True, "window": (9, 0), "segment_ids": np.arange(13) // 9, "softcap": 2.0,
        "bias": normal(1, 13, 13, number=3), "alibi_slopes": 3.0 ** -np.arange(8),
        "sinks": normal(8, number=4), "dropout": 0.2, "seed": -5,
    },
}  # fmt: skip


# Cutting a sequence into shards, without the library


def shards_of(length, world_size, layout, lengths=None):
    """Positions of the tokens of each rank; lengths are those of the shards, None for even ones."""
    if layout == "contiguous":
        if lengths is None:
            return np.array_split(np.arange(length), world_size)
        return np.split(np.arange(length), np.cumsum(lengths)[:-1])
    if lengths is None:
        pieces = np.array_split(np.arange(length), 2 * world_size)
    else:
        halves = [(n + 1) // 2 for n in lengths] + [n // 2 for n in reversed(lengths)]
        pieces = np.split(np.arange(length), np.cumsum(halves)[:-1])
    return [np.concatenate([pieces[r], pieces[-1 - r]]) for r in range(world_size)]


def own_share(arguments, rows, columns):
    """What one rank passes: its tokens, its rows of a bias, and the rest as it is."""
    share = dict(arguments)
    share["query"] = arguments["query"][..., rows, :]
    share |= {name: arguments[name][..., columns, :] for name in ("key", "value")}
    bias = arguments.get("bias")
    if bias is not None and bias.ndim > 1 and bias.shape[-2] != 1:
        share["bias"] = bias[..., rows, :]
    ids = arguments.get("segment_ids")
    if ids is not None:
        ids = ids if isinstance(ids, tuple) else (ids, ids)
        share["segment_ids"] = ids[0][..., rows], ids[1][..., columns]
    return share


def tensor(x):
    if x.dtype.name == "bfloat16":
        return torch.tensor(x.astype(np.float32)).to(torch.bfloat16)
    return torch.tensor(x)


def as_tensors(share):
    def convert(x):
        if isinstance(x, np.ndarray):
            return tensor(x)
        return tuple(map(convert, x)) if isinstance(x, tuple) else x

    return {name: convert(x) for name, x in share.items()}


class Found:
    """Result and gradients of all ranks, put together."""

    def __init__(self, arguments, results, q_shards, kv_shards):
        rows, columns = (np.argsort(np.concatenate(s)) for s in (q_shards, kv_shards))
        self.out = self._joined([out for out, _ in results])[..., rows, :]
        self.grads = {}
        for name in results[0][1]:
            parts = [grads[name] for _, grads in results]
            if name in BY_ROWS:
                order = rows if name == "query" else columns
                self.grads[name] = self._joined(parts)[..., order, :]
            elif name == "bias" and arguments[name].ndim > 1 and arguments[name].shape[-2] != 1:
                self.grads[name] = self._joined(parts)[..., rows, :]
            else:
                self.grads[name] = sum(parts)

    @staticmethod
    def _joined(parts):
        return torch.cat(parts, dim=-2)


def differentiate(function, share, grad_out, **more):
    """Out and gradients of one rank, by name."""
    leaves = {name: x.requires_grad_() for name, x in share.items()
              if isinstance(x, torch.Tensor) and x.is_floating_point()}  # fmt: skip
    out = function(**share | leaves, **more)
    found = torch.autograd.grad(out, list(leaves.values()), grad_out)
    return out.detach(), dict(zip(leaves, found, strict=True))


def spread(arguments, grad_out, world_size, layout, *, function=ring_attention, lengths=None,
           kv_lengths=None, **more):  # fmt: skip
    """Cut a call into shards, run all ranks and join what they return."""
    lengths, kv_lengths = lengths, lengths if kv_lengths is None else kv_lengths
    q_shards = shards_of(arguments["query"].shape[-2], world_size, layout, lengths)
    kv_shards = shards_of(arguments["key"].shape[-2], world_size, layout, kv_lengths)

    def work(group):
        rows, columns = q_shards[group.rank], kv_shards[group.rank]
        share = as_tensors(own_share(arguments, rows, columns))
        return differentiate(function, share, tensor(grad_out[..., rows, :]), group=group,
                             layout=layout, **more)  # fmt: skip

    results = InProcessRing(world_size, timeout=60).run(work)
    return Found(arguments, results, q_shards, kv_shards)


def errors_of(world_size, work):
    """What each rank raised."""
    def caught(group):
        try:
            work(group)
        except Exception as error:
            return error
        return None

    return InProcessRing(world_size, timeout=20).run(caught)


def arguments_of(option, dtype="float32", size=SIZE, number=0):
    arrays = size.arrays(np.random.default_rng(number))
    return {n: x.astype(cases.dtype_named(dtype)) for n, x in arrays.items()} | OPTIONS[option]


# Real processes


def run_program(path, *arguments, timeout=480, **environment):
    """Run a test file as a program that forks ranks; fail if they hang, return what it said."""
    return run_command([path, *map(str, arguments)], timeout=timeout, **environment)


def run_command(arguments, *, timeout=480, **environment):
    """Run Python with arguments that make it start ranks, as above."""
    here = Path(__file__).resolve().parent
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent / "src"), str(here)]),
        "OMP_NUM_THREADS": "1", "SCALEDOT_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *arguments], env=variables | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the session that was started here
        pytest.fail(f"ranks hang: {process.communicate()[0]}")
    assert process.returncode == 0, said
    return said


def fork_ranks(world_size, play, folder, timeout):
    """Fork ranks that meet over gloo; what ``play(rank)`` returns is left as a file of the folder.

    Returns the exit codes of the ranks.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/meeting", rank=rank,
                    world_size=world_size, timeout=timeout,
                )  # fmt: skip
                (folder / f"{rank}.pickle").write_bytes(pickle.dumps(play(rank)))
                os._exit(0)  # groups with a dead member do not end well
            finally:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def left_by(folder, world_size):
    """What each rank left; None for one that did not come so far."""
    files = [folder / f"{rank}.pickle" for rank in range(world_size)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
