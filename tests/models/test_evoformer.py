"""The attention of AlphaFold 2: transformers' ESMFold with its own and with this attention.

Parameters and inputs are random. Truth is the same module of transformers, or the textbook formula
written here, in float64; the yardstick is the same in float32. The code under test is that of
examples/evoformer.py.
"""

import copy
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import scaledot as sd
from compare import EPS, assert_close

torch = pytest.importorskip("torch")
esmfold = pytest.importorskip("transformers.models.esm.modeling_esmfold")
configuration = pytest.importorskip("transformers.models.esm.configuration_esm")
dispatch = importlib.import_module("torch.utils._python_dispatch")

pytestmark = pytest.mark.models

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLEAR = Path("/proc/self/clear_refs")
BATCH, LENGTH, VALID = 2, 21, 17  # residues; the second protein is padded
WIDTH, HEADS, D = 12, 3, 8
LONG = 192  # residues of which memory is measured


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module("evoformer")


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randomized(module, seed=0):
    """A module in float64 whose parameters, many of them 0 at first, are all random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            width = parameter.shape[-1] if parameter.ndim > 1 else 1
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / math.sqrt(width))
    return module.eval()


def seen(dtype=torch.float64):
    """Residues of a batch of two proteins, (BATCH, LENGTH): 0 behind the end of the second."""
    real = torch.ones(BATCH, LENGTH, dtype=dtype)
    real[1, VALID:] = 0
    return real


def pairs(real):
    return real[:, :, None] * real[:, None, :]


def results(module, dtype, inputs, run):
    """Output (one tensor), and gradients of inputs and parameters by name."""
    module = copy.deepcopy(module).to(dtype)
    inputs = {name: x.to(dtype).clone().requires_grad_() for name, x in inputs.items()}
    out = run(module, **inputs)
    # Weights of the sum: else gradients of what ends in a norm would be 0.
    (out * numbers(*out.shape, seed=9, dtype=dtype)).sum().backward()
    found = {"out": out} | {name: x.grad for name, x in inputs.items()}
    return found | {name: x.grad for name, x in module.named_parameters()}


def assert_same(found, truth, yardstick, length=LENGTH):
    assert found.keys() == truth.keys()
    for name, exact in truth.items():
        if exact is None:
            assert found[name] is None, name
            continue
        factor = 2.0 if name == "out" else 3.0
        assert exact.abs().max() > 0, name
        assert_close(found[name], exact, yardstick[name], eps=EPS["float32"], len_kv=length,
                     factor=factor)  # fmt: skip


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("starting", [True, False])
def test_triangle_attention_of_esmfold(example, starting, chunk_size):
    module = randomized(esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS, starting=starting))
    inputs = {"x": numbers(BATCH, LENGTH, LENGTH, WIDTH)}

    def run(module, x):
        real = pairs(seen(x.dtype))
        # Rows of padding see nothing but padding: what they give is not used.
        return module(x, mask=real, chunk_size=chunk_size)[real.bool()]

    truth = results(module, torch.float64, inputs, run)
    yardstick = results(module, torch.float32, inputs, run)
    with example.esmfold_attention():
        found = results(module, torch.float32, inputs, run)
    assert_same(found, truth, yardstick)


def test_rows_without_a_visible_key_are_those_of_esmfold(example):
    """A mask that is a bias of -1e9 hides nothing where it is everywhere: a mean of all values."""
    module = randomized(esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS)).float()
    x = numbers(BATCH, LENGTH, LENGTH, WIDTH, dtype=torch.float32)
    padding = ~pairs(seen()).bool()
    with torch.no_grad():
        theirs = module(x, mask=pairs(seen(torch.float32)))
        with example.esmfold_attention():
            ours = module(x, mask=pairs(seen(torch.float32)))
    assert_close(ours[padding], theirs[padding], eps=EPS["float32"], len_kv=LENGTH)


def test_a_block_of_esmfold(example):
    """All of it, triangle multiplication and transitions too, for two proteins of two lengths."""
    config = configuration.TrunkConfig(
        sequence_state_dim=24, pairwise_state_dim=16, sequence_head_width=8, pairwise_head_width=4
    )
    module = randomized(esmfold.EsmFoldTriangularSelfAttentionBlock(config))
    inputs = {
        "sequence": numbers(BATCH, LENGTH, 24), "pair": numbers(BATCH, LENGTH, LENGTH, 16, seed=1),
    }  # fmt: skip

    def run(module, sequence, pair):
        real = seen(sequence.dtype)
        sequence, pair = module(sequence, pair, mask=real)
        return torch.cat([sequence[real.bool()].flatten(), pair[pairs(real).bool()].flatten()])

    truth = results(module, torch.float64, inputs, run)
    yardstick = results(module, torch.float32, inputs, run)
    with example.esmfold_attention():
        found = results(module, torch.float32, inputs, run)
    assert_same(found, truth, yardstick)


def test_esmfold_is_computed_here_inside_alone(example, monkeypatch):
    module = esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS)
    forward = esmfold.EsmFoldAttention.forward
    calls = []
    attention = sd.attention
    monkeypatch.setattr(sd, "attention", lambda *a, **k: calls.append(1) or attention(*a, **k))
    x = numbers(1, 5, 5, WIDTH, dtype=torch.float32)
    with example.esmfold_attention():
        module(x)
    with pytest.raises(ZeroDivisionError), example.esmfold_attention():
        _ = 1 / 0
    assert esmfold.EsmFoldAttention.forward is forward
    module(x)
    assert calls == [1]


# Row and column attention with a bias of pairs


def textbook(module, x, mask, pair=None):
    """What `GatedAttention` computes, all scores at once."""
    x = module.norm(x)
    query, key, value = (
        y.unflatten(-1, (module.num_heads, -1)).movedim(-2, -3)
        for y in module.qkv(x).chunk(3, dim=-1)
    )
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if pair is not None:
        bias = module.pair_bias(module.pair_norm(pair))  # (batch, len, len, heads)
        scores = scores + bias.permute(0, 3, 1, 2)[:, None]
    scores = scores.masked_fill(~mask[..., None, None, :], -math.inf)
    found = (scores.softmax(dim=-1) @ value).movedim(-3, -2).flatten(-2)
    return module.out(torch.sigmoid(module.gate(x)) * found)


def test_row_column_and_triangle_attention(example, monkeypatch):
    module = randomized(example.Evoformer(width=16, pair_width=12, num_heads=HEADS, d=D))
    inputs = {
        "alignment": numbers(BATCH, 6, LENGTH, 16), "pair": numbers(BATCH, LENGTH, LENGTH, 12)
    }  # fmt: skip
    # Alignments have gaps. The textbook gives nan where nothing is seen: the first sequence is
    # whole for that, and each residue is paired with itself.
    mask = (numbers(BATCH, 6, LENGTH) > -0.5) & seen().bool()[:, None]
    mask[:, 0] = True
    pair_mask = torch.eye(LENGTH, dtype=torch.bool) | pairs(seen().bool())

    def run(module, alignment, pair):
        alignment, pair = module(alignment, pair, mask, pair_mask)
        return torch.cat([alignment.flatten(), pair.flatten()])

    found = results(module, torch.float32, inputs, run)
    monkeypatch.setattr(example.GatedAttention, "forward", textbook)
    truth = results(module, torch.float64, inputs, run)
    yardstick = results(module, torch.float32, inputs, run)
    assert_same(found, truth, yardstick)


def test_both_biases_have_gradients_of_their_own_shapes(example):
    """Rank 5: one that masks softly, (batch, rows, 1, 1, len), and one of pairs."""
    shape = (BATCH, 5, HEADS, LENGTH, D)
    inputs = {name: numbers(*shape, seed=n) for n, name in enumerate(("query", "key", "value"))}
    inputs["soft_mask"] = numbers(BATCH, 5, 1, 1, LENGTH, seed=3)
    inputs["pair_bias"] = numbers(BATCH, 1, HEADS, LENGTH, LENGTH, seed=4)

    def dense(_, query, key, value, soft_mask, pair_bias):
        return (query @ key.mT + soft_mask + pair_bias).softmax(dim=-1) @ value

    def ours(_, query, key, value, soft_mask, pair_bias):
        return example.attention_with_biases(query, key, value, [soft_mask, pair_bias])

    nothing = torch.nn.Module()
    truth = results(nothing, torch.float64, inputs, dense)
    yardstick = results(nothing, torch.float32, inputs, dense)
    found = results(nothing, torch.float32, inputs, ours)
    assert found["soft_mask"].shape == inputs["soft_mask"].shape
    assert found["pair_bias"].shape == inputs["pair_bias"].shape
    assert_same(found, truth, yardstick)


# Memory


class Largest(dispatch.TorchDispatchMode):
    """Numbers in the largest tensor that any operation inside returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.itemsize)
        return result


