"""What `explain` says of a call against what the call does."""

import math

import numpy as np
import pytest
import threadpoolctl

import cases
import scaledot as sd
from test_determinism import arrays, peak

LENGTH, NUM_HEADS = 2048, 4
SIZE = cases.Size(LENGTH, LENGTH, d_k=64, num_heads=NUM_HEADS, lead=(1,))
BLOCKS = LENGTH // 128
RNG = np.random.default_rng(0)
MASK = RNG.random((LENGTH, LENGTH)) < 0.9
BIAS = RNG.standard_normal((LENGTH, LENGTH), dtype=np.float32)

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 100)},
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS},
    "bias of float64": {"bias": BIAS.astype(np.float64)},
    "segments": {"segment_ids": np.arange(LENGTH) // 200},
    "kv_len": {"kv_len": LENGTH - 3},
    "softcap": {"softcap": 5.0},
    "alibi_slopes": {"alibi_slopes": cases.slopes(NUM_HEADS)},
    "sinks": {"sinks": np.ones(NUM_HEADS, dtype=np.float32)},
    "score_mod": {"score_mod": lambda score, batch, head, q_pos, kv_pos: score + np.float32(0.1)},
    "mask_mod": {"mask_mod": lambda batch, head, q_pos, kv_pos: q_pos >= kv_pos},
    "block_mask": {"block_mask": np.ones((BLOCKS, BLOCKS), dtype=bool)},
    "dropout": {"dropout": 0.1, "seed": 1},
    "many": {
        "causal": True, "mask": MASK, "bias": BIAS, "dropout": 0.1, "seed": 1,
        "alibi_slopes": cases.slopes(NUM_HEADS),
    },
}  # fmt: skip


class UnusualError(Exception):
    """An exception that nothing else raises."""


