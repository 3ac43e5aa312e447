"""The attention function that transformers calls: its arguments, one by one, and its errors."""

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

import torch
import transformers as hf
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import scaledot.transformers
from compare import EPS, assert_close
from scaledot.transformers._attend import HARMLESS, attend
from scaledot.transformers._mask import mask

HEADS, GROUPS, D = 4, 2, 8


def tensors(len_q, len_kv, dtype=torch.float64):
    """Query (2, 4, len_q, 8), key and value (2, 2, len_kv, 8)."""
    torch.manual_seed(len_q * 100 + len_kv)
    query = torch.randn(2, HEADS, len_q, D, dtype=dtype)
    return query, *torch.randn(2, 2, GROUPS, len_kv, D, dtype=dtype)


class Module(torch.nn.Module):
    """What models pass along."""

    num_key_value_groups = HEADS // GROUPS

    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def assert_equal(found, known, len_kv):
    assert_close(found, known, eps=EPS["float64"], len_kv=len_kv)


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("of_module", [True, False])
@pytest.mark.parametrize(("len_q", "len_kv"), [(5, 5), (5, 9), (1, 9)])
def test_causality_without_mask_is_that_of_sdpa(len_q, len_kv, of_module, given):
    x = tensors(len_q, len_kv)
    known, _ = sdpa_attention_forward(Module(of_module), *x, None, is_causal=given)
    found, weights = attend(Module(of_module), *x, None, is_causal=given)
    assert weights is None
    assert found.is_contiguous()
    assert_equal(found, known, len_kv)


@pytest.mark.parametrize("of_module", [{}, {"sliding_window": 100}])
def test_a_module_that_does_not_say_that_it_is_causal_is_not(of_module):
    x = tensors(5, 9)
    known, _ = sdpa_attention_forward(Module(), *x, None, is_causal=False)
    module = Module()
    del module.is_causal
    found, _ = attend(module, *x, None, **of_module)
    assert_equal(found, known, 9)


@pytest.mark.parametrize(("causal", "right", "len_q"), [
    (True, 0, 9), (True, 0, 1), (False, 2, 9), (False, 2, 4), (False, 2, 1),
])  # fmt: skip
def test_a_window_without_mask_is_kept(causal, right, len_q):
    x = tensors(len_q, 9)
    far = torch.arange(9) - torch.arange(9 - len_q, 9)[:, None]
    seen = ((far >= -2) & (far <= right))[None, None]
    known, _ = sdpa_attention_forward(Module(), *x, seen)
    found, _ = attend(Module(causal), *x, None, sliding_window=3)
    assert_equal(found, known, 9)


def test_a_window_with_mask_is_in_the_mask():
    x = tensors(9, 9)
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    known, _ = sdpa_attention_forward(Module(), *x, seen)
    found, _ = attend(Module(), *x, seen, sliding_window=3)
    assert_equal(found, known, 9)


@pytest.mark.parametrize("kind", ["boolean", "integer", "added", "added, with a bias"])
def test_masks_of_the_user_are_used_as_they_are(kind):
    x, more = tensors(5, 7), {}
    torch.manual_seed(1)
    seen = torch.rand(2, 1, 5, 7) < 0.6
    seen[..., 0] = True
    added = torch.where(seen, torch.rand(2, 1, 5, 7), torch.finfo(torch.float32).min).double()
    given, known_mask = {"boolean": (seen, seen), "integer": (seen.int(), seen)}.get(
        kind, (added, added)
    )
    if kind.endswith("bias"):
        more["position_bias"] = torch.randn(1, HEADS, 5, 7, dtype=torch.float64)
        known_mask = added + more["position_bias"]
    known, _ = sdpa_attention_forward(Module(), *x, known_mask)
    found, _ = attend(Module(), *x, given, **more)
    assert_equal(found, known, 7)


