"""The model of docs/scaling.md, and that the page shows what it and the example say."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("needs the benchmarks", allow_module_level=True)


PAGE = ROOT / "docs" / "scaling.md"


@pytest.mark.heavy
def test_the_program_of_the_page(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch is built without torch.distributed")
    from ring_calls import run_command

    page = PAGE.read_text(encoding="utf-8")
    program = re.search(r"```python\n(# ring\.py: torchrun (.*) ring\.py\n.*?)```\n", page, re.S)
    (tmp_path / "ring.py").write_text(program[1], encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", *program[2].split()]
    said = run_command([*launch, str(tmp_path / "ring.py")]).splitlines()
    shown = re.findall(r"^    (rank .*)$", page[program.end() :], re.MULTILINE)[:4]
    assert sorted(line for line in said if line.startswith("rank ")) == shown
    assert len(shown) == 4


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling_model

    yield scaling_model
    sys.modules.pop("scaling_model")


def test_the_page_shows_the_predictions(model):
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(model.predictions()) in page


def test_a_pass_worked_out_by_hand(model):
    layer = model.Layer(num_heads=2, num_kv_heads=1, d=10, item_bytes=4, causal=False)
    rank = model.Rank(forward=1e6, backward=5e5, bandwidth=1e4, latency=0.5)
    # 4·100·100·10·2 operations, 2·100·1·10·4 bytes
    there = model.forward(layer, rank, 100, 3)
    assert there.compute == pytest.approx(0.8)
    assert there.transfer == pytest.approx(0.5 + 0.8)
    assert there.total == pytest.approx(0.5 + 2 * 1.3 + 0.8)
    back = model.backward(layer, rank, 100, 3)
    assert back.compute == pytest.approx(4.0)
    assert back.transfer == pytest.approx(1.0 + 1.6)
    assert back.total == pytest.approx(3 * 4.0 + 0.5 + 0.1)


def test_causal_attention_is_half_the_work(model):
    full, causal = (model.Layer(4, 2, 8, causal=causal) for causal in (False, True))
    assert full.flops(6, 6) == 2 * causal.flops(6, 6)


def test_where_transfers_are_hidden(model):
    rank = model.Rank(3e12, 2e12, 1e9, 0.0)
    there, back = model.hidden_from(model.LAYER, rank)
    for tokens, find in ((there, model.forward), (back, model.backward)):
        assert find(model.LAYER, rank, 1.01 * tokens, 4).compute > find(
            model.LAYER, rank, 1.01 * tokens, 4).transfer  # fmt: skip
        assert find(model.LAYER, rank, 0.99 * tokens, 4).compute < find(
            model.LAYER, rank, 0.99 * tokens, 4).transfer  # fmt: skip


@pytest.mark.parametrize(
    ("item_bytes", "there", "back"), [(4, 11 / 12, 43 / 24), (2, 17 / 12, 37 / 12)]
)
def test_memory_in_shards(item_bytes, there, back, model):
    """The sums of the page's table: 0.9, 1.8, 1.4 and 3.1."""
    layer = model.Layer(8, 8, 64, item_bytes=item_bytes)
    shards = [x / layer.shard_bytes(1000) for x in model.memory(layer, 1000)]
    assert shards == pytest.approx([there, back])
    page = PAGE.read_text(encoding="utf-8")
    together = next(line for line in page.splitlines() if line.startswith("| together"))
    assert all(f"{x:.1f}" in together for x in shards)
