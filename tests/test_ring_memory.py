"""Memory that ring attention takes on each of four real processes, beside its arguments.

A shard is the bytes of a rank's query, key and value. Run as a program this file forks the ranks.
"""

import datetime
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch is built without torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402 - only where there is one

from ring_calls import fork_ranks, left_by, run_program  # noqa: E402 - imports PyTorch
from scaledot._ring import ring_attention  # noqa: E402

pytestmark = pytest.mark.heavy

WORLD_SIZE = 4
LIMIT = 4.0  # shards
WIDTH = 128
# dtype, heads of query, of key, tokens of a rank: shards of 24 MiB, and of 16 where keys are few
CALLS = {
    "float32": ("float32", 16, 16, 1024),
    "bfloat16": ("bfloat16", 16, 16, 2048),
    "float32-groups": ("float32", 16, 8, 1024),
    "bfloat16-groups": ("bfloat16", 16, 4, 2752),
}
CLEAR = Path("/proc/self/clear_refs")


def resident(field):
    """Bytes, by a field of the process's status; `VmHWM` is the most since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measured(call):
    """Result of a call and how much resident memory rose above that before it."""
    CLEAR.write_text("5")
    before = resident("VmRSS")
    result = call()
    return result, resident("VmHWM") - before


def extra_memory(dtype, heads, kv_heads, length):
    """Bytes of a shard, and of extra memory forward and backward without the results."""
    numbers = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (
        torch.randn(1, n, length, WIDTH, generator=numbers).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    grad_out = torch.randn(1, heads, length, WIDTH, generator=numbers).to(dtype)
    shard = q.nbytes + k.nbytes + v.nbytes
    out, forth = measured(lambda: ring_attention(q, k, v, causal=True, layout="zigzag"))
    dist.barrier()
    _, back = measured(lambda: out.backward(grad_out))
    assert all(x.grad.abs().sum() > 0 for x in (q, k, v))
    # Gradients of keys are results, too, but come to be when the peak is over.
    return shard, forth - out.nbytes, back - q.nbytes


def play(name):
    dtype, heads, kv_heads, length = CALLS[name]
    dtype = getattr(torch, dtype)
    extra_memory(dtype, heads, kv_heads, 64)  # kernels, threads and buffers of gloo
    found = extra_memory(dtype, heads, kv_heads, length)
    dist.barrier()
    return found


@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize("name", CALLS)
def test_extra_memory(name, tmp_path):
    # Freed memory goes back to the system at once: what is counted is what is held.
    run_program(__file__, name, tmp_path, MALLOC_MMAP_THRESHOLD_="65536")
    for shard, forth, back in left_by(tmp_path, WORLD_SIZE):
        assert shard >= 16 * 2**20
        # The next keys have to be somewhere while these are computed with.
        assert shard / 8 < forth <= LIMIT * shard, forth / shard
        assert shard / 8 < back <= LIMIT * shard, back / shard


if __name__ == "__main__":
    codes = fork_ranks(WORLD_SIZE, lambda rank: play(sys.argv[1]), Path(sys.argv[2]),
                       datetime.timedelta(seconds=120))  # fmt: skip
    sys.exit(max(map(abs, codes)))
