"""Models of transformers that are trained: dropout of attention, checkpoints, autocast."""

import itertools
import sys

import pytest

pytest.importorskip("transformers")

import torch
import transformers as hf

import naive
import tiny_models as tiny
from compare import EPS, assert_close
from scaledot.transformers._attend import attend

SHARES = (0.1, 0.5, 0.9)
# What a model of the first kind calls attention's dropout; its other dropouts are off.
DROPOUT = {
    "mistral": lambda share: {"attention_dropout": share},
    "gpt_oss": lambda share: {"attention_dropout": share},
    "bert": lambda share: {"attention_probs_dropout_prob": share, "hidden_dropout_prob": 0.0},
}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    tiny.register()


@pytest.fixture
def seeds(monkeypatch):
    """The seeds (batch,) of the calls of attention, in their order."""
    drawn, module = [], sys.modules[attend.__module__]
    attention = module.attention

    def noting(*arrays, **options):
        drawn.append(options["seed"])
        return attention(*arrays, **options)

    monkeypatch.setattr(module, "attention", noting)
    return drawn


def factors(share, seeds, num_heads, length):
    """What weights (batch, num_heads, length, length) are multiplied by, as the seeds say."""
    numbers = [
        naive.kept(share, int(seed), head, q_pos, kv_pos)
        for seed in seeds for head in range(num_heads)
        for q_pos in range(length) for kv_pos in range(length)
    ]  # fmt: skip
    return torch.tensor(numbers).reshape(len(seeds), num_heads, length, length)


def register_textbook(seeds):
    """Make "dropped" known to transformers: the textbook's attention, one seed after another."""
    left = iter(seeds)

    def dropped(module, query, key, value, attention_mask, dropout=0.0, **others):
        _, weights = tiny.truth(module, query, key, value, attention_mask, **others)
        kept = factors(dropout, next(left), *query.shape[1:3]).to(weights.dtype)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return ((weights * kept) @ value).transpose(1, 2).contiguous(), weights

    hf.AttentionInterface.register("dropped", dropped)
    hf.AttentionMaskInterface.register("dropped", tiny.matrix)


def trained(model, impl, given, valid):
    """Output, and gradients of all parameters by name."""
    out = tiny.run(model, impl, given, valid)
    out.square().mean().backward()
    named = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return out, named


def assert_trained_alike(found, truth, yardstick, room):
    """Compare outputs, and gradients but those that are rounding alone."""
    assert_close(found[0], truth[0], yardstick[0], **room)
    (_, ours), (_, exact), (_, dense) = found, truth, yardstick
    assert ours.keys() == exact.keys()
    largest = max(x.abs().max() for x in exact.values())
    for name, x in exact.items():
        if x.abs().max() > room["eps"] * largest:  # not so a bias that all keys share
            assert_close(ours[name], x, dense[name], **room, factor=3.0)


def cases():
    """Models with shares and ways of checkpoints; one of them is quick."""
    ways = ("whole", "checkpoints", "reentrant")
    return [
        pytest.param(
            *case, id=", ".join(map(str, case)),
            marks=() if case == ("mistral", 0.1, "checkpoints") else pytest.mark.heavy,
        ) for case in itertools.product(DROPOUT, SHARES, ways)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "share", "way"), cases())
def test_dropout_is_the_one_that_the_seeds_give(name, share, way, seeds):
    given = tiny.inputs(name, "left")
    if name != "bert":
        given["use_cache"] = False
    valid = given["attention_mask"]
    model = tiny.build(name, **DROPOUT[name](share))
    if way != "whole":
        model.activation_checkpointing_enable({"use_reentrant": way == "reentrant"})
        model.enable_input_require_grads()
    torch.manual_seed(3)
    found = trained(model.train(), "scaledot", given, valid)
    layers = model.config.num_hidden_layers
    first, again = seeds[:layers], seeds[layers:]
    assert len(torch.cat(first).unique()) == 2 * layers  # each sequence of each layer has its own
    if way == "whole":
        assert not again
    else:  # computed once more, the last layer first
        assert torch.equal(torch.stack(again), torch.stack(first[::-1]))
    results = []
    for dtype in (torch.float64, torch.float32):
        register_textbook(first)
        textbook = tiny.build(name, dtype, **DROPOUT[name](share))
        results.append(trained(textbook.train(), "dropped", given, valid))
    assert_trained_alike(found, *results, {"eps": EPS["float32"], "len_kv": tiny.LENGTH})


@pytest.mark.parametrize("share", SHARES)
def test_dropout_keeps_its_share_of_weights(share):
    """What falls out is told by values that are one for each key; 2^14 weights."""
    length = 64
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 2, length, 8, dtype=torch.float64)
    value = torch.eye(length, dtype=torch.float64).expand(2, 2, -1, -1)
    out, weights = attend(
        torch.nn.Identity(), query, key, value, None, is_causal=False, dropout=share,
        output_attentions=True,
    )  # fmt: skip
    dropped = out.transpose(1, 2)
    kept = dropped != 0
    assert_close(dropped[kept], weights[kept] / (1 - share), eps=EPS["float64"], len_kv=length)
    # Bernoulli numbers: six deviations of their mean.
    deviation = (share * (1 - share) / kept.numel()) ** 0.5
    assert abs(kept.double().mean() - (1 - share)) < 6 * deviation


@pytest.mark.parametrize("where", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.heavy
def test_autocast_is_as_near_as_with_sdpa(name, where):
    given = tiny.inputs(name, where)
    valid = given["attention_mask"]
    results = []
    for dtype, impl in (
        (torch.float32, "scaledot"), (torch.float64, "truth"), (torch.float32, "sdpa"),
    ):  # fmt: skip
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=impl != "truth"):
            results.append(trained(tiny.build(name, dtype), impl, given, valid))
    assert results[0][0].dtype == results[2][0].dtype
    assert_trained_alike(*results, {"eps": EPS["bfloat16"], "len_kv": tiny.HIDDEN})
