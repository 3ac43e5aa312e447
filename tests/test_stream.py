"""Chunks of keys and values: cut, and pages given back."""

import gc
import itertools
import mmap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import naive
import scaledot as sd
import textbook
from cli_runs import BFLOAT16
from compare import EPS, assert_close
from scaledot import _stream

SHAPES = {"query": (2, 4, 30, 8), "key": (2, 2, 90, 8), "value": (2, 2, 90, 5)}


def arrays(dtype=np.float32):
    rng = np.random.default_rng(4)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def mapped(path, array, mode="r"):
    """The same numbers in a file, mapped."""
    np.save(path, array)
    return np.load(path, mmap_mode=mode)


def slices(folder, given):
    safetensors.numpy.save_file(given, folder / "kv.safetensors")
    opened = safetensors.safe_open(folder / "kv.safetensors", "numpy")
    return opened.get_slice("key"), opened.get_slice("value")


def check(state, given, causal=True):
    seen = np.arange(90) <= np.arange(60, 90)[:, None] if causal else np.ones((30, 90), bool)
    wide = {name: x.astype(np.float64) for name, x in given.items()}
    truth, _ = textbook.attention(*wide.values(), seen)
    yardstick, _ = textbook.attention(*given.values(), seen)
    eps = EPS[given["key"].dtype.name]
    assert_close(state.out, truth, yardstick, eps=eps, len_kv=90)


KINDS = ("memory", "mapped", "mapped, read-only", "copied on write", "transposed", "slices")


