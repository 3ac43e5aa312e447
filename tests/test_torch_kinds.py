"""Tensors of PyTorch that are no plain numbers in this process: what is said of them."""

import warnings

import pytest

import scaledot as sd

torch = pytest.importorskip("torch")
import scaledot.torch  # noqa: E402

CALLS = {
    "attention": lambda x, plain: sd.attention(x, x, x),
    "mask": lambda x, plain: sd.attention(plain, plain, plain, mask=x),
    "state": lambda x, plain: sd.attention_state(x, x, x),
    "gradient": lambda x, plain: sd.attention(x.requires_grad_(), x, x),
    "weights": lambda x, plain: sd.attention_weights(x, x),
}


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.parametrize("call", CALLS)
def test_nested(call, layout):
    plain = torch.ones(2, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype
        nested = torch.nested.nested_tensor([plain, plain], layout=getattr(torch, layout))
    with pytest.raises(TypeError, match="must be a dense tensor of plain numbers, got a nested"):
        CALLS[call](nested, plain)


@pytest.fixture(scope="module")
def distributed():
    """A DTensor of one process."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    if torch.distributed.is_initialized():
        pytest.skip("there is a group already")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = tensor.init_device_mesh("cpu", (1,))
        yield tensor.distribute_tensor(torch.ones(2, 3, 4), mesh, [tensor.Shard(0)])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("call", CALLS)
def test_distributed(call, distributed):
    with pytest.raises(TypeError, match=r"must be a dense tensor .* a DTensor") as caught:
        CALLS[call](distributed.detach().clone(), torch.ones(2, 3, 4))
    assert ".to_local()" in str(caught.value)


def test_distributed_tensors_are_left_to_pytorch(distributed):
    """By the functions that take PyTorch's place; its own operator answers for them."""
    x = distributed.detach()
    assert not scaledot.torch.is_ours(query=x, key=x, value=x)
    found = scaledot.torch.scaled_dot_product_attention(x, x, x)
    assert type(found) is type(x)
    plain = x.to_local()
    exact = torch.nn.functional.scaled_dot_product_attention(plain, plain, plain)
    assert torch.equal(found.to_local(), exact)
