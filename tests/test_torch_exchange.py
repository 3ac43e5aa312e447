"""`scaledot.torch.exchanged`: inside it, the modules of a model are of this package's class."""

import contextlib
import copy
import gc
import importlib
import threading
import warnings
import weakref

import pytest

from compare import EPS, assert_close
from forks import in_a_child, needs_fork

torch = pytest.importorskip("torch")
module = importlib.import_module("scaledot.torch")
MultiheadAttention, exchanged = module.MultiheadAttention, module.exchanged
nn = torch.nn

WIDTH, HEADS, LENGTH = 8, 2, 5


class Layer(nn.Module):
    """Self- and cross-attention that ask for weights, as is the default, and drop them."""

    def __init__(self, shared):
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.parts = nn.ModuleList([nn.Sequential(shared)])
        self.given = []

    def forward(self, x, positional=False):
        options = (None, True) if positional else ()
        x, weights = self.own(x, x, x, *options)
        y, more = self.parts[0][0](x, x, x)
        self.given = [weights, more]
        return x + y


class Model(nn.Module):
    """Two layers with one attention in common, and a stack of PyTorch's own."""

    def __init__(self):
        super().__init__()
        shared = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.first, self.second = Layer(shared), Layer(shared)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.stack(self.second(self.first(x)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def x():
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions that compute here, call by call."""
    seen = []
    for name in ("attention", "attention_weights"):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, f=function, **k: (seen.append(f.__name__), f(*a, **k))[1]
        )
    return seen


def attentions(model):
    return [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]


def state(model):
    """All that a model's attention modules hold, by identity and by order."""
    return [
        (id(m), type(m), m.training, [id(p) for p in m.parameters()], *(
            list(hooks.items()) for hooks in (m._forward_hooks, m._forward_pre_hooks,
                                              m._forward_pre_hooks_with_kwargs)
        )) for m in attentions(model)
    ]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
def test_the_same_answers_from_every_module(model, x, calls, grad):
    """In inference too, where PyTorch's layers would pass their modules by."""
    exact = copy.deepcopy(model).double()(x.double())
    with torch.set_grad_enabled(grad):
        theirs = model(x)
        assert calls == []
        with exchanged(model):
            ours = model(x)
            assert calls.count("attention") == 6
            assert calls.count("attention_weights") == 4  # those of the stack are not asked for
        again = model(x)
    assert len(calls) == 10
    assert torch.equal(again, theirs)
    assert_close(ours, exact, theirs, eps=EPS["float32"], len_kv=WIDTH)


def test_modules_stay_what_they_are(model, x):
    hooked = []
    model.first.own.register_forward_hook(lambda *_: hooked.append("after"))
    model.first.own.register_forward_pre_hook(lambda *_: hooked.append("before"))
    model.second.train()
    before, names = state(model), list(model.state_dict())
    with exchanged(model):
        inside = state(model)
        assert {kind for _, kind, *_ in inside} == {MultiheadAttention}
        # Object, mode and parameters.
        assert [(a[0], *a[2:4]) for a in inside] == [(a[0], *a[2:4]) for a in before]
        assert list(model.state_dict()) == names
        assert model.first.parts[0][0] is model.second.parts[0][0]
        model.first(x)
    assert hooked == ["before", "after"]
    assert state(model) == before
    assert len({id(m) for m in attentions(model)}) == 5  # a shared one once


def test_an_optimizer_made_before_trains_them(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.first.own.in_proj_weight.clone()
    with exchanged(model):
        model.first(x).square().sum().backward()
        optimizer.step()
    assert not torch.equal(model.first.own.in_proj_weight, before)


@pytest.mark.parametrize("positional", [False, True])
def test_weights_that_nothing_reads_are_not_computed(model, x, calls, positional):
    before = state(model)
    with torch.no_grad():
        theirs = model.first(x, positional)
        with exchanged(model, need_weights=False):
            ours = model.first(x, positional)
            assert model.first.given == [None, None]
            with exchanged(model):  # what is outside holds inside
                model.first(x, positional)
        assert calls == ["attention"] * 4
    exact = copy.deepcopy(model.first).double()(x.double(), positional)
    assert_close(ours, exact, theirs, eps=EPS["float32"], len_kv=WIDTH)
    assert state(model) == before


def test_a_single_module_and_one_that_is_ours_already(x, calls):
    theirs, ours = nn.MultiheadAttention(WIDTH, HEADS), MultiheadAttention(WIDTH, HEADS)
    before = state(ours)
    for one in (theirs, ours):
        with exchanged(one, need_weights=False):
            assert one(x, x, x)[1] is None
    assert calls == ["attention"] * 2
    assert type(theirs) is nn.MultiheadAttention
    assert state(ours) == before


def test_originals_are_back_whatever_is_raised(model):
    before = state(model)
    with pytest.raises(KeyboardInterrupt), exchanged(model, need_weights=False):
        raise KeyboardInterrupt
    assert state(model) == before


def test_scopes_of_two_threads_do_not_end_each_other(model):
    before = state(model)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with exchanged(model, need_weights=False):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with exchanged(model):
        thread.start()
        assert inside.wait(30)
    assert {type(m) for m in attentions(model)} == {MultiheadAttention}
    leave.set()
    thread.join(30)
    assert state(model) == before


@needs_fork
def test_a_child_has_the_scopes_of_the_thread_that_forks_alone(model):
    """Also where it is forked while another thread changes modules."""
    before = state(model)
    changing, go_on, leave = (threading.Event() for _ in range(3))
    hook = model.first.own.register_forward_pre_hook

    def slowly(*arguments, **options):
        changing.set()
        go_on.wait(30)
        return hook(*arguments, **options)

    def other():
        with exchanged(model, need_weights=False):
            leave.wait(30)

    def as_it_should():
        inside = {type(m) for m in attentions(model)}
        here.close()
        left = state(model) == before
        with exchanged(model):
            again = {type(m) for m in attentions(model)}
        return inside == again == {MultiheadAttention} and left and state(model) == before

    thread = threading.Thread(target=other)
    with contextlib.ExitStack() as here:
        here.enter_context(exchanged(model))
        model.first.own.register_forward_pre_hook = slowly
        thread.start()
        assert changing.wait(30)
        del model.first.own.register_forward_pre_hook
        threading.Timer(0.1, go_on.set).start()
        assert in_a_child(as_it_should)
    assert {type(m) for m in attentions(model)} == {MultiheadAttention}
    leave.set()
    thread.join(30)
    assert state(model) == before


def test_a_scope_that_a_module_holds_is_gone_with_it():
    one, stack = nn.MultiheadAttention(WIDTH, HEADS), contextlib.ExitStack()
    stack.enter_context(exchanged(one))
    one.scope, gone = stack, weakref.ref(one)
    del one, stack
    gc.collect()
    assert gone() is None


class Derived(nn.MultiheadAttention):
    """Computes something else, for all that is known of it."""


def test_subclasses_are_left_alone_and_named(model):
    model.other = nn.ModuleDict({"a": Derived(WIDTH, HEADS), "b": nn.MultiheadAttention(8, 2)})
    model.other["b"].forward = model.other["b"].forward  # its own, as of a wrapper
    said = "in its own way: Derived at other.a, MultiheadAttention at other.b"
    before = state(model)
    with pytest.raises(UserWarning, match=said), exchanged(model):
        raise AssertionError
    assert state(model) == before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with exchanged(model):
            kinds = [type(m) for m in attentions(model)]
    assert [w.filename for w in caught] == [__file__]
    assert kinds[-2:] == [Derived, nn.MultiheadAttention]
    assert set(kinds[:-2]) == {MultiheadAttention}
    assert state(model) == before


ERRORS = {
    "none": (ValueError, "must contain torch.nn.MultiheadAttention, not only what derives from it, "
             "got none. Run it within scaledot.torch.patched()", nn.Linear(2, 2), {}),
    "derived": (ValueError, "got Derived at the model itself", Derived(WIDTH, HEADS), {}),
    "no module": (TypeError, "model must be a torch.nn.Module, got list", [], {}),
    "no flag": (TypeError, "need_weights must be True or False, got None",
                nn.MultiheadAttention(WIDTH, HEADS), {"need_weights": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    error, message, given, options = ERRORS[case]
    with pytest.raises(error) as caught, exchanged(given, **options):
        raise AssertionError
    assert message in str(caught.value)
