"""The attention of AlphaFold 2: transformers' ESMFold with its own and with this attention.

Parameters and inputs are random. Truth is the same module of transformers, or the textbook formula
written here, in float64; the yardstick is the same in float32. The code under test is
`scaledot.transformers.esmfold_attention`, and that of examples/evoformer.py.
"""

import copy
import importlib
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compare import EPS, assert_close

torch = pytest.importorskip("torch")
esmfold = pytest.importorskip("transformers.models.esm.modeling_esmfold")
configuration = pytest.importorskip("transformers.models.esm.configuration_esm")
ours = importlib.import_module("scaledot.transformers._esmfold")
esmfold_attention = importlib.import_module("scaledot.transformers").esmfold_attention
scripts = importlib.import_module("example_scripts")
dispatch = importlib.import_module("torch.utils._python_dispatch")

pytestmark = pytest.mark.models

CLEAR = Path("/proc/self/clear_refs")
BATCH, LENGTH, VALID = 2, 21, 17  # residues; the second protein is padded
WIDTH, HEADS, D = 12, 3, 8
LONG = 192  # residues of which memory is measured


@pytest.fixture(scope="module")
def example():
    return scripts.example_script("evoformer")


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
def test_triangle_attention_of_esmfold(starting, chunk_size):
    module = randomized(esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS, starting=starting))
    inputs = {"x": numbers(BATCH, LENGTH, LENGTH, WIDTH)}

    def run(module, x):
        real = pairs(seen(x.dtype))
        # Rows of padding see nothing but padding: what they give is not used.
        return module(x, mask=real, chunk_size=chunk_size)[real.bool()]

    truth = results(module, torch.float64, inputs, run)
    yardstick = results(module, torch.float32, inputs, run)
    with esmfold_attention():
        found = results(module, torch.float32, inputs, run)
    assert_same(found, truth, yardstick)


def test_rows_without_a_visible_key_are_those_of_esmfold():
    """A mask that is a bias of -1e9 hides nothing where it is everywhere: a mean of all values."""
    module = randomized(esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS)).float()
    x = numbers(BATCH, LENGTH, LENGTH, WIDTH, dtype=torch.float32)
    padding = ~pairs(seen()).bool()
    with torch.no_grad():
        theirs = module(x, mask=pairs(seen(torch.float32)))
        with esmfold_attention():
            here = module(x, mask=pairs(seen(torch.float32)))
    assert_close(here[padding], theirs[padding], eps=EPS["float32"], len_kv=LENGTH)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_bias_that_a_dtype_does_not_hold_empties_no_row(dtype):
    query, key, value = numbers(3, BATCH, HEADS, LENGTH, D).to(dtype)
    bias = torch.full((BATCH, 1, 1, LENGTH), -1e9)
    out = ours._with_biases(0 * query, key, value, [bias])
    truth = value.double().mean(-2, keepdim=True).expand(out.shape)
    eps = torch.finfo(dtype).eps
    assert_close(out.double(), truth, eps=eps, len_kv=LENGTH)


def test_a_block_of_esmfold():
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
    with esmfold_attention():
        found = results(module, torch.float32, inputs, run)
    assert_same(found, truth, yardstick)


@pytest.fixture
def calls(monkeypatch):
    """One entry for each call of attention that `esmfold_attention` makes."""
    seen = []
    attention = ours.attention
    monkeypatch.setattr(ours, "attention", lambda *a, **k: seen.append(1) or attention(*a, **k))
    return seen


def test_esmfold_is_computed_here_inside_alone(calls):
    module = esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS)
    forward = esmfold.EsmFoldAttention.forward
    x = numbers(1, 5, 5, WIDTH, dtype=torch.float32)
    with esmfold_attention():
        with esmfold_attention():
            module(x)
        module(x)
    with pytest.raises(ZeroDivisionError), esmfold_attention():
        _ = 1 / 0
    assert esmfold.EsmFoldAttention.forward is forward
    module(x)
    assert calls == [1, 1]


def test_scopes_of_two_threads_do_not_end_each_other():
    forward = esmfold.EsmFoldAttention.forward
    inside, leave = threading.Event(), threading.Event()

    def other():
        with esmfold_attention():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with esmfold_attention():
        thread.start()
        assert inside.wait(30)
    assert esmfold.EsmFoldAttention.forward is not forward
    leave.set()
    thread.join(30)
    assert esmfold.EsmFoldAttention.forward is forward