def resident(field):
    """Bytes, by a field of the process's status; `VmHWM` is the most since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def forth_and_back(module, length):
    x = numbers(1, length, length, module.c_in, dtype=torch.float32).requires_grad_()
    module(x).sum().backward()


def test_no_tensor_of_triangle_attention_has_three_lengths(example):
    module = esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS)
    largest = {}
    for length in (16, 48):
        with Largest() as theirs:
            forth_and_back(module, length)
        with example.esmfold_attention(), Largest() as ours:
            forth_and_back(module, length)
        assert theirs.numel == HEADS * length**3
        largest[length] = ours.numel
    # Keys have one more feature, for the mask.
    assert largest == {length: HEADS * length**2 * (D + 1) for length in largest}


def rises():
    """Print by how many bytes a pass, forth and back, raises resident memory: ours, theirs."""
    sys.path.insert(0, str(EXAMPLES))
    module = esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS)

    def rise():
        forth_and_back(module, 16)  # kernels are compiled
        CLEAR.write_text("5")
        before = resident("VmRSS")
        forth_and_back(module, LONG)
        return resident("VmHWM") - before

    with importlib.import_module("evoformer").esmfold_attention():
        ours = rise()
    print(ours, rise())


@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="needs /proc/self/clear_refs")
def test_memory_of_triangle_attention():
    """What the kernels hold counts, too: resident memory of a process of its own."""
    here = Path(__file__).resolve().parent
    folders = [here.parents[1] / "src", here.parent]
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
    )  # fmt: skip
    ours, theirs = map(int, done.stdout.split())
    scores = 4 * HEADS * LONG**3
    assert theirs > 2 * scores  # the weights, and their gradient or that of the scores
    # Queries, keys, values, gates, results, and gradients of each: some 12 to 18 arrays of pairs.
    assert ours < scores


if __name__ == "__main__":
    rises()
