"""SmolLM2-135M with its real weights: grouped queries, caches, padding, two dtypes.

GPT-2 and gpt-oss stand beside it, small and with random weights: learned positions, and windows
and sinks in turn.
"""

import copy

import pytest
import torch
import transformers

from agreement import fetched
from compare import EPS, assert_close
from decoding import Text, assert_logits, assert_same_text, greedy, logits, padded, truths

pytestmark = pytest.mark.models

TEXTS = (
    "Attention compares each query with every key. The scores become weights by softmax, and the "
    "result is the mean of the values under these weights. Two results over disjoint sets of keys "
    "can be merged, since each knows the logarithm of its sum.",
    "A short line is padded.",
)


@pytest.fixture(scope="module")
def loaded():
    pytest.importorskip("gguf")
    from gguf_weights import load_smollm2

    return fetched(load_smollm2)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def sequences(tokenizer):
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return torch.tensor([tokenizer.encode("The capital of France is").ids])


@pytest.fixture(scope="module")
def expected(model, prompt):
    return greedy(model, "eager", prompt, 64)


def test_architecture(model):
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)


@pytest.mark.parametrize(
    ("attention", "cache"), [("sdpa", "dynamic"), ("scaledot", "dynamic"), ("scaledot", "static")]
)
def test_greedy_text(model, tokenizer, prompt, expected, attention, cache):
    got = greedy(model, attention, prompt, 64, cache_implementation=cache)
    assert_same_text(got, expected)
    assert tokenizer.decode(got.tokens[0].tolist()).startswith(" Paris")


def test_greedy_text_of_a_padded_batch(model, sequences):
    ids, mask = padded(sequences, "left")
    got = greedy(model, "scaledot", ids, 16, mask=mask)
    for row, sequence in enumerate(sequences):
        alone = greedy(model, "eager", torch.tensor([sequence]), 16)
        assert_same_text(Text(*(x[row : row + 1] for x in got)), alone)


@pytest.fixture(scope="module")
def truth(model, sequences):
    return truths(model, sequences)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits(model, sequences, truth, side):
    assert_logits(model, sequences, truth, side)


def test_logits_in_bfloat16(model, sequences):
    """No farther than sdpa from the same, rounded weights in float32, where rounding is small."""
    rounded = copy.deepcopy(model).bfloat16()
    ids = torch.tensor(sequences[:1])
    got, yardstick = (logits(rounded, attention, ids) for attention in ("scaledot", "sdpa"))
    assert got.dtype == torch.bfloat16
    expected = logits(rounded.float(), "eager", ids)
    assert_close(got, expected, yardstick, eps=EPS["bfloat16"], len_kv=ids.shape[1])


def gpt2():
    """Learned positions; scores divided by the layer's number too."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=256, n_positions=256, n_embd=64, n_layer=3, n_head=4,
            scale_attn_by_inverse_layer_idx=True, initializer_range=0.2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def gpt_oss():
    """A window of 16 tokens in every other layer, a sink for each head, grouped queries."""
    model = transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            vocab_size=256, hidden_size=64, intermediate_size=64, head_dim=16, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=2, num_local_experts=4,
            num_experts_per_tok=2, sliding_window=16, max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            initializer_range=0.2, pad_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    model.set_experts_implementation("eager")  # the other one has no float64
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


@pytest.fixture(scope="module", params=[gpt2, gpt_oss], ids=lambda build: build.__name__)
def small(request):
    torch.manual_seed(7)
    return request.param().eval()


@pytest.fixture(scope="module")
def numbers():
    """Two sequences of token ids, one of them longer than any window."""
    draw = torch.Generator().manual_seed(8)
    return [torch.randint(1, 256, (n,), generator=draw).tolist() for n in (70, 23)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_small_models(small, numbers, side):
    assert_logits(small, numbers, truths(small, numbers), side)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_text_of_small_models(small, numbers, cache):
    ids = torch.tensor(numbers[:1])
    expected = greedy(small, "eager", ids, 48)
    assert expected.tokens.unique().numel() > 8  # a constant text would be no test
    assert_same_text(greedy(small, "scaledot", ids, 48, cache_implementation=cache), expected)
