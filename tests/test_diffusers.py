"""`scaledot.diffusers`: its processor beside diffusers' own, and calls within `patched`.

Truth is the same module with diffusers' processor in float64, and the yardstick is that in
float32.
"""

import copy
import functools
import importlib
import os
import subprocess
import sys
import threading

import pytest

from compare import EPS, assert_close
from counted import counted_calls

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
module = importlib.import_module("scaledot.diffusers")
attention_processor = importlib.import_module("diffusers.models.attention_processor")
attention_dispatch = importlib.import_module("diffusers.models.attention_dispatch")
Attention = attention_processor.Attention
functional = torch.nn.functional

WIDTH, TEXT, HEADS, D = 12, 10, 3, 4
of = functools.partial(Attention, query_dim=WIDTH, heads=HEADS, dim_head=D)
plain = attention_processor.AttnProcessor()
added = attention_processor.AttnAddedKVProcessor()
added_2 = attention_processor.AttnAddedKVProcessor2_0()
sliced = attention_processor.SlicedAttnProcessor(2)
joint = attention_processor.JointAttnProcessor2_0()
cross = {"cross_attention_dim": TEXT}
text_keys = {"added_kv_proj_dim": TEXT, "norm_num_groups": 2, "bias": True}
normed = {"norm_num_groups": 2, "residual_connection": True, "rescale_output_factor": 1.7}

