"""Models that complete code: CodeGen and StarCoder2, small and with random weights.

Their tokens here are bytes of Python source. CodeGen has full attention over interleaved rotary
positions, StarCoder2 grouped queries and a window that is far shorter than the context.
"""

import inspect
import textwrap

import pytest
import torch
import transformers

from decoding import assert_logits, assert_same_text, greedy, logits, truths

pytestmark = pytest.mark.models

CONTEXT = 4096
WINDOW = 512
NEW_TOKENS = 24
SOURCE = inspect.getsource(textwrap).encode()


def codegen():
    return transformers.CodeGenForCausalLM(
        transformers.CodeGenConfig(
            vocab_size=256, n_positions=CONTEXT, n_ctx=CONTEXT, n_embd=64, n_layer=2, n_head=4,
            rotary_dim=8, initializer_range=0.2, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def starcoder2():
    return transformers.Starcoder2ForCausalLM(
        transformers.Starcoder2Config(
            vocab_size=256, max_position_embeddings=CONTEXT, hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=WINDOW, initializer_range=0.2, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=[codegen, starcoder2], ids=lambda build: build.__name__)
def model(request):
    torch.manual_seed(5)
    return request.param().eval()


@pytest.fixture(scope="module")
def prompt():
    return torch.tensor([list(SOURCE[: CONTEXT - NEW_TOKENS])])


@pytest.fixture(scope="module")
def expected(model, prompt):
    return greedy(model, "eager", prompt, NEW_TOKENS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits(model, side):
    """Longer than the window by a part of it, and a short sequence beside it."""
    sequences = [list(SOURCE[: WINDOW + 100]), list(SOURCE[:50])]
    assert_logits(model, sequences, truths(model, sequences), side)


def test_logits_of_a_long_context(model, prompt):
    sequences = prompt.tolist()
    assert_logits(model, sequences, truths(model, sequences), "right")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_completion_of_a_long_context(model, prompt, expected, cache):
    assert expected.tokens.unique().numel() > 4  # a constant text would be no test
    got = greedy(model, "scaledot", prompt, NEW_TOKENS, cache_implementation=cache)
    assert_same_text(got, expected)


def test_completion_by_sdpa(model, prompt, expected):
    """The rule by which texts are compared holds between transformers' own two."""
    assert_same_text(greedy(model, "sdpa", prompt, NEW_TOKENS), expected)


def test_only_a_window_hides_the_start_of_the_context(model, prompt):
    changed = prompt.clone()
    changed[:, :64] = 255 - changed[:, :64]
    first, second = (logits(model, "scaledot", ids)[:, -1] for ids in (prompt, changed))
    # Two layers reach two windows back and no farther.
    assert torch.equal(first, second) == (model.config.model_type == "starcoder2")
