"""Whisper tiny.en with its real weights on a few seconds of speech.

Bidirectional attention over 1500 frames, causal attention with a cache, and cross-attention,
whose weights tell when each word is said.
"""

import re

import numpy as np
import pytest
import torch
import transformers

from agreement import fetched, in_float64, switched
from compare import EPS, assert_close
from whisper_weights import RATE, load_speech, load_whisper
from word_times import FRAME, token_starts

pytestmark = pytest.mark.models

CLIPS = ("beckett.wav", "clone-test.wav")
SAID = "ever tried ever failed no matter try again fail again fail better"  # Beckett, as written


@pytest.fixture(scope="module")
def loaded():
    return *fetched(load_whisper), [fetched(load_speech, name) for name in CLIPS]


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def clips(loaded):
    return loaded[2]


@pytest.fixture(scope="module")
def features(model, clips):
    """Spectrograms (2, 80, 3000) of the clips and the mask (2, 3000) of what is no silence."""
    extract = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    found = extract(clips, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    return found.input_features, found.attention_mask


def transcribe(model, attention, features, **options):
    """Return what Whisper's own `generate` returns for these spectrograms."""
    spectrograms, mask = features
    return switched(model, attention).generate(spectrograms, attention_mask=mask, **options)


@pytest.fixture(scope="module")
def transcripts(model, features):
    """Tokens (2, len) of both clips, by eager attention."""
    return transcribe(model, "eager", features)


def test_words(tokenizer, transcripts):
    words = re.findall("[a-z]+", tokenizer.decode(transcripts[0].tolist()).lower())
    assert " ".join(words) == SAID


@pytest.mark.parametrize("attention", ["sdpa", "scaledot"])
def test_transcripts(model, features, transcripts, attention):
    assert torch.equal(transcribe(model, attention, features), transcripts)


def test_transcripts_by_beams(model, features):
    """Beams that are dropped take their rows of both caches with them."""
    expected, got = (
        transcribe(model, attention, features, num_beams=3) for attention in ("eager", "scaledot")
    )
    assert torch.equal(got, expected)


def test_one_clip_as_in_the_batch(model, features, transcripts):
    alone = transcribe(model, "scaledot", tuple(x[1:] for x in features))[0]
    assert torch.equal(transcripts[1, : len(alone)], alone)
    assert (transcripts[1, len(alone) :] == model.generation_config.pad_token_id).all()


def test_times_by_generate(model, features):
    """transformers reads times off the weights too, those that scaledot returns."""
    first = tuple(x[:1] for x in features)
    expected, got = (
        transcribe(model, attention, first, return_token_timestamps=True)
        for attention in ("eager", "scaledot")
    )
    assert torch.equal(got["sequences"], expected["sequences"])
    assert torch.equal(got["token_timestamps"], expected["token_timestamps"])


@pytest.fixture(scope="module")
def spoken(model, transcripts):
    """Tokens of the first clip, without those that begin, end and pad a transcript."""
    end = model.generation_config.eos_token_id
    return [token for token in transcripts[0].tolist() if token != end]


@pytest.fixture(scope="module")
def passes(model, features, spoken):
    """One pass over the first clip with its transcript given, by implementation."""
    rules = model.generation_config
    ids = [rules.decoder_start_token_id, rules.no_timestamps_token_id, *spoken]
    wide = in_float64(model)
    outputs = {}
    for name in ("truth", "eager", "sdpa", "scaledot"):
        # Weights are asked for, which sdpa does not have.
        run = switched(*((wide, "eager") if name == "truth" else (model, name)))
        with torch.no_grad():
            outputs[name] = run(
                features[0][:1].to(run.dtype), decoder_input_ids=torch.tensor([ids]),
                output_attentions=name != "sdpa",
            )  # fmt: skip
    return outputs


@pytest.mark.parametrize("name", ["encoder_last_hidden_state", "logits"])
def test_outputs(passes, name):
    truth, *own, got = (getattr(output, name) for output in passes.values())
    # A few frames before the sound are ill-conditioned: of the model's own two, sdpa is six times
    # as far from the truth there as eager.
    farthest = max(own, key=lambda output: (output - truth).abs().max())
    assert_close(got, truth, farthest, eps=EPS["float32"], len_kv=1500)


@pytest.mark.parametrize("name", ["encoder_attentions", "decoder_attentions", "cross_attentions"])
def test_weights(passes, name):
    layers = (getattr(passes[key], name) for key in ("truth", "eager", "scaledot"))
    for truth, yardstick, got in zip(*layers, strict=True):
        assert_close(got, truth, yardstick, eps=EPS["float32"], len_kv=truth.shape[-1])


def starts(model, output, clip):
    """Return when each spoken token begins, by the weights (1, heads, len, frames) of a pass."""
    heads = model.generation_config.alignment_heads
    frames = round(len(clip) / RATE / FRAME)
    # The first row is that of the token that starts the transcript, the second one chooses the
    # first word, the last one the end.
    return token_starts([output.cross_attentions[n][0, head, 1:-1, :frames] for n, head in heads])


def test_word_times(model, passes, clips, spoken):
    expected, got = (starts(model, passes[name], clips[0]) for name in ("eager", "scaledot"))
    assert len(got) == len(spoken)
    assert (got == expected).all()


def test_words_are_where_the_sound_is(model, tokenizer, passes, clips, spoken):
    times = starts(model, passes["scaledot"], clips[0])
    sound, pause = [], []
    for token, start, end in zip(spoken, times, [*times[1:], len(clips[0]) / RATE], strict=True):
        is_word = re.search("[a-z]", tokenizer.decode([token]))
        (sound if is_word else pause).append(clips[0][round(start * RATE) : round(end * RATE)])
    loud, quiet = (np.square(np.concatenate(parts)).mean() for parts in (sound, pause))
    # Times that are off by one token make it the other way round.
    assert loud > 4 * quiet