# Options of a module; shapes of what asks, of the text and of the mask, which is added to the
# scores, or None.
CASES = {
    "self": ({}, (2, 7, WIDTH), None, None),
    "cross": (cross | {"bias": True}, (2, 7, WIDTH), (2, 5, TEXT), None),
    "image": (normed, (2, WIDTH, 3, 2), None, None),
    "image and text": (cross | normed, (2, WIDTH, 3, 2), (2, 5, TEXT), None),
    "mask of keys": (cross, (2, 7, WIDTH), (2, 5, TEXT), (2, 1, 5)),
    "mask of two axes": (cross, (2, 7, WIDTH), (2, 5, TEXT), (2, 5)),
    "mask of heads": ({}, (2, 7, WIDTH), None, (2 * HEADS, 7, 7)),
    "mask, without processor 2": ({"processor": plain}, (2, 7, WIDTH), None, (2, 7, 7)),
    "mask, sliced": ({"processor": sliced}, (2, 7, WIDTH), None, (2, 7, 7)),
    "not scaled": ({"scale_qk": False}, (2, 7, WIDTH), None, None),
    "norms": ({"qk_norm": "rms_norm"}, (2, 7, WIDTH), None, None),
    "norm of text": (cross | {"cross_attention_norm": "layer_norm"}, (2, 7, WIDTH), (2, 5, TEXT),
                     None),
    "groups of text": (cross | {"cross_attention_norm": "group_norm",
                                "cross_attention_norm_num_groups": 2},
                       (2, 7, WIDTH), (2, 5, TEXT), None),
    "spatial norm": (normed | {"norm_num_groups": None, "spatial_norm_dim": 8},
                     (2, 32, 3, 2), None, None),
    "added keys": (text_keys | {"processor": added_2}, (2, WIDTH, 6), (2, 5, TEXT), None),
    "added keys, image": (text_keys | {"processor": added_2}, (2, WIDTH, 3, 2), (2, 5, TEXT),
                          None),
    "added keys, mask of text": (text_keys | {"processor": added_2}, (2, WIDTH, 6), (2, 5, TEXT),
                                 (2, 1, 5)),
    "added keys, mask": (text_keys | {"processor": added}, (2, WIDTH, 6), (2, 5, TEXT),
                         (2, 1, 5)),
    "added keys alone": (text_keys | {"processor": added, "only_cross_attention": True},
                         (2, WIDTH, 6), (2, 6, TEXT), (2, 1, 6)),
    "added keys, norm of text": (text_keys | {"processor": added, "cross_attention_norm":
                                              "group_norm", "cross_attention_norm_num_groups": 2},
                                 (2, WIDTH, 6), (2, 5, TEXT), None),
    "joint": ({"added_kv_proj_dim": WIDTH, "context_pre_only": False, "processor": joint,
               "qk_norm": "rms_norm"}, (2, 7, WIDTH), (2, 5, WIDTH), None),
    "joint, last": ({"added_kv_proj_dim": WIDTH, "context_pre_only": True, "processor": joint},
                    (2, 7, WIDTH), (2, 5, WIDTH), None),
    "joint, image alone": ({"added_kv_proj_dim": WIDTH, "context_pre_only": False,
                            "processor": joint}, (2, 7, WIDTH), None, None),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def torch_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the arrays of each call that is computed here."""
    return counted_calls(monkeypatch)


def problem(case):
    """A module, and the arguments of its call."""
    options, of_pixels, of_text, of_mask = CASES[case]
    torch.manual_seed(sum(case.encode()))
    options = {"query_dim": of_pixels[1]} | options if "spatial" in case else options
    attn = of(**options).eval()
    # Norms start as no scale and no shift, and would hide a norm that is left out.
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.5)
    arguments = {"hidden_states": torch.randn(of_pixels)}
    if of_text is not None:
        arguments["encoder_hidden_states"] = torch.randn(of_text)
    if of_mask is not None:
        arguments["attention_mask"] = torch.randn(of_mask)
    if "spatial" in case:
        arguments["temb"] = torch.randn(2, 8, 3, 2)
    return attn, arguments


def results(attn, arguments, dtype):
    """Each output in a row, then the gradients of all arguments and parameters in use."""
    attn = copy.deepcopy(attn).to(dtype)
    leaves = {name: x.to(dtype).requires_grad_() for name, x in arguments.items()}
    out = attn(**leaves)
    out = out if isinstance(out, tuple) else (out,)
    ramps = [torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape).cos() for x in out]
    total = sum((x * ramp).sum() for x, ramp in zip(out, ramps, strict=True))
    used = [*leaves.values(), *attn.parameters()]
    gradients = torch.autograd.grad(total, used, allow_unused=True, materialize_grads=True)
    assert {x.dtype for x in out} == {dtype}
    # All gradients are one array: those that are sums which cancel have no scale of their own.
    return [*(x.flatten() for x in out), torch.cat([x.flatten() for x in gradients])]


@pytest.mark.parametrize("case", CASES)
def test_as_the_standard_processor(case, calls):
    attn, arguments = problem(case)
    truth = results(attn, arguments, torch.float64)
    yardstick = results(attn, arguments, torch.float32)
    module.set_processor(attn)
    calls.clear()
    found = results(attn, arguments, torch.float32)
    assert len(calls) == 1
    for got, exact, other in zip(found, truth, yardstick, strict=True):
        factor = 3.0 if got is found[-1] else 2.0
        # Behind attention comes a sum over the width.
        assert_close(got, exact, other, eps=EPS["float32"], len_kv=WIDTH, factor=factor)


def test_fewer_heads_of_keys():
    """Diffusers' own processor cannot: the truth has each head of keys repeated."""
    torch.manual_seed(0)
    grouped = Attention(query_dim=8, heads=4, dim_head=4, kv_heads=2)
    whole = Attention(query_dim=8, heads=4, dim_head=4)
    state = grouped.state_dict()
    for name in ("to_k.weight", "to_v.weight"):
        state[name] = state[name].view(2, 4, 8).repeat_interleave(2, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    x = torch.randn(2, 5, 8)
    module.set_processor(grouped)
    assert_close(grouped(x), whole.double()(x.double()), whole.float()(x), eps=EPS["float32"],
                 len_kv=16)  # fmt: skip


def test_boolean_masks_say_what_is_seen():
    attn, arguments = problem("added keys, mask of text")
    module.set_processor(attn)
    seen = torch.tensor([[[True, False, True, True, False]], [[True] * 5]])
    arguments["attention_mask"] = seen
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    found = attn(**arguments)
    assert torch.equal(found, attn(**arguments | {"attention_mask": bias}))
    others = attn(**arguments | {"attention_mask": torch.ones_like(seen)})
    assert [torch.equal(*pair) for pair in zip(found, others, strict=True)] == [False, True]


X = torch.zeros(2, 5, WIDTH)
JOINT = {"added_kv_proj_dim": WIDTH, "context_pre_only": False}
ERRORS = {
    "joint": (JOINT, torch.zeros(2, 1, 5), "attention_mask must be None in joint attention, got"),
    "batch": ({}, torch.zeros(1, 5, 5), "must have a first axis of 2 (batch) or 6 (batch * heads)"),
    "one axis": ({}, torch.zeros(2), "must have a first axis of 2 (batch) or 6 (batch * heads)"),
    "length": ({}, torch.zeros(2, 1, 4), "bias must broadcast to"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_masks_that_do_not_fit(case):
    options, mask, message = ERRORS[case]
    attn = of(**options, processor=module.AttnProcessor())
    with pytest.raises(ValueError, match=r".* got .*\. [A-Z]") as caught:
        attn(X, attention_mask=mask)
    assert message in str(caught.value)


def unet(**options):
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        8, 4, 4, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=TEXT,
        attention_head_dim=4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **options,
    ).eval()  # fmt: skip


def test_set_processor_of_a_model_and_back(calls):
    model = unet()
    before = dict(model.attn_processors)
    assert len(before) == 8
    arguments = torch.randn(1, 4, 8, 8), 3, torch.randn(1, 5, TEXT)
    with torch.no_grad():
        yardstick = model(*arguments).sample
        module.set_processor(model)
        module.set_processor(model)  # again is allowed
        assert {type(x) for x in model.attn_processors.values()} == {module.AttnProcessor}
        assert not calls
        found = model(*arguments).sample
        assert len(calls) == len(before)
        model.set_attn_processor(dict(before))
        assert torch.equal(model(*arguments).sample, yardstick)
        assert len(calls) == len(before)
        sample, step, text = arguments
        truth = model.double()(sample.double(), step, text.double()).sample
    assert_close(found, truth, yardstick, eps=EPS["float32"], len_kv=64)


def test_set_processor_changes_all_or_nothing():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        module.set_processor("unet")
    with pytest.raises(ValueError, match=r"all with standard processors, got none\. Run it"):
        module.set_processor(torch.nn.Linear(2, 2))
    both = torch.nn.ModuleDict({"first": of(), "second": of()})
    fused = attention_processor.FusedAttnProcessor2_0()
    both["second"].set_processor(fused)
    with pytest.raises(ValueError, match="got FusedAttnProcessor2_0 at second"):
        module.set_processor(both)
    assert isinstance(both["first"].processor, attention_processor.AttnProcessor2_0)
    assert both["second"].processor is fused
    both["second"] = torch.nn.Module()
    both["second"].processor = attention_processor.AttnProcessor2_0()
    with pytest.raises(ValueError, match="got AttnProcessor2_0 at second"):
        module.set_processor(both)
    assert isinstance(both["first"].processor, attention_processor.AttnProcessor2_0)


def flux():
    """A model whose processors go through diffusers' dispatcher."""
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=TEXT, pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
    ).eval()  # fmt: skip


def of_flux(model, dtype=torch.float32):
    torch.manual_seed(1)
    text, pooled, pixels = torch.randn(1, 5, TEXT), torch.randn(1, 6), torch.randn(1, 9, 4)
    places = torch.arange(27.0).reshape(9, 3)
    with torch.no_grad():
        return model.to(dtype)(
            pixels.to(dtype), text.to(dtype), pooled.to(dtype), torch.tensor([0.5], dtype=dtype),
            places, torch.zeros(5, 3),
        ).sample  # fmt: skip


def test_patched_routes_the_dispatcher(calls):
    model = flux()
    yardstick = of_flux(model)
    assert not calls
    with module.patched():
        found = of_flux(model)
    assert calls == [[(1, 2, 14, 8)] * 3] * 2
    truth = of_flux(model, torch.float64)
    assert_close(found, truth, yardstick, eps=EPS["float32"], len_kv=16)
    with pytest.raises(ValueError, match=r"FluxAttnProcessor at transformer_blocks\.0\.attn"):
        module.set_processor(model)


def test_patched_sets_another_backend_aside(calls):
    model = flux().float()
    active = attention_dispatch._AttentionBackendRegistry.get_active_backend
    with attention_dispatch.attention_backend("flex"):
        with module.patched(), module.patched():
            of_flux(model)
        assert len(calls) == 2
        with pytest.raises(ZeroDivisionError), module.patched():
            1 / 0  # noqa: B018
        assert active()[0] == "flex"
        entered, leave = threading.Event(), threading.Event()

        def stay():
            with module.patched():
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=stay)
        with module.patched():
            thread.start()
            assert entered.wait(60)
        assert active()[0] == "native"  # there is still somebody inside
        leave.set()
        thread.join()
        assert active()[0] == "flex"
    assert active()[0] == "native"


def test_patched_routes_processors_that_call_pytorch(calls):
    model = unet()
    arguments = torch.randn(1, 4, 8, 8), 3, torch.randn(1, 5, TEXT)
    with torch.no_grad():
        yardstick = model(*arguments).sample
        with module.patched():
            found = model(*arguments).sample
        assert len(calls) == 8
        sample, step, text = arguments
        truth = model.double()(sample.double(), step, text.double()).sample
    assert_close(found, truth, yardstick, eps=EPS["float32"], len_kv=64)


@pytest.mark.parametrize("missing", ["diffusers", "torch"])
def test_without_an_extra(missing, tmp_path):
    program = f"import sys; sys.modules['{missing}'] = None; import scaledot.diffusers"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode != 0
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith(f"ImportError: {missing} is needed here")
    assert f"pip install 'scaledot[{missing}]'" in last