def test_scaling_softcap_and_sinks_are_those_of_the_formula():
    query, key, value = tensors(5, 5)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    found, weights = attend(
        Module(), query, key, value, None, is_causal=False, scaling=0.7, softcap=1.5, s_aux=sinks,
        output_attentions=True,
    )  # fmt: skip
    scores = 0.7 * query @ key.repeat_interleave(2, 1).mT
    grown = torch.exp(1.5 * torch.tanh(scores / 1.5))
    known = grown / (grown.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    assert_equal(weights, known, 5)
    assert_equal(found, (known @ value.repeat_interleave(2, 1)).transpose(1, 2), 5)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_weights_have_gradients_of_all_that_they_depend_on(dtype):
    grads = []
    for kind, of_formula in ((dtype, False), ("float64", True), (dtype, True)):
        sinks, bias = torch.tensor([-1.0, 0.0, 1.0, 2.0]), torch.linspace(-1, 1, 35).view(5, 7)
        query, key, value, sinks, bias = (
            x.to(getattr(torch, kind)).requires_grad_() for x in (*tensors(5, 7), sinks, bias)
        )
        if of_formula:
            scores = 0.7 * query @ key.repeat_interleave(2, 1).mT + bias
            scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
            weights = scores.softmax(-1)[..., :-1]
        else:
            _, weights = attend(
                Module(), query, key, value, None, is_causal=False, scaling=0.7, s_aux=sinks,
                position_bias=bias, output_attentions=True,
            )  # fmt: skip
        (weights[..., 3].log() - weights.square().sum(-1)).sum().backward()
        assert value.grad is None
        grads.append([query.grad, key.grad, sinks.grad, bias.grad])
    for found, known, yardstick in zip(*grads, strict=True):
        assert known.abs().max() > 0.1
        assert_close(found, known, yardstick, eps=EPS[dtype], len_kv=7, factor=3)


def test_bounds_of_packed_sequences_part_them():
    x = tensors(6, 6)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    found, _ = attend(
        Module(), *x, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=4,
        max_length_k=4,
    )  # fmt: skip
    parts = [
        sdpa_attention_forward(Module(), *(one[:, :, part] for one in x), None)[0]
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert_equal(found, torch.cat(parts, 1), 6)


def test_bounds_of_keys_must_be_those_of_queries():
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    x = tensors(6, 6)
    known, _ = attend(Module(), *x, None, cu_seq_lens_q=bounds)
    found, _ = attend(Module(), *x, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds.long())
    assert torch.equal(found, known)
    for other in ([0, 3, 6], [0, 6]):
        with pytest.raises(ValueError, match="cu_seq_lens_k must equal cu_seq_lens_q, got other"):
            attend(Module(), *x, None, cu_seq_lens_q=bounds, cu_seq_lens_k=torch.tensor(other))


def test_autocast_computes_in_its_dtype():
    x = tensors(5, 5, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = attend(Module(), *x, None)
        known, _ = sdpa_attention_forward(Module(), *x, None)
    assert found.dtype == known.dtype == torch.bfloat16
    exact, _ = sdpa_attention_forward(Module(), *(one.double() for one in x), None)
    assert_close(found, exact, known, eps=EPS["bfloat16"], len_kv=5)


def test_known_arguments_that_change_nothing_are_taken():
    x = tensors(5, 5)
    plain, _ = attend(Module(), *x, None)
    given = {name: torch.ones(2) for name in HARMLESS}
    found, _ = attend(Module(), *x, None, **given, indices=None, some_switch=False)
    assert torch.equal(found, plain)


def refused(match, kind=ValueError, **options):
    x = tensors(5, 7)
    with pytest.raises(kind, match=match):
        attend(Module(), *x, **{"attention_mask": None, **options})


def test_what_is_not_understood_is_an_error():
    refused("but indices is not, got Tensor. Use attn_implementation='sdpa'",
            indices=torch.zeros(2, 5, 3, dtype=torch.int32))  # fmt: skip
    refused("but block_size is not, got int", block_size=16)
    refused("one sink for each head, got \\(2, 4, 5, 1\\)", s_aux=torch.zeros(2, 4, 5, 1))
    refused("attention_mask must be None, a tensor", TypeError, attention_mask=[[True]])
    refused("packed queries must be as many as their keys, got 5 and 7",
            cu_seq_lens_q=torch.tensor([0, 5]))  # fmt: skip
    other = mask(2, 5, 6, allow_is_causal_skip=False)
    refused("for len_q = 5 and len_kv = 7, got \\(2, 1, 5, 6\\)", attention_mask=other)


def test_registering_again_changes_nothing():
    for _ in range(2):
        scaledot.transformers.register()
        scaledot.transformers.register("scaledot_too")
    assert hf.AttentionInterface()["scaledot"] is attend
    assert hf.AttentionMaskInterface()["scaledot_too"] is mask


def registered():
    """All that transformers knows by name, attention and masks."""
    return dict(hf.AttentionInterface()), dict(hf.AttentionMaskInterface())


@pytest.mark.parametrize("name", [
    "sdpa", "flash_attention_2", "my_flash", "paged|eager", "kernels/attention", "with space", "",
])  # fmt: skip
def test_names_that_mean_something_to_transformers_are_refused(name):
    before = registered()
    with pytest.raises(ValueError, match="identifier without flash, sdpa, flex_attention in it"):
        scaledot.transformers.register(name)
    assert registered() == before


@pytest.mark.parametrize("name", [3, None, ["scaledot"], b"scaledot"])
def test_names_are_strings(name):
    with pytest.raises(TypeError, match=f"name must be a string, got {type(name).__name__}"):
        scaledot.transformers.register(name)


@pytest.mark.parametrize("interface", [hf.AttentionInterface, hf.AttentionMaskInterface])
def test_names_of_others_are_refused(interface, monkeypatch):
    for one in (hf.AttentionInterface, hf.AttentionMaskInterface):
        monkeypatch.setattr(one, "_global_mapping", dict(one()))
    interface.register("somebodys", refused)
    before = registered()
    for name, whose in (("somebodys", "refused of test_tr"), ("eager", "eager_mask of transform")):
        with pytest.raises(ValueError, match=rf"as Attention\w+, got '{name}', which is {whose}"):
            scaledot.transformers.register(name)
        assert registered() == before
    scaledot.transformers.register()
    interface.register("scaledot", refused)
    with pytest.raises(ValueError, match=f"as {interface.__name__}, got 'scaledot'"):
        scaledot.transformers.register()


def test_without_transformers_the_error_names_what_to_install():
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "try: import scaledot.transformers\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "transformers is needed here" in done.stdout, done.stderr
    assert "scaledot[hf]" in done.stdout
