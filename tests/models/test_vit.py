"""ViT: a DINOv2 with real weights, beside transformers' attention and the graph it comes from."""

import hashlib
import importlib

import numpy as np
import pytest

from compare import EPS, assert_close
from scaledot import introspect, report

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
onnx = pytest.importorskip("onnx")
Image = pytest.importorskip("PIL.Image")
cbook = pytest.importorskip("matplotlib.cbook")

onnx_weights = importlib.import_module("onnx_weights")
agreement = importlib.import_module("agreement")
attending = agreement.attending

pytestmark = pytest.mark.models

LAYERS, HEADS = 12, 6
ROOM = {"eps": EPS["float32"], "len_kv": 384}  # the width
FEATURES = "/backbone/layernorm/Add_1_output_0"


@pytest.fixture(scope="module")
def graph():
    return agreement.fetched(onnx_weights.load_graph)


@pytest.fixture(scope="module")
def arrays(graph):
    return onnx_weights.arrays_of(graph)


@pytest.fixture(scope="module")
def model(arrays):
    return onnx_weights.backbone(arrays)


@pytest.fixture(scope="module")
def pixels():
    """Grace Hopper before a flag; Matplotlib carries her photograph."""
    path = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    with Image.open(path) as image:
        return onnx_weights.pixels_of(image)


@pytest.fixture(scope="module")
def truth(model, pixels):
    """Hidden states and weights in float64."""
    with attending(agreement.in_float64(model), "eager") as exact:
        out = exact(pixels.double(), output_hidden_states=True, output_attentions=True)
    weights = torch.cat(out.attentions).numpy()
    return {"hidden": hidden(out), "features": out.last_hidden_state.numpy(), "weights": weights}


def hidden(out):
    """Hidden states of all layers as one array."""
    return torch.stack(out.hidden_states).numpy()


def test_weights_are_the_ones_of_the_graph(graph, arrays, model):
    """Every number of the graph is in the model, once."""
    stored = [onnx.numpy_helper.to_array(x) for x in graph.graph.initializer]
    assert sum(x.size for x in arrays.values()) == sum(x.size for x in stored)
    of_backbone = sum(x.size for name, x in arrays.items() if name.startswith("backbone."))
    assert of_backbone == sum(x.numel() for x in model.parameters())
    digests = [hashlib.sha256(x.detach().numpy().tobytes()).digest() for x in model.parameters()]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_features(model, pixels, truth, own):
    found = {}
    for name in ("scaledot", own):
        with attending(model, name):
            out = model(pixels, output_hidden_states=True)
        found[name] = hidden(out), out.last_hidden_state.numpy()
    layers = found["scaledot"][0], found[own][0], truth["hidden"]
    for ours, theirs, exact in zip(*layers, strict=True):
        assert_close(ours, exact, theirs, **ROOM)
    assert_close(found["scaledot"][1], truth["features"], found[own][1], **ROOM)


def test_as_the_graph_computes_it(graph, arrays, model, pixels, truth):
    """Features, and the map of what is worth looking at, beside those of onnxruntime."""
    runtime = pytest.importorskip("onnxruntime")
    asked = onnx.ModelProto.FromString(graph.SerializeToString())
    asked.graph.output.append(onnx.ValueInfoProto(name=FEATURES))
    session = runtime.InferenceSession(
        asked.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    of_graph = session.run([FEATURES, "output_importance"], {"input_image": pixels.numpy()})
    paint = onnx_weights.decoder(arrays)
    with attending(model, "scaledot"):
        features = model(pixels).last_hidden_state
        importance = paint(onnx_weights.grid(features)).numpy()
    with torch.no_grad():
        exact = paint.double()(onnx_weights.grid(torch.from_numpy(truth["features"]))).numpy()
    assert_close(features, truth["features"], of_graph[0], **ROOM)
    assert_close(importance, exact, of_graph[1], **ROOM)
    # What is far from the truth would let anything pass.
    assert np.abs(of_graph[1] - exact).max() < 0.01 * np.ptp(exact)


def test_attention_of_a_photograph_in_a_report(arrays, model, pixels, truth, tmp_path):
    with attending(model, "eager"):
        dense = torch.cat(model(pixels, output_attentions=True).attentions).numpy()
    with attending(model, "scaledot"), introspect.capture(model, keep=True) as seen:
        features = model(pixels).last_hidden_state
    side = range(onnx_weights.PATCHES)
    tokens = ["[CLS]", *(f"{row},{column}" for row in side for column in side)]
    trace = seen.trace(tokens=tokens, title="Grace Hopper")
    assert [layer.num_heads for layer in trace.layers] == [HEADS] * LAYERS
    for layer, theirs, exact in zip(trace.layers, dense, truth["weights"], strict=True):
        assert_close(layer.weights(rows=[0]), exact[:, :1], theirs[:, :1], **ROOM)

    # The image as a whole is read from where the decoder sees something: from her.
    with torch.no_grad():
        importance = onnx_weights.decoder(arrays)(onnx_weights.grid(features))
    importance = torch.nn.functional.avg_pool2d(importance, 14).flatten() > 0.5
    row = trace.layers[-1].weights(rows=[0])[:, 0, 1:].mean(axis=0)
    of_her, of_others = (row[mask.numpy()].mean() for mask in (importance, ~importance))
    assert of_her > 2 * of_others

    page = report.write(trace, tmp_path / "photograph.html").read_text(encoding="utf-8")
    assert "Grace Hopper" in page
    assert '"15,15"' in page
