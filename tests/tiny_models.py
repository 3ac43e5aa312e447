"""Small models of transformers with random weights, and an attention to compare with.

The truth is the textbook's computation in float64, with a boolean matrix for a mask. eager will
not do for it: it computes softmax in float32 in some models, and gives nan for rows of padding.
"""

import numpy as np
import torch
import transformers as hf
from transformers.masking_utils import sdpa_mask

import scaledot.transformers

LENGTH = 19
HIDDEN = 32


def truth(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
          softcap=None, s_aux=None, position_bias=None, **others):  # fmt: skip
    """Attention as in the books, with its weights."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    elif causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    weights = weights[..., : key.shape[-2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


def matrix(*args, **options):
    """Mask function that leaves nothing to attention but the matrix."""
    options["allow_is_causal_skip"] = options["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*args, **options)


def register():
    """Make "scaledot" and "truth" known to transformers."""
    scaledot.transformers.register()
    hf.AttentionInterface.register("truth", truth)
    hf.AttentionMaskInterface.register("truth", matrix)


_decoder = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
    "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
_encoder = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "initializer_range": 0.3,
}  # fmt: skip
_kinds = ["sliding_attention", "full_attention"]
_experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**_decoder)),
    "mistral": (hf.MistralForCausalLM, lambda: hf.MistralConfig(**_decoder, sliding_window=5)),
    "qwen2": (hf.Qwen2ForCausalLM, lambda: hf.Qwen2Config(**_decoder)),
    "phi": (hf.PhiForCausalLM, lambda: hf.PhiConfig(**_decoder)),
    "gemma2": (hf.Gemma2ForCausalLM, lambda: hf.Gemma2Config(
        **_decoder, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0)),
    "gemma3": (hf.Gemma3ForCausalLM, lambda: hf.Gemma3TextConfig(
        **_decoder, head_dim=8, sliding_window=5, layer_types=_kinds)),
    "gpt_oss": (hf.GptOssForCausalLM, lambda: hf.GptOssConfig(
        **_decoder, **_experts, head_dim=8, sliding_window=5, layer_types=_kinds)),
    "llama4": (hf.Llama4ForCausalLM, lambda: hf.Llama4TextConfig(
        **_decoder, head_dim=8, intermediate_size_mlp=64, attention_chunk_size=6,
        num_local_experts=2, layer_types=["chunked_attention", "full_attention"], moe_layers=[])),
    "starcoder2": (hf.Starcoder2ForCausalLM, lambda: hf.Starcoder2Config(
        **_decoder, sliding_window=5)),
    # Its last two layers have the keys and values of those before them.
    "gemma4": (hf.Gemma4ForCausalLM, lambda: hf.Gemma4TextConfig(
        **_decoder | {"num_hidden_layers": 4}, head_dim=8, global_head_dim=8, sliding_window=5,
        layer_types=_kinds * 2, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
        num_kv_shared_layers=2)),
    "gpt2": (hf.GPT2LMHeadModel, lambda: hf.GPT2Config(
        n_layer=2, n_head=4, n_embd=HIDDEN, vocab_size=64, initializer_range=0.3,
        bos_token_id=1, eos_token_id=None)),
    "bert": (hf.BertModel, lambda: hf.BertConfig(**_encoder)),
    "modernbert": (hf.ModernBertModel, lambda: hf.ModernBertConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=64, initializer_range=0.3, local_attention=6, global_attn_every_n_layers=3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)),
    "t5": (hf.T5ForConditionalGeneration, lambda: hf.T5Config(
        d_model=HIDDEN, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64,
        decoder_start_token_id=0, eos_token_id=None)),
    "whisper": (hf.WhisperForConditionalGeneration, lambda: hf.WhisperConfig(
        d_model=HIDDEN, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64,
        num_mel_bins=8, max_source_positions=LENGTH, max_target_positions=64, init_std=0.3,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=63)),
    "vit": (hf.ViTModel, lambda: hf.ViTConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=4, initializer_range=0.3)),
}  # fmt: skip
CUTS = (hf.Gemma4ForCausalLM, lambda: hf.Gemma4TextConfig(
    **_decoder | {"num_hidden_layers": 4}, head_dim=8, global_head_dim=8, sliding_window=64,
    layer_types=_kinds * 2, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
    num_kv_shared_layers=2))  # fmt: skip
# These ask for masks as all do, and attend by themselves.
OWN = {
    "bloom": (hf.BloomForCausalLM, lambda: hf.BloomConfig(
        hidden_size=HIDDEN, n_layer=1, n_head=4, vocab_size=64)),
    "xglm": (hf.XGLMForCausalLM, lambda: hf.XGLMConfig(
        d_model=HIDDEN, ffn_dim=64, num_layers=1, attention_heads=4, vocab_size=64,
        max_position_embeddings=64)),
    "mpnet": (hf.MPNetModel, lambda: hf.MPNetConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64)),
    "deepseek_v4": (hf.DeepseekV4ForCausalLM, lambda: hf.DeepseekV4Config(
        vocab_size=64, hidden_size=HIDDEN, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, head_dim=16, q_lora_rank=16, n_routed_experts=4,
        num_experts_per_tok=2, sliding_window=16, o_groups=2, o_lora_rank=8, index_n_heads=2,
        index_head_dim=8, index_topk=4, layer_types=["heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 2},
        hc_mult=2, max_position_embeddings=64, num_nextn_predict_layers=0, pad_token_id=0)),
}  # fmt: skip
DECODERS = (
    "llama", "mistral", "qwen2", "phi", "gemma2", "gemma3", "gpt_oss", "llama4", "starcoder2",
    "gemma4", "gpt2",
)
TEXT = (*DECODERS, "bert", "modernbert")
SEVERAL = ("t5", "whisper")


def build(name, dtype=torch.float32, **changes):
    """A model in evaluation, its weights the same in every dtype; changes are of its config."""
    kind, make = CONFIGS[name]
    config = make()
    for option, x in changes.items():
        assert hasattr(config, option), option
        setattr(config, option, x)
    torch.manual_seed(len(name))
    model = kind(config).to(dtype).eval()
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # the default has no float64
    return model


def token_ids(rows=2, length=LENGTH):
    """Token ids (rows, length), none of them special."""
    numbers = np.random.default_rng(0).integers(3, 63, (rows, length))
    return torch.from_numpy(numbers)


def padding(where, rows=2, length=LENGTH):
    """Mask of tokens (rows, length): row 0 is whole, padding of row 1 lies where it is said."""
    if where == "none":
        return None
    keep = torch.ones(rows, length, dtype=torch.int64)
    if where in ("left", "both"):
        keep[1:, :7] = 0
    if where in ("right", "both"):
        keep[1:, 13:] = 0
    if where == "holes":
        keep[1:, 4:6] = keep[1:, 11:12] = 0
    return keep


def inputs(name, where="none"):
    """Arguments of a model's forward."""
    keep = padding(where)
    if name == "vit":
        return {"pixel_values": torch.from_numpy(_normal(2, 3, 16, 16))}
    if name == "whisper":
        audio = torch.from_numpy(_normal(2, 8, 2 * LENGTH))
        return {"input_features": audio, "decoder_input_ids": token_ids()[:, :9]}
    given = {"input_ids": token_ids(), "attention_mask": keep}
    if name == "t5":
        given["decoder_input_ids"] = token_ids()[:, :9]
    return given


def _normal(*shape):
    return np.random.default_rng(1).standard_normal(shape)


def run(model, impl, given, valid=None):
    """First output of the model under an implementation, at the valid tokens."""
    model.set_attn_implementation(impl)
    like = next(model.parameters()).dtype
    given = {
        name: x.to(like) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    output = model(**given)[0]
    return output if valid is None else output[valid.bool()]
