"""The key-value cache through pickle and files."""

import os
import pickle
import re
import sys

import numpy as np
import pytest

from compare import EPS, assert_close
from conftest import Library
from scaledot._cache import KVCache
from test_cache import PAIRS, check, fed, kept_by, library_of, make, poison, stream

STORED = [*PAIRS[:-1], ("numpy", "int8"), ("torch", "int8")]


def through_pickle(cache, _):
    return pickle.loads(pickle.dumps(cache))


def through_a_file(cache, folder):
    path = folder / "cache.safetensors"
    cache.save(path)
    assert [x.name for x in folder.iterdir()] == ["cache.safetensors"]
    return KVCache.load(str(path))


@pytest.mark.parametrize("way", [through_pickle, through_a_file])
@pytest.mark.parametrize("options", [{}, {"window": 3, "num_sinks": 2}], ids=["all", "ring"])
@pytest.mark.parametrize(("library", "dtype"), STORED)
def test_a_cache_comes_back_as_it_was(rng, library, dtype, options, way, tmp_path):
    arrays = stream(rng, 20, "float32" if dtype == "int8" else dtype)
    cache = make(11, dtype, library, **options)
    fed(cache, arrays, ([3, 1, 2], [1, 2, 1], [2, 1, 1]), library)
    if options:
        fed(cache, arrays, ([2, 1, 2],) * 5, library)
    other = way(cache, tmp_path)
    assert repr(other) == repr(cache)
    assert library_of(other._memory.arrays["key"]) == library
    got = [fed(x, arrays, ([2, 1, 1], [1, 1, 1]), library) for x in (cache, other)]
    np.testing.assert_array_equal(*got)
    assert np.abs(got[0]).max() > 0


@pytest.mark.heavy  # JAX compiles each of these operations
def test_a_cache_of_jax(rng, tmp_path):
    """Grown, reordered, cut, pickled and saved: whatever writes."""
    arrays = stream(rng, 16)
    cache = make(6, library="jax", window=4, num_sinks=1)
    steps = [[2] * 3] * 4
    got = fed(cache, arrays, steps, "jax")
    cache.grow(8)
    cache.reorder([1, 0, 2])
    cache.truncate([7, 8, 7])
    arrays, got = [x[[1, 0, 2]] for x in arrays], got[[1, 0, 2]]
    cache = through_a_file(through_pickle(cache, tmp_path), tmp_path)
    poison(cache)
    got += fed(cache, arrays, [[2] * 3], "jax") * (np.arange(16) >= 8)[:, None]
    check(got, arrays, cache.lengths, mask=kept_by(4, 1, 16))
    other = make(8, "bfloat16", "jax")
    other.save(tmp_path / "cache.safetensors")
    assert repr(through_a_file(other, tmp_path)) == repr(other)


def test_a_file_for_another_library(rng, tmp_path):
    torch, path = pytest.importorskip("torch"), tmp_path / "x"
    arrays = stream(rng, 8, "bfloat16")
    cache = make(9, "bfloat16")
    before = fed(cache, arrays, ([4] * 3,))
    cache.save(path)
    other = KVCache.load(path, like=torch.zeros(1))
    last = [Library("torch").array(x[:, :, 3:4]) for x in arrays]
    assert_close(other.attention(last[0]), before[:, :, 3:4], eps=EPS["bfloat16"], len_kv=4)


def test_saving_leaves_the_whole_file_or_the_old_one(rng, tmp_path, monkeypatch):
    path, link = tmp_path / "cache", tmp_path / "link"
    link.symlink_to(path)
    cache = make(9)
    cache.save(link)
    fed(cache, stream(rng, 8), ([4] * 3,), attend=False)
    old = path.read_bytes()

    def broken(*_):
        raise OSError("no space left")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, broken)
            with pytest.raises(OSError, match="no space left"):
                cache.save(path)
        assert path.read_bytes() == old
        assert {x.name for x in tmp_path.iterdir()} == {"cache", "link"}
    cache.save(link)
    assert link.is_symlink()
    assert KVCache.load(path).lengths.tolist() == [4, 4, 4]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_safetensors_cannot_write_is_an_error_of_the_system(tmp_path, monkeypatch):
    import safetensors.numpy

    def broken(*_, **__):
        raise safetensors.SafetensorError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", broken)
    with pytest.raises(OSError, match="the cache could not be written: disk full"):
        make(9).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_without_safetensors(tmp_path, monkeypatch):
    make(9).save(tmp_path / "x")
    for module in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, module, None)
    for call in (lambda: make(9).save(tmp_path / "y"), lambda: KVCache.load(tmp_path / "x")):
        with pytest.raises(ImportError, match=re.escape("pip install 'scaledot[cli]'")):
            call()
    assert [x.name for x in tmp_path.iterdir()] == ["x"]
