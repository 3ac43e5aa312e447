"""What calls by PyTorch's users share: autocast of the tensors' device, and seeds of dropout."""

import contextlib
import importlib
import itertools
import threading

import pytest

from forks import in_a_child, needs_fork

torch = pytest.importorskip("torch")

module = importlib.import_module("scaledot.torch")
shared = importlib.import_module("scaledot._torch_calls")
fake = importlib.import_module("torch._subclasses.fake_tensor")
scaled_dot_product_attention = module.scaled_dot_product_attention

BATCH, HEADS, LENGTH = 3, 2, 48


@contextlib.contextmanager
def autocast(device):
    """Switch autocast on also where there is no such device, which torch.autocast would not."""
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


def three(device, dtype=torch.float32):
    return torch.zeros(3, 1, 2, 4, 8, dtype=dtype, device=device).unbind()


@pytest.fixture
def anywhere():
    """Tensors without numbers, of devices that need not be there."""
    with fake.FakeTensorMode():
        yield


@pytest.mark.parametrize("on", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("of", ["cpu", "cuda"])
def test_autocast_is_that_of_the_device(of, on, anywhere):
    tensors = three(on)
    device = torch.device(on)
    with autocast(of):
        dtype = torch.get_autocast_dtype(of)
        found = shared.cast(*tensors)
        assert shared.autocast_dtype(device) == (dtype if of == on else None)
        with shared.no_autocast(device):
            assert torch.is_autocast_enabled(of) == (of != on)
        assert torch.is_autocast_enabled(of)
        kept = (*three(on, torch.float64)[:2], three(on, torch.int64)[0])
        assert all(a is b for a, b in zip(shared.cast(*kept), kept, strict=True))
    assert {x.dtype for x in found} == {dtype if of == on else torch.float32}
    assert {x.device.type for x in found} == {on}
    assert all((a is b) == (of != on) for a, b in zip(found, tensors, strict=True))


@pytest.mark.parametrize("on", ["cpu", "cuda"])
@pytest.mark.parametrize("of", ["cpu", "cuda"])
def test_attention_of_transformers_is_cast_on_its_device(of, on, anywhere, monkeypatch):
    """Without numbers there is nothing to compute: what attention is given is looked at."""
    pytest.importorskip("transformers")
    of_transformers = importlib.import_module("scaledot.transformers._attend")
    seen = []

    def given(query, key, *_, **options):
        seen.append((query.dtype, key.dtype, torch.is_autocast_enabled(of)))
        return torch.zeros(1, 2, 4, 8)

    for name in ("attention", "attention_weights"):
        monkeypatch.setattr(of_transformers, name, given)
    with autocast(of):
        dtype = torch.get_autocast_dtype(of) if of == on else torch.float32
        of_transformers.attend(torch.nn.Module(), *three(on), None, output_attentions=True)
    assert seen == [(dtype, dtype, of != on)] * 2


def test_autocast_of_another_device_is_not_ours():
    x = torch.randn(2, 2, 5, 4)
    mha = module.MultiheadAttention(4, 2)
    mask = torch.zeros(5, 5, dtype=torch.float16)
    with autocast("cuda"):
        out = scaled_dot_product_attention(x, x, x)
        of_module, weights = mha(x[0], x[0], x[0])
        # Autocast alone lets masks of a half have another dtype than query.
        with pytest.raises(TypeError, match=r"got torch.float16 beside torch.float32"):
            scaled_dot_product_attention(x, x, x, mask)
    assert torch.equal(out, scaled_dot_product_attention(x, x, x))
    assert torch.equal(of_module, mha(x[0], x[0], x[0])[0])
    assert of_module.dtype == weights.dtype == torch.float32


def weights_kept(attend, lead):
    """Which weights of equal scores dropout keeps, by query's, key's and value's leading axes."""
    torch.manual_seed(0)
    query, key = (torch.zeros(*axes, HEADS, LENGTH, 2) for axes in lead[:2])
    value = torch.eye(LENGTH).expand(*lead[2], HEADS, LENGTH, LENGTH)
    return attend(query, key, value) > 0  # (..., HEADS, LENGTH, LENGTH)


def by_function(query, key, value):
    return scaled_dot_product_attention(query, key, value, dropout_p=0.5)


def by_transformers(query, key, value):
    pytest.importorskip("transformers")
    attend = importlib.import_module("scaledot.transformers._attend").attend
    out, _ = attend(torch.nn.Module(), query, key, value, None, 0.5, is_causal=False)
    return out.transpose(1, 2)


@pytest.mark.parametrize("lead", [
    ((BATCH,), (BATCH,), (BATCH,)), ((1,), (BATCH,), (BATCH,)), ((BATCH,), (1,), (1,)),
    ((1,), (1,), (BATCH,)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("attend", [by_function, by_transformers])
def test_dropout_differs_between_all_entries_heads_and_rows(attend, lead):
    kept = weights_kept(attend, lead)
    assert kept.shape == (BATCH, HEADS, LENGTH, LENGTH)
    rows = {tuple(row.tolist()) for row in kept.flatten(0, 2)}
    assert len(rows) == BATCH * HEADS * LENGTH
    # As different as chance makes them: masks of two entries, or of two heads, agree in a half.
    for pair in itertools.combinations(kept.flatten(0, 1), 2):
        agreeing = (pair[0] == pair[1]).sum().item()
        assert abs(agreeing - LENGTH**2 / 2) < 5 * LENGTH / 2


def test_leading_axes_that_do_not_fit_are_the_error_that_they_are_without_dropout():
    x = torch.zeros(6, HEADS, 4, 2)
    with pytest.raises(ValueError, match="leading axes of query, key and value must broadcast"):
        scaled_dot_product_attention(x[:2], x[:3], x[:3], dropout_p=0.5)


# Leading axes of query and of key; -1 is the batch.
LEADS = {"function": ((1, 4), (-1, 4)), "grouped": ((-1, 4), (-1, 2)), "module": ((-1,), (-1,))}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")
@pytest.mark.parametrize("of", LEADS)
def test_one_graph_serves_all_lengths_and_batches(of):
    torch._dynamo.reset()
    counter = importlib.import_module("torch._dynamo.testing").CompileCounter()
    mha = module.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def call(query, key):
        if of == "module":
            return mha(query, key, key, need_weights=False)[0]
        options = {"dropout_p": 0.5, "enable_gqa": of == "grouped"}
        return scaled_dot_product_attention(query, key, key, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    # No two sizes of a call are equal, or the compiler takes them for one.
    for batch, length in ((3, 9), (5, 11), (6, 13)):
        query, key = (
            torch.randn(*(batch if n == -1 else n for n in lead), length + more, 8)
            for lead, more in zip(LEADS[of], (0, 1), strict=True)
        )
        torch.manual_seed(batch)
        expected = call(query, key)
        torch.manual_seed(batch)
        assert torch.equal(compiled(query, key), expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_shared_change_ends_with_the_last_who_leaves():
    made = []

    @contextlib.contextmanager
    def change():
        made.append("on")
        try:
            yield
        finally:
            made.append("off")

    scopes = shared.Shared(change)
    first, second = scopes.scope(), scopes.scope()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert made == ["on"]
    with contextlib.suppress(ZeroDivisionError), scopes.scope():
        1 / 0  # noqa: B018
    assert made == ["on"]
    second.__exit__(None, None, None)
    assert made == ["on", "off"]
    with scopes.scope():
        assert made == ["on", "off", "on"]
    assert made == ["on", "off"] * 2


def test_a_shared_change_that_fails_leaves_nothing():
    changes = iter([ValueError("why"), None])

    @contextlib.contextmanager
    def change():
        if error := next(changes):
            raise error
        yield

    scopes = shared.Shared(change)
    with pytest.raises(ValueError, match="why"), scopes.scope():
        pass
    with scopes.scope():  # it is tried again
        pass
    assert next(changes, "used up") == "used up"


def noted(made, before=lambda: None):
    """A change that notes when it is made and when it is taken back."""

    @contextlib.contextmanager
    def change():
        before()
        made.append("on")
        yield
        made.append("off")

    return shared.Shared(change)


@needs_fork
def test_a_child_has_the_scopes_of_the_thread_that_forks_alone():
    theirs, ours, both = [], [], []
    scopes = [noted(made) for made in (theirs, ours, both)]
    inside, leave = threading.Event(), threading.Event()

    def other():
        with scopes[0].scope(), scopes[2].scope():
            inside.set()
            leave.wait(30)

    def as_it_should():
        left = (theirs, ours, both) == (["on", "off"], ["on"], ["on"])
        here.close()
        with scopes[0].scope():
            again = theirs == ["on", "off", "on"]
        return left and again and (theirs[3:], ours, both) == (["off"], ["on", "off"], ours)

    thread = threading.Thread(target=other)
    with contextlib.ExitStack() as here:
        here.enter_context(scopes[1].scope())
        here.enter_context(scopes[2].scope())
        thread.start()
        assert inside.wait(30)
        assert in_a_child(as_it_should)
        assert theirs == ours == both == ["on"]
    assert ours == ["on", "off"]
    leave.set()
    thread.join(30)
    assert theirs == both == ["on", "off"]


@needs_fork
def test_a_fork_in_the_midst_of_a_shared_change():
    """It waits for the end, so that a child has all of the change or nothing, and no lock."""
    making, go_on, made = threading.Event(), threading.Event(), []
    scopes = noted(made, lambda: (making.set(), go_on.wait(30)))

    def other():
        with scopes.scope():
            pass

    def as_it_should():
        with scopes.scope():
            return made[-3:] == ["on", "off", "on"]

    thread = threading.Thread(target=other)
    thread.start()
    assert making.wait(30)
    threading.Timer(0.1, go_on.set).start()
    assert in_a_child(as_it_should)
    thread.join(30)
    assert made == ["on", "off"]
