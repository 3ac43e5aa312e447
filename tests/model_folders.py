"""Models of transformers with two layers and random weights, saved as a user has them."""

import wave

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "animal", "did", "not", "move", ".", "it",
         "was", "tired"]  # fmt: skip
TEXT = "the animal did not move . it was tired ."
PLACES = 20  # of the models that have a table of positions
RATE = 16_000
SPAN = {"num_hidden_layers": 2, "num_attention_heads": 4}
# Weights that are wide enough for heads to differ.
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3}
NUMBERS = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
SPOKEN = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "init_std": 0.3,
    "max_source_positions": 50, "max_target_positions": PLACES, "num_mel_bins": 8,
    "decoder_start_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SPAN, **WIDTHS, **NUMBERS, num_key_value_heads=2))


def bert():
    return hf.BertModel(hf.BertConfig(**SPAN, **WIDTHS, **NUMBERS, max_position_embeddings=PLACES))


def vit():
    return hf.ViTModel(hf.ViTConfig(**SPAN, **WIDTHS, image_size=16, patch_size=4))


def whisper():
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**SPOKEN, **NUMBERS))


def t5():
    return hf.T5ForConditionalGeneration(hf.T5Config(
        **NUMBERS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ))


MAKERS = {"llama": llama, "bert": bert, "vit": vit, "whisper": whisper, "t5": t5}


def save_tokenizer(folder, *, around):
    """A tokenizer of whole words; ``around`` puts special tokens at both ends."""
    made = Tokenizer(models.WordLevel(dict(zip(WORDS, range(13), strict=True)), unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if around:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    hf.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)


def save_model(name, folder):
    """Write a model and what prepares its inputs; return its folder."""
    torch.manual_seed(1)
    hf.utils.logging.disable_progress_bar()
    folder = folder / name
    MAKERS[name]().save_pretrained(folder)
    if name == "vit":
        hf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        return folder
    if name == "whisper":
        hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    save_tokenizer(folder, around=name == "bert")
    return folder


def save_image(path):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def save_sound(path, *, rate=RATE, channels=1, width=2, seconds=0.75):
    count = int(seconds * rate)
    tone = (9000 * np.sin(np.arange(count) / 5)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.repeat(tone, channels).tobytes()[: count * channels * width])
    return path