def test_ways_to_compute_the_same_change_nothing(calls):
    module = randomized(esmfold.EsmFoldAttention(WIDTH, WIDTH, WIDTH, D, HEADS))
    x = numbers(1, 5, WIDTH)
    plain = module(x, x)
    with esmfold_attention():
        for flag in ("use_memory_efficient_kernel", "use_lma", "use_flash"):
            assert_close(module(x, x, **{flag: True}), plain, eps=EPS["float64"], len_kv=WIDTH)
    assert calls == [1] * 3


CHANGED = {
    "another option": ("forward", lambda self, q_x, kv_x, biases=None, window=None: q_x,
                       "got forward(self, q_x, kv_x, biases, window). Run"),
    "one projection": ("_prep_qkv", lambda self, q_x: q_x, "got _prep_qkv(self, q_x). Run"),
    "no gate": ("_wrap_up", None, "got _wrap_up(). Run"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_another_esmfold_is_an_error_and_stays(case, monkeypatch):
    name, method, message = CHANGED[case]
    monkeypatch.setattr(esmfold.EsmFoldAttention, name, method)
    forward = esmfold.EsmFoldAttention.forward
    with pytest.raises(ValueError, match=r"EsmFoldAttention with the arguments of 5\.24") as caught:
        esmfold_attention().__enter__()
    assert message in str(caught.value)
    assert esmfold.EsmFoldAttention.forward is forward


@pytest.mark.parametrize("missing", ["module", "class"])
def test_no_esmfold_is_an_error(missing, monkeypatch):
    if missing == "module":
        monkeypatch.setitem(sys.modules, esmfold.__name__, None)
    else:
        monkeypatch.delattr(esmfold, "EsmFoldAttention")
    with pytest.raises(ValueError, match=r"EsmFoldAttention with the arguments of 5\.24, got none"):
        esmfold_attention().__enter__()


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


def test_both_biases_have_gradients_of_their_own_shapes():
    """Rank 5: one that masks softly, (batch, rows, 1, 1, len), and one of pairs."""
    shape = (BATCH, 5, HEADS, LENGTH, D)
    inputs = {name: numbers(*shape, seed=n) for n, name in enumerate(("query", "key", "value"))}
    inputs["soft_mask"] = numbers(BATCH, 5, 1, 1, LENGTH, seed=3)
    inputs["pair_bias"] = numbers(BATCH, 1, HEADS, LENGTH, LENGTH, seed=4)

    def dense(_, query, key, value, soft_mask, pair_bias):
        return (query @ key.mT + soft_mask + pair_bias).softmax(dim=-1) @ value

    def in_two_parts(_, query, key, value, soft_mask, pair_bias):
        return ours._with_biases(query, key, value, [soft_mask, pair_bias])

    nothing = torch.nn.Module()
    truth = results(nothing, torch.float64, inputs, dense)
    yardstick = results(nothing, torch.float32, inputs, dense)
    found = results(nothing, torch.float32, inputs, in_two_parts)
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


def test_no_tensor_of_triangle_attention_has_three_lengths():
    module = esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS)
    largest = {}
    for length in (16, 48):
        with Largest() as theirs:
            forth_and_back(module, length)
        with esmfold_attention(), Largest() as here:
            forth_and_back(module, length)
        assert theirs.numel == HEADS * length**3
        largest[length] = here.numel
    # Keys have one more feature, for the mask.
    assert largest == {length: HEADS * length**2 * (D + 1) for length in largest}


def rises():
    """Print by how many bytes a pass, forth and back, raises resident memory: ours, theirs."""
    module = esmfold.EsmFoldTriangleAttention(WIDTH, D, HEADS)

    def rise():
        forth_and_back(module, 16)  # kernels are compiled
        CLEAR.write_text("5")
        before = resident("VmRSS")
        forth_and_back(module, LONG)
        return resident("VmHWM") - before

    with esmfold_attention():
        here = rise()
    print(here, rise())


@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="needs /proc/self/clear_refs")
def test_memory_of_triangle_attention():
    """What the kernels hold counts, too: resident memory of a process of its own."""
    here = Path(__file__).resolve().parent
    folders = [here.parents[1] / "src", here.parent]
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
    )  # fmt: skip
    here, theirs = map(int, done.stdout.split())
    scores = 4 * HEADS * LONG**3
    assert theirs > 2 * scores  # the weights, and their gradient or that of the scores
    # Queries, keys, values, gates, results, and gradients of each: some 12 to 18 arrays of pairs.
    assert here < scores


if __name__ == "__main__":
    rises()