def of_kind(folder, kind, given):
    key, value = given["key"], given["value"]
    if kind == "slices":
        return slices(folder, given)
    if kind == "memory":
        return key, value
    if kind == "transposed":
        return [
            mapped(folder / f"{i}.npy", np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
            for i, x in enumerate((key, value))
        ]
    mode = {"mapped": "r+", "mapped, read-only": "r", "copied on write": "c"}[kind]
    return [mapped(folder / f"{i}.npy", x, mode) for i, x in enumerate((key, value))]


@pytest.mark.parametrize("chunk_len", [None, 1, 7, 90, 1000])
@pytest.mark.parametrize("read_ahead", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_hold_every_token_once(tmp_path, kind, read_ahead, chunk_len):
    given = arrays()
    key, value = of_kind(tmp_path, kind, given)
    chunks = sd.read_chunks(key, value, chunk_len=chunk_len, kv_offset=5, read_ahead=read_ahead)
    places, keys, values = [], [], []
    for chunk in chunks:
        places.append(chunk.kv_offset)
        keys.append(np.array(chunk.key))
        values.append(np.array(chunk.value))
    step = chunk_len or 90
    assert places == list(range(5, 95, step))
    assert np.array_equal(np.concatenate(keys, axis=-2), given["key"])
    assert np.array_equal(np.concatenate(values, axis=-2), given["value"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(tmp_path, kind, dtype):
    given = arrays(dtype)
    if kind.startswith(("mapped", "transposed", "copied")) and dtype == BFLOAT16:
        pytest.skip("NumPy's files have no bfloat16")
    key, value = of_kind(tmp_path, kind, given)
    chunks = sd.read_chunks(key, value, chunk_len=16)
    check(sd.attend_chunks(given["query"], chunks, causal=True, q_offset=60), given)


def test_attention_in_plain_loops(tmp_path):
    given = {name: x[:1, :, :7] for name, x in arrays(np.float64).items()}
    given["key"], given["value"] = given["key"][:, :, :6], given["value"][:, :, :6]
    chunks = sd.read_chunks(given["key"], given["value"], chunk_len=2)
    state = sd.attend_chunks(given["query"], chunks)
    truth = naive.attention(**given)
    truth = truth[0] if isinstance(truth, tuple) else truth
    assert_close(state.out, truth, eps=EPS["float64"], len_kv=6)


@pytest.mark.parametrize("library", ["torch", "jax", "array_api_strict"])
def test_other_libraries(library):
    module = pytest.importorskip("jax.numpy" if library == "jax" else library)
    given = arrays()
    query, key, value = map(module.asarray, given.values())
    state = sd.attend_chunks(query, sd.read_chunks(key, value, chunk_len=40), causal=True,
                             q_offset=60)
    assert type(state.out) is type(query)
    check(state, given)
    (chunk,) = sd.read_chunks(key, value)
    assert chunk.key.shape == (2, 2, 90, 8)


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint8])
def test_offsets_may_be_arrays(dtype):
    given = arrays()
    offset = np.array([0, 100])
    chunks = sd.read_chunks(
        given["key"], given["value"], chunk_len=40, kv_offset=offset.astype(dtype)
    )
    state = sd.attend_chunks(given["query"], chunks, causal=True, q_offset=offset + 60)
    check(state, given)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_no_tokens_are_one_chunk(tmp_path, kind):
    given = {name: x[:, :, :0] for name, x in arrays().items()}
    (chunk,) = sd.read_chunks(*of_kind(tmp_path, kind, given))
    assert chunk.key.shape == (2, 2, 0, 8)
    assert chunk.value.shape == (2, 2, 0, 5)


def test_an_empty_array_in_a_safetensors_file(tmp_path):
    (chunk,) = sd.read_chunks(*slices(tmp_path, {
        "key": np.zeros((2, 0, 8), np.float32), "value": np.zeros((2, 0, 5), np.float32),
    }))  # fmt: skip
    assert chunk.key.shape == (2, 0, 8)
    chunks = sd.read_chunks(*slices(tmp_path, {
        "key": np.zeros((2, 9, 0), np.float32), "value": np.zeros((2, 9, 5), np.float32),
    }), chunk_len=4)  # fmt: skip
    assert [chunk.key.shape for chunk in chunks] == [(2, 4, 0), (2, 4, 0), (2, 1, 0)]


def test_the_usual_chunk_is_32_mebibytes_of_whole_tiles():
    key = np.broadcast_to(np.float32(0), (8, 100_000, 64))
    lengths = [chunk.key.shape[1] for chunk in sd.read_chunks(key, key)]
    assert lengths[0] * 8 * 2 * 64 * 4 == 2**25
    assert lengths[:-1] == lengths[:1] * (len(lengths) - 1)
    wide = np.broadcast_to(np.float64(0), (8, 100_000, 96))
    first = next(sd.read_chunks(wide, wide))
    assert first.key.shape[1] % 512 == 0
    assert 2**24 < 2 * first.key.size * 8 <= 2**25
    huge = np.broadcast_to(np.float32(0), (64, 3, 2**20))
    assert [chunk.key.shape[1] for chunk in sd.read_chunks(huge, huge)] == [1, 1, 1]


KEY = np.zeros((2, 9, 4), np.float32)
WRONG = {
    "list": (TypeError, "key must be one of arrays of NumPy", "list", {"key": [[1.0]]}),
    "masked": (TypeError, "value must be a plain array", "MaskedArray",
               {"value": np.ma.array(KEY)}),
    "flat": (ValueError, "key must have at least two axes", "(3,)", {"key": np.zeros(3)}),
    "lengths": (ValueError, "key and value must have the same length", "9 and 8",
                {"value": KEY[:, :8]}),
    "chunk_len": (ValueError, "chunk_len must be at least 1", "0", {"chunk_len": 0}),
    "half": (TypeError, "chunk_len must be an integer", "float", {"chunk_len": 2.5}),
    "flag": (TypeError, "chunk_len must be an integer", "bool", {"chunk_len": True}),
    "ahead": (ValueError, "read_ahead must be at least 0", "-1", {"read_ahead": -1}),
    "offset": (TypeError, "kv_offset must be an integer", "1.0", {"kv_offset": 1.0}),
    "offsets": (TypeError, "kv_offset must be an int or an integer array", "float64 (2,)",
                {"kv_offset": np.zeros(2)}),
    "far": (ValueError, "kv_offset must lie between", str(2**61), {"kv_offset": 2**61}),
    "farther": (ValueError, "kv_offset must lie between", str(2**63),
                {"kv_offset": np.array([0, 2**63], np.uint64)}),
    "integers": (TypeError, "value must hold numbers of float32", "int16",
                 {"value": KEY.astype(np.int16)}),
}


@pytest.mark.parametrize(("error", "must_hold", "given", "changed"), WRONG.values(), ids=WRONG)
def test_errors_come_before_the_first_chunk(error, must_hold, given, changed):
    with pytest.raises(error) as info:
        sd.read_chunks(**{"key": KEY, "value": KEY, **changed})
    assert str(info.value).startswith(must_hold)
    assert given in str(info.value).partition(", got ")[2]


def test_a_slice_of_integers_needs_a_generator(tmp_path):
    key, value = slices(tmp_path, {n: np.zeros((2, 9, 4), np.int8) for n in ("key", "value")})
    with pytest.raises(TypeError, match=r"key must hold numbers of float32.*got I8"):
        sd.read_chunks(key, value)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "scaledot-read"]


def wait_until(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    if threads():
        gc.collect()
        wait_until(lambda: not threads())


# Pages


@pytest.fixture
def advice(monkeypatch):
    """What the system is told about which bytes of which map, in order."""
    told = []

    def advising(pages, kind, start, stop):
        told.append(({mmap.MADV_WILLNEED: "ask", mmap.MADV_DONTNEED: "drop"}[kind], start, stop))
        return advise(pages, kind, start, stop)

    advise = _stream._advise
    monkeypatch.setattr(_stream, "_advise", advising)
    return told


PAGE = mmap.PAGESIZE
needs_advice = pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="no madvise")


def rows_of_pages(path, heads, pages, mode="r", offset=0):
    """Each head has so many pages of float32, a token being 256 bytes."""
    with path.open("wb") as file:
        file.write(bytes(offset))
        np.arange(heads * pages * PAGE // 4, dtype=np.float32).tofile(file)
    shape = (heads, pages * PAGE // 256, 64)
    return np.memmap(path, np.float32, mode, offset=offset, shape=shape)


@needs_advice
def test_pages_are_asked_for_and_given_back_in_time(tmp_path, advice):
    array = rows_of_pages(tmp_path / "x", 1, 6)
    step = 2 * PAGE // 256
    chunks = sd.read_chunks(array, np.zeros((array.shape[1], 1), np.float32), chunk_len=step)
    asked = [("ask", 2 * PAGE * i, 2 * PAGE * (i + 1)) for i in range(3)]
    dropped = [("drop", 2 * PAGE * i, 2 * PAGE * (i + 1)) for i in range(3)]
    next(chunks)
    assert advice == asked[:2]
    next(chunks)
    assert advice == [*asked[:2], dropped[0], asked[2]]
    assert len(list(chunks)) == 1
    assert advice == [*asked[:2], dropped[0], asked[2], dropped[1], dropped[2]]


@needs_advice
@pytest.mark.parametrize("offset", [0, 100, PAGE, 3 * PAGE + 512])
@pytest.mark.parametrize("chunk_pages", [1.5, 2, 0.5])
def test_only_whole_pages_of_a_chunk_are_given_back(tmp_path, advice, offset, chunk_pages):
    heads, pages = 3, 8
    array = rows_of_pages(tmp_path / "x", heads, pages, offset=offset)
    step = int(chunk_pages * PAGE) // 256
    start = mmap.ALLOCATIONGRANULARITY * (offset // mmap.ALLOCATIONGRANULARITY)
    for chunk in sd.read_chunks(array, array[..., :1], chunk_len=step, read_ahead=0):
        advice.clear()
        expected = set()
        for head in range(heads):
            first = offset - start + head * pages * PAGE + chunk.kv_offset * 256
            last = first + chunk.key.shape[1] * 256
            low, high = -(-first // PAGE) * PAGE, last // PAGE * PAGE
            if low < high:
                expected.add(("drop", low, high))
        _stream.give_back(chunk.key)
        assert set(advice) == expected


@needs_advice
def test_a_transposed_view_is_one_run(tmp_path, advice):
    array = rows_of_pages(tmp_path / "x", 16, 4)  # here: 16 × 64 tokens of some heads, any order
    view = array.reshape(-1, 8, 32).swapaxes(0, 1)
    _stream.give_back(view[:, : 2 * PAGE // 1024])
    assert advice == [("drop", 0, 2 * PAGE)]
    advice.clear()
    _stream.give_back(view[:, ::-1][:, : 2 * PAGE // 1024])
    assert advice == [("drop", 62 * PAGE, 64 * PAGE)]


@needs_advice
def test_large_spans_are_asked_for_in_pieces(tmp_path, advice):
    array = rows_of_pages(tmp_path / "x", 1, 100)
    _stream.ask(array)
    assert [told[0] for told in advice] == ["ask"] * len(advice)
    assert advice[0][1] == 0
    assert all(a[2] == b[1] for a, b in itertools.pairwise(advice))
    assert advice[-1][2] == 100 * PAGE
    assert max(stop - start for _, start, stop in advice) <= 2**17


def test_private_changes_survive(tmp_path, advice):
    array = rows_of_pages(tmp_path / "x", 2, 8, mode="c")
    array[:] = 7
    for chunk in sd.read_chunks(array, array, chunk_len=16):
        assert (chunk.key == 7).all()
    assert (array == 7).all()
    assert advice == []


@needs_advice
def test_shared_changes_survive(tmp_path, advice):
    array = rows_of_pages(tmp_path / "x", 2, 8, mode="r+")
    array[:] = 7
    for _ in sd.read_chunks(array, array, chunk_len=32):
        pass
    assert "drop" in {told[0] for told in advice}
    assert (array == 7).all()
    array.flush()
    assert (np.fromfile(tmp_path / "x", np.float32) == 7).all()


@needs_advice
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory is told by Linux")
def test_pages_leave_memory(tmp_path):
    array = rows_of_pages(tmp_path / "resident", 2, 512)

    def resident():
        lines = Path("/proc/self/smaps").read_text().splitlines()
        (at,) = (i for i, line in enumerate(lines) if line.endswith("/resident"))
        return next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))

    array.sum()
    assert resident() * 1024 == 2 * 512 * PAGE
    for chunk in sd.read_chunks(array, array[..., :1], chunk_len=64 * PAGE // 256):
        chunk.key.sum()
    assert resident() == 0
    assert array[1, -1, -1] == 2 * 512 * PAGE // 4 - 1  # read again


@pytest.mark.parametrize("missing", ["method", "constants", "refused"])
def test_systems_without_advice(tmp_path, monkeypatch, missing):
    array = rows_of_pages(tmp_path / "x", 2, 8)
    if missing == "constants":
        monkeypatch.delattr(mmap, "MADV_WILLNEED", raising=False)
        monkeypatch.delattr(mmap, "MADV_DONTNEED", raising=False)
    elif missing == "method":
        monkeypatch.setattr(_stream, "mmap", type("Module", (), {
            "mmap": type("Map", (), {}), "PAGESIZE": PAGE,
        }))  # fmt: skip
    else:
        monkeypatch.setattr(_stream, "_advise", lambda *arguments: False)
    total = sum(chunk.key.sum(dtype=float) for chunk in sd.read_chunks(array, array, chunk_len=32))
    assert total == array.sum(dtype=float)
