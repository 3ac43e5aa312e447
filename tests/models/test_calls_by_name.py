"""Models that call PyTorch's function in modules of their own: timm, open_clip, openai-whisper.

Their blocks are written here in the style of each, and run within `scaledot.torch.patched`. Truth
is the same block in float64 with PyTorch's function, and the yardstick is that in float32.
"""

import copy
import importlib

import pytest

from compare import EPS, assert_close
from counted import counted_calls

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.models

patched = importlib.import_module("scaledot.torch").patched
nn, functional = torch.nn, torch.nn.functional
imported_by_name = functional.scaled_dot_product_attention
WIDTH, HEADS, LENGTH = 24, 3, 17


class Timm(nn.Module):
    """Attention with one projection for all three, on a patch grid with a class token."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.q_norm, self.k_norm = (nn.LayerNorm(WIDTH // HEADS) for _ in range(2))
        self.proj, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = functional.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, dropout_p=0.0
        )
        x = x + self.proj(out.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class OpenClip(nn.Module):
    """PyTorch's own module with a mask of -inf above the diagonal, for the text tower."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        future = torch.full((LENGTH, LENGTH), float("-inf")).triu_(1)
        self.register_buffer("attn_mask", future, persistent=False)

    def forward(self, x):
        normed = self.norm(x)
        out = self.attn(normed, normed, normed, need_weights=False, attn_mask=self.attn_mask)
        return x + out[0]


class Whisper(nn.Module):
    """A decoder's block: causal self-attention, then cross-attention to the sound."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 4 != 1) for i in range(8))

    def attend(self, x, source, parts, is_causal):
        query, key, value, out = parts
        rows = (query(x), key(source), value(source))
        q, k, v = (y.view(*y.shape[:2], HEADS, -1).permute(0, 2, 1, 3) for y in rows)
        joined = imported_by_name(q, k, v, is_causal=is_causal).permute(0, 2, 1, 3)
        return out(joined.flatten(start_dim=2))

    def forward(self, x):
        sound = x.flip(1)[:, 2:]
        normed = self.first(x)
        x = x + self.attend(normed, normed, self.parts[:4], True)
        return x + self.attend(self.second(x), sound, self.parts[4:], False)


@pytest.fixture
def calls(monkeypatch):
    return counted_calls(monkeypatch)


def results(block, dtype):
    """Output, and the gradients of all parameters and of what goes in, in a row."""
    block = copy.deepcopy(block).to(dtype)
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = block(x.requires_grad_())
    ramp = torch.arange(out.numel(), dtype=torch.float64).cos().reshape(out.shape).to(dtype)
    gradients = torch.autograd.grad((out * ramp).sum(), [x, *block.parameters()])
    return out, torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("block", [Timm, OpenClip, Whisper])
def test_blocks(block, calls):
    torch.manual_seed(0)
    lengths = [(LENGTH, LENGTH), (LENGTH, LENGTH - 2)]
    expected = lengths if block is Whisper else lengths[:1]
    block = block().eval()
    truth, yardstick = (results(block, dtype) for dtype in (torch.float64, torch.float32))
    assert not calls
    with patched():
        found = results(block, torch.float32)
    assert [(query[-2], key[-2]) for query, key, _ in calls] == expected
    for i, pair in enumerate(zip(found, truth, yardstick, strict=True)):
        assert_close(*pair, eps=EPS["float32"], len_kv=WIDTH, factor=3.0 if i else 2.0)