@pytest.fixture(autouse=True, scope="module")
def blas_on_one_thread():
    """Its threads, waiting for one another on a busy machine, take most of the time."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(autouse=True)
def restored_threads():
    """Let no number of threads stay set."""
    yield
    sd.set_num_threads(None)


def check_memory(arguments, impl):
    expected = sd.explain(**arguments, impl=impl).peak_extra_memory
    measured = peak(lambda: sd.attention(**arguments, impl=impl))
    assert measured / 2 <= expected <= measured * 2, f"{expected / measured:.2f} of the measured"


@pytest.mark.heavy
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_memory(name, num_threads, impl):
    """Within a factor of 2 of what a call holds besides arguments and result."""
    if impl == "dense" and num_threads == 2:
        pytest.skip("dense runs on the caller's thread")
    sd.set_num_threads(num_threads)
    check_memory(arrays(size=SIZE) | OPTIONS[name], impl)


@pytest.mark.parametrize(("name", "dtype"), [
    ("plain", "float64"), ("plain", "float16"), ("causal", "float64"), ("bias", "float16"),
    ("sinks", "float64"), ("dropout", "float16"),
    *(
        pytest.param(*pair, marks=pytest.mark.heavy)
        for pair in (
            ("causal", "float16"), ("bias", "float64"), ("sinks", "float16"),
            ("dropout", "float64"),
        )
    ),
])  # fmt: skip
def test_memory_of_other_dtypes(name, dtype, impl):
    sd.set_num_threads(2)
    check_memory(arrays(dtype, SIZE) | OPTIONS[name], impl)


@pytest.mark.parametrize(
    "size",
    [
        cases.Size(1, 8192, d_k=64, num_heads=8, num_kv_heads=2, lead=(1,)),
        cases.Size(256, 256, d_k=64, num_heads=4, lead=(8,)),
        cases.Size(2048, 2048, d_k=16, d_v=256, num_heads=4, num_kv_heads=1, lead=(1,)),
    ],
    ids=["decode", "batch", "wide values"],
)
def test_memory_of_other_shapes(size, impl):
    sd.set_num_threads(2)
    check_memory(arrays(size=size), impl)


def test_tiles_of_blockwise():
    arguments = arrays(size=cases.Size(LENGTH, LENGTH, d_k=64, num_heads=4, num_kv_heads=2))
    arguments["impl"] = "blockwise"
    total = 2 * 4 * (LENGTH // 256) * (LENGTH // 512)
    plain = sd.explain(**arguments)
    assert (plain.block_q, plain.block_kv) == (256, 512)
    assert (plain.tiles_run, plain.tiles_skipped) == (total, 0)
    # The triangle and the tiles on its edge: 1 + 1 + 2 + 2 + 3 + 3 + 4 + 4 of 8 rows of 4.
    causal = sd.explain(**arguments, causal=True)
    assert (causal.tiles_run, causal.tiles_skipped) == (8 * 20, 8 * 12)
    assert causal.flops == plain.flops * 20 // 32
    diagonal = sd.explain(**arguments, causal=True, window=(0, 0))
    assert diagonal.tiles_run == 8 * 8


@pytest.mark.parametrize("impl", ["blockwise", "kernels"])
def test_counts(impl):
    """What every plan must satisfy, whatever the tiles are."""
    size = cases.Size(LENGTH, LENGTH, d_k=64, d_v=32, num_heads=4, num_kv_heads=2)
    arguments = arrays(size=size) | {"impl": impl}
    plain = sd.explain(**arguments)
    total = 2 * 4 * math.ceil(LENGTH / plain.block_q) * math.ceil(LENGTH / plain.block_kv)
    assert (plain.tiles_run, plain.tiles_skipped) == (total, 0)
    assert plain.implementation == impl
    assert plain.flops == 2 * (64 + 32) * 8 * LENGTH * LENGTH
    query, key, value = (arguments[name].size for name in ("query", "key", "value"))
    assert plain.bytes_moved == 4 * (query + key + value + query // 2)
    about_half = sd.explain(**arguments, causal=True)
    assert total / 2 < about_half.tiles_run < total * 0.65
    assert plain.flops / 2 < about_half.flops < plain.flops * 0.65
    for options in (
        {"causal": True}, {"window": (100, 100)}, {"kv_len": 700}, {"causal": True, "q_offset": 0},
        {"kv_len": np.array([0, LENGTH])}, {"causal": True, "q_offset": np.array([-5000, 3])},
    ):  # fmt: skip
        plan = sd.explain(**arguments, **options)
        assert plan.tiles_run + plan.tiles_skipped == total
        assert plan.tiles_skipped > 0
        assert plan.flops < plain.flops
    assert sd.explain(**arguments, causal=True, q_offset=-5000).tiles_run == 0
    assert sd.explain(**arguments, causal=True, q_offset=-5000).flops == 0


@pytest.mark.parametrize("impl", ["blockwise", "kernels"])
@pytest.mark.parametrize("length", [1, 100, 257, 1000, 1537])
def test_counts_of_odd_lengths(length, impl):
    arguments = arrays(size=cases.Size(length, length + 3, d_k=2)) | {"impl": impl}
    plain = sd.explain(**arguments)
    total = 4 * math.ceil(length / plain.block_q) * math.ceil((length + 3) / plain.block_kv)
    assert (plain.tiles_run, plain.tiles_skipped) == (total, 0)
    causal = sd.explain(**arguments, causal=True)
    assert causal.tiles_run + causal.tiles_skipped == total


@pytest.mark.parametrize("impl", ["blockwise", "kernels"])
def test_counts_of_nothing(impl):
    for size in (cases.Size(0, 5), cases.Size(5, 0), cases.Size(lead=(0,))):
        plan = sd.explain(**arrays(size=size), impl=impl)
        assert (plan.tiles_run, plan.tiles_skipped, plan.flops) == (0, 0, 0)


def test_dense_is_one_tile_a_head():
    plan = sd.explain(**arrays(size=SIZE), causal=True, impl="dense")
    assert (plan.implementation, plan.block_q, plan.block_kv) == ("dense", LENGTH, LENGTH)
    assert (plan.tiles_run, plan.tiles_skipped) == (NUM_HEADS, 0)


def test_tiles_that_a_plan_skips_are_never_computed():
    """A score_mod counts those that are."""
    sd.set_num_threads(1)
    heads = []

    def score_mod(score, *where):
        heads.append(math.prod(score.shape[:-2]))
        return score

    arguments = arrays(size=cases.Size(1000, 1600, d_k=2)) | {"score_mod": score_mod}
    for options in (
        {}, {"causal": True}, {"window": (50, 10)}, {"kv_len": np.array([3, 1500])},
        {"causal": True, "q_offset": np.array([-2000, 600])},
    ):  # fmt: skip
        plan = sd.explain(**arguments, **options, impl="blockwise")
        assert not heads
        sd.attention(**arguments, **options, impl="blockwise")
        assert sum(heads) == plan.tiles_run
        heads.clear()


def test_the_call_is_not_run():
    def raising(*arguments):
        raise UnusualError

    plan = sd.explain(**arrays(size=SIZE), score_mod=raising, mask_mod=raising)
    assert plan.implementation == "blockwise"
    assert plan.reason in str(plan)
    with pytest.raises(UnusualError):
        sd.attention(**arrays(size=SIZE), score_mod=raising)


def test_arrays_are_not_read():
    """Of these, copies would take gigabytes."""
    huge = np.broadcast_to(np.float32(0), (1, 8, 2**21, 128))
    plan = sd.explain(huge[:, :, :1], huge, huge, causal=True)
    assert plan.bytes_moved == 4 * 128 * 8 * (2 * 2**21 + 2)


def test_auto_is_never_quadratic():
    """Memory grows with the length at most as the length does."""
    plans = [
        sd.explain(*[np.broadcast_to(np.float32(0), (1, 4, length, 64))] * 3)
        for length in (2**14, 2**16)
    ]
    assert plans[1].peak_extra_memory < 5 * plans[0].peak_extra_memory
    assert plans[0].implementation == plans[1].implementation != "dense"
