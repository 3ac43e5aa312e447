"""``scaledot inspect --model``: whose attention the report holds, its labels, what is refused.

The truth is the model's own attention, eager, in float64; in float32 it is the yardstick.
"""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cli_runs import one_line
from compare import EPS, assert_close
from test_report import data_of

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
folders = pytest.importorskip("model_folders")

from scaledot import introspect  # noqa: E402
from scaledot.cli import _inspect, _load, _model, app  # noqa: E402
from scaledot.transformers import register  # noqa: E402

TEXT = folders.TEXT


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of all models, with a picture and a recording."""
    folder = tmp_path_factory.mktemp("models")
    for name in folders.MAKERS:
        folders.save_model(name, folder)
    folders.save_image(folder / "a.png")
    folders.save_sound(folder / "a.wav")
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


@pytest.fixture
def looked(tmp_path, monkeypatch, models):
    """Run ``inspect`` on a model; return the trace of the report, the page's data and the output.

    No address is looked up while it runs.
    """
    traces, write = [], _inspect.report.write

    def recording(trace, *arguments, **options):
        traces.append(trace)
        return write(trace, *arguments, **options)

    def run(name, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(_inspect.report, "write", recording)
            patch.setattr("socket.getaddrinfo", None)
            page = tmp_path / "a.html"
            result = invoke("--model", models / name, *arguments, "-o", page, "--force")
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""
        return traces.pop(), data_of(page.read_text(encoding="utf-8")), result.stdout

    return run


@pytest.fixture
def refused(tmp_path):
    """Check that a run fails with code 2 and one line, and writes nothing."""

    def check(*arguments):
        result = invoke(*arguments, "-o", tmp_path / "report.html")
        assert result.exit_code == 2
        assert not (tmp_path / "report.html").exists()
        return one_line(result.stderr)

    return check


def own_attention(folder, inputs, field, dtype):
    """Weights (num_layers, num_heads, len_q, len_kv) that the model's own attention gives."""
    config = hf.AutoConfig.from_pretrained(folder)
    model = getattr(hf, config.architectures[0]).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    inputs = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    with torch.no_grad():
        out = model.eval()(**inputs, output_attentions=True)
    return torch.cat(out[field]).double().numpy()


def check_weights(trace, folder, inputs, field="attentions"):
    truth, yardstick = (
        own_attention(folder, inputs, field, x) for x in (torch.float64, torch.float32)
    )
    assert len(trace.layers) == len(truth) == 2
    assert abs(truth[0, 0] - truth[1, 3]).max() > 0.01  # heads are not alike
    for layer, of_truth, of_yardstick in zip(trace.layers, truth, yardstick, strict=True):
        assert_close(layer.weights(), of_truth, of_yardstick, eps=EPS["float32"],
                     len_kv=layer.len_kv)  # fmt: skip


def ids_of(words):
    return torch.tensor([[folders.WORDS.index(word) for word in words]])


def test_a_decoder(models, looked):
    trace, data, printed = looked("llama", "--text", TEXT)
    assert trace.tokens == tuple(TEXT.split())
    assert trace.key_tokens is None
    assert trace.title == data["title"] == f"llama: {TEXT}"
    assert data["names"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert (data["kind"], data["queries"]) == ("weights", TEXT.split())
    assert printed.startswith("layers 2, heads 4, queries 10, keys 10, float32\n")
    check_weights(trace, models / "llama", {"input_ids": ids_of(TEXT.split())})


def test_an_encoder(models, looked):
    trace, _, printed = looked("bert", "--text", TEXT, "--title", "A title")
    words = ("[CLS]", *TEXT.split(), "[SEP]")
    assert (trace.tokens, trace.title) == (words, "A title")
    assert "are read" not in printed
    check_weights(trace, models / "bert", {"input_ids": ids_of(words)})


@pytest.mark.parametrize(("name", "arguments", "count"), [
    ("bert", ["--max-tokens", 7], 7), ("bert", [], folders.PLACES), ("llama", [], 30),
    ("llama", ["--max-tokens", 29], 29),
])  # fmt: skip
def test_a_long_text_is_cut(looked, name, arguments, count):
    trace, _, printed = looked(name, "--text", f"{TEXT} " * 3, *arguments)
    around = 2 if name == "bert" else 0
    assert len(trace.tokens) == count
    assert trace.tokens[-1] == ("[SEP]" if around else (TEXT.split() * 3)[count - 1])
    assert ("are read" in printed) == (count < 30)
    if count < 30:
        assert printed.startswith(f"the first {count} of {30 + around} tokens are read\n")


def saved(model, folder):
    """A folder with a model and a tokenizer."""
    model.save_pretrained(folder)
    folders.save_tokenizer(folder, around=False)
    return folder


def test_positions_that_begin_after_that_of_the_padding(tmp_path, looked):
    numbers = folders.NUMBERS | {"pad_token_id": 1}  # so rows 0 and 1 are no token's
    config = hf.RobertaConfig(
        **folders.SPAN, **folders.WIDTHS, **numbers, max_position_embeddings=folders.PLACES
    )
    folder = saved(hf.RobertaModel(config), tmp_path / "roberta")
    trace, _, printed = looked(folder, "--text", f"{TEXT} " * 3)
    assert printed.startswith("the first 18 of 30 tokens are read\n")
    assert trace.tokens == tuple((TEXT.split() * 3)[:18])


def test_tokens_that_the_model_does_not_know(tmp_path, refused):
    numbers = folders.NUMBERS | {"vocab_size": 12}
    config = hf.LlamaConfig(**folders.SPAN, **folders.WIDTHS, **numbers)
    folder = saved(hf.LlamaForCausalLM(config), tmp_path / "few")
    assert "among the 12 that the model has rows for, got number 12, 'tired'" in refused(
        "--model", folder, "--text", TEXT)  # fmt: skip


def test_an_image(models, looked):
    trace, _, _ = looked("vit", "--image", models / "a.png")
    assert trace.tokens == ("[CLS]", *(f"{i},{j}" for i in range(4) for j in range(4)))
    assert trace.title == "vit: a.png"
    processor = hf.ViTImageProcessorPil.from_pretrained(models / "vit")
    pixels = processor(_picture(models / "a.png"), return_tensors="pt")["pixel_values"]
    check_weights(trace, models / "vit", {"pixel_values": pixels})


def _picture(path):
    from PIL import Image

    return Image.open(path)


def heard(models):
    """Features of the recording, and times of the encoder's places, 0.02 s apart."""
    extractor = hf.WhisperFeatureExtractor.from_pretrained(models / "whisper")
    features = extractor(
        _model._samples(models / "a.wav", folders.RATE), sampling_rate=folders.RATE,
        return_tensors="pt",
    )["input_features"]  # fmt: skip
    return features, tuple(f"{i / 50:.2f} s" for i in range(50))


def test_a_recording_and_what_is_written(models, looked):
    features, times = heard(models)
    cross, _, _ = looked("whisper", "--audio", models / "a.wav", "--max-tokens", 8)
    assert cross.key_tokens == times
    assert 1 < len(cross.tokens) <= 8
    assert cross.tokens[0] == "[CLS]"  # what the decoder begins with
    assert all("encoder_attn" in layer.name for layer in cross.layers)
    inputs = {"input_features": features, "decoder_input_ids": ids_of(cross.tokens)}
    check_weights(cross, models / "whisper", inputs, "cross_attentions")
    arguments = ["whisper", "--audio", models / "a.wav", "--max-tokens", 8, "--attention"]
    decoder, _, _ = looked(*arguments, "decoder")
    assert (decoder.tokens, decoder.key_tokens) == (cross.tokens, None)
    check_weights(decoder, models / "whisper", inputs, "decoder_attentions")
    encoder, _, _ = looked(*arguments, "encoder")
    assert (encoder.tokens, encoder.key_tokens) == (times, None)
    check_weights(encoder, models / "whisper", inputs, "encoder_attentions")


@pytest.mark.parametrize("attention", _model.ATTENTIONS)
def test_a_text_and_what_is_written(models, looked, attention):
    trace, _, _ = looked("t5", "--text", TEXT, "--attention", attention, "--max-tokens", 9)
    read = tuple(TEXT.split()[:9])
    model = hf.T5ForConditionalGeneration.from_pretrained(models / "t5", dtype=torch.float64)
    written = model.generate(ids_of(read), max_length=9, do_sample=False)
    words = tuple(folders.WORDS[i] for i in written[0])
    expected = {"encoder": (read, None), "decoder": (words, None), "cross": (words, read)}
    assert (trace.tokens, trace.key_tokens) == expected[attention]
    check_weights(trace, models / "t5", {"input_ids": ids_of(read), "decoder_input_ids": written},
                  f"{attention}_attentions")  # fmt: skip


def bert_as_decoder():
    read, write = (hf.BertConfig(
        **folders.SPAN, **folders.WIDTHS, vocab_size=13, max_position_embeddings=folders.PLACES,
        is_decoder=writes, add_cross_attention=writes,
    ) for writes in (False, True))  # fmt: skip
    return hf.EncoderDecoderModel(hf.EncoderDecoderConfig.from_encoder_decoder_configs(read, write))


WIDE = {
    name: x for name, x in folders.SPOKEN.items()
    if name.startswith(("d_", "encoder", "decoder", "init"))
} | folders.NUMBERS | {"max_position_embeddings": folders.PLACES}  # fmt: skip


def bart():
    return hf.BartForConditionalGeneration(hf.BartConfig(**WIDE))


def marian():
    return hf.MarianMTModel(hf.MarianConfig(**WIDE))


def with_projected_states():
    """A model whose decoder projects the encoder's states before its layers look at them."""
    model = bart()
    decoder = model.model.decoder

    def read(_, args, options):
        model.read = options["encoder_hidden_states"]

    def project(_, args, options):
        args = tuple(2 * x if x is model.read else x for x in args)
        return args, {name: 2 * x if x is model.read else x for name, x in options.items()}

    decoder.register_forward_pre_hook(read, with_kwargs=True)
    for layer in decoder.layers:
        layer.register_forward_pre_hook(project, with_kwargs=True)
    return model


@pytest.mark.parametrize("make", [
    bert_as_decoder, bart, marian, folders.t5, folders.whisper, with_projected_states,
])  # fmt: skip
def test_attention_to_the_encoder_is_told_by_what_it_reads(make):
    register()
    torch.manual_seed(0)
    model = make().eval().double()
    inputs = {"decoder_input_ids": torch.tensor([[2, 4, 5, 6, 7]])}
    if make is folders.whisper:
        inputs["input_features"] = torch.randn(1, 8, 100, dtype=torch.float64)
    else:
        inputs["input_ids"] = torch.tensor([[5, 4, 7, 6, 9]])  # as many as the queries
    model.set_attn_implementation("eager")
    with torch.no_grad():
        known = model(**inputs, output_attentions=True)
        model.set_attn_implementation("scaledot")
        own, cross = _model._kinds(model, inputs)
    for layers, weights in ((own, known.decoder_attentions), (cross, known.cross_attentions)):
        assert len(layers) == len(weights) == 2
        for layer, one in zip(layers, weights, strict=True):
            # Norms and softmax may round to float32.
            assert_close(layer.weights(), one[0], eps=EPS["float32"], len_kv=layer.len_kv)


@pytest.mark.parametrize(("which", "kinds"), [
    ("decoder", lambda own, cross: ((), own + cross)),
    ("cross", lambda own, cross: (own + cross, ())),
])  # fmt: skip
def test_a_decoder_without_such_attention(models, refused, monkeypatch, which, kinds):
    found = _model._kinds
    monkeypatch.setattr(_model, "_kinds", lambda *given: kinds(*found(*given)))
    line = refused("--model", models / "t5", "--text", TEXT, "--attention", which)
    name = "self" if which == "decoder" else "cross"
    assert f"must have {name}-attention that can be replaced, got T5ForCond" in line


def test_parts_of_characters_have_the_names_of_their_tokens():
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    names = ["Ġ", "a", "Ã", "©"]
    made = Tokenizer(BPE({name: i for i, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=made)
    ids = tokenizer("a é")["input_ids"]
    assert _model._words(tokenizer, ids) == ("a", " ", "Ã", "©")


def test_another_dtype(looked):
    trace, _, printed = looked("llama", "--text", TEXT, "--dtype", "bfloat16")
    assert ", bfloat16\n" in printed
    query = trace.layers[0].query
    assert torch.equal(torch.tensor(query).bfloat16().float(), torch.tensor(query))


def test_weights_that_are_missing_are_named(models, looked, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "partial"
    shutil.copytree(models / "bert", folder)
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.0.output.dense.bias"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _, _, printed = looked(folder, "--text", TEXT)
    assert printed.startswith(
        "not in the file, so of random values: encoder.layer.0.output.dense.bias\n"
    )


@pytest.mark.parametrize("bars", [True, False])
def test_settings_of_transformers_are_put_back(bars):
    log = hf.utils.logging
    before, had_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    (log.enable_progress_bar if bars else log.disable_progress_bar)()
    log.set_verbosity_info()
    try:
        with _load.quiet():
            assert (log.get_verbosity(), log.is_progress_bar_enabled()) == (log.ERROR, False)
        assert (log.get_verbosity(), log.is_progress_bar_enabled()) == (log.INFO, bars)
    finally:
        log.set_verbosity(before)
        (log.enable_progress_bar if had_bars else log.disable_progress_bar)()


def test_files_and_models_are_not_mixed(models, refused):
    model = ["--model", models / "llama"]
    assert "there must be INPUT or --model, got neither" in refused()
    assert "--text must come with --model, got --text, --max-tokens" in refused(
        "a.npz", "--text", "a", "--max-tokens", 3)  # fmt: skip
    assert "got INPUT, --causal, --impl" in refused(
        "a.npz", *model, "--text", "a", "--causal", "--impl", "dense")  # fmt: skip
    assert "got --scale" in refused(*model, "--text", "a", "--scale", 0)
    assert "one of --text, --image and --audio, got none" in refused(*model)
    assert "got --text and --image" in refused(*model, "--text", "a", "--image", "a.png")
    assert "--max-tokens must be at least 1" in refused(*model, "--text", "a", "--max-tokens", 0)
    assert "encoder, decoder, cross, got self" in refused(
        *model, "--text", "a", "--attention", "self")  # fmt: skip


def test_what_the_model_does_not_take(models, refused):
    model = ["--model", models / "llama"]
    assert "with a model of encoder and decoder, got LlamaForCausalLM" in refused(
        *model, "--text", "a", "--attention", "cross")  # fmt: skip
    assert "LlamaForCausalLM, which takes input_ids. Pass --text." in refused(
        *model, "--audio", models / "a.wav")  # fmt: skip
    assert "ViTModel, which takes pixel_values. Pass --image." in refused(
        "--model", models / "vit", "--text", "a")  # fmt: skip
    assert "--text must have at least one token" in refused(*model, "--text", "")
    # A byte that is no UTF-8 comes from the shell like this.
    assert r"UTF-8, got a byte or half a character, '\udcff', after 'the '" in refused(
        *model, "--text", "the \udcff")  # fmt: skip


def test_files_that_cannot_be_read(models, tmp_path, refused):
    folders.save_sound(tmp_path / "slow.wav", rate=8000)
    folders.save_sound(tmp_path / "coarse.wav", width=1)
    (tmp_path / "text.wav").write_text("no sound")
    whisper = ["--model", models / "whisper", "--audio"]
    assert "16 bits, 8,000 in a second. Convert it: ffmpeg -i FILE -ar 16000" in refused(
        *whisper, tmp_path / "slow.wav")  # fmt: skip
    assert "of 8 bits, 16,000 in a second" in refused(*whisper, tmp_path / "coarse.wav")
    assert "must be a .wav file of integers" in refused(*whisper, tmp_path / "text.wav")
    (tmp_path / "cut.wav").write_bytes((models / "a.wav").read_bytes()[: 44 + 16])
    assert "12,000 samples by its header, got 8. " in refused(*whisper, tmp_path / "cut.wav")
    assert "No such file" in refused(*whisper, tmp_path / "none.wav")
    vit = ["--model", models / "vit", "--image"]
    assert "cannot identify image file" in refused(*vit, tmp_path / "text.wav")
    assert "No such file" in refused(*vit, tmp_path / "none.png")


def test_channels_are_averaged_and_long_recordings_cut(tmp_path, models, looked):
    one = _model._samples(folders.save_sound(tmp_path / "1.wav"), folders.RATE)
    two = _model._samples(folders.save_sound(tmp_path / "2.wav", channels=2), folders.RATE)
    assert (one == two).all()
    assert abs(one).max() == pytest.approx(9000 / 2**15, rel=1e-3)
    long = folders.save_sound(tmp_path / "long.wav", seconds=1.5)
    _, _, printed = looked("whisper", "--audio", long, "--attention", "encoder")
    assert printed.startswith("the first 1 of 1.5 seconds are heard\n")


def changed(folder, target, **entries):
    """A copy of a model's folder with other entries in its configuration."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | entries
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_folders_without_a_model(models, tmp_path, refused):
    text = ["--text", TEXT]
    assert "must be a directory, or a .gguf file" in refused("--model", tmp_path / "none", *text)
    assert "must be a directory" in refused("--model", models / "a.png", *text)
    assert "a config.json, or one .gguf file, got neither" in refused("--model", models, *text)
    odd = changed(models / "llama", tmp_path / "odd", model_type="llamarama")
    line = refused("--model", odd, *text)
    assert "a configuration that transformers can read" in line
    assert "llamarama" in line
    (odd / "config.json").write_text("{")
    assert "a configuration that transformers can read" in refused("--model", odd, *text)


def test_folders_with_half_a_model(models, tmp_path, refused):
    text = ["--text", TEXT]
    folder = changed(models / "llama", tmp_path / "narrow", intermediate_size=60)
    line = refused("--model", folder, *text)
    assert "model.layers.0.mlp.down_proj.weight of (32, 64), not (32, 60)" in line
    (folder / "model.safetensors").write_bytes(b"\x10" + bytes(20))
    assert "weights that transformers can read" in refused("--model", folder, *text)
    (folder / "model.safetensors").unlink()
    assert "weights that transformers can read" in refused("--model", folder, *text)
    assert "--dtype must be one of" in refused("--model", folder, *text, "--dtype", "int8")


def test_folders_without_a_tokenizer(models, tmp_path, refused):
    for name in ("llama", "bert"):  # of BERT's transformers makes one without words
        folder = changed(models / name, tmp_path / name)
        for file in folder.glob("tokenizer*"):
            file.unlink()
        line = refused("--model", folder, "--text", TEXT)
        assert f"{name} must have the files of a tokenizer, got none of them. Save it" in line
    (tmp_path / "llama" / "vocab.txt").touch()
    line = refused("--model", tmp_path / "llama", "--text", TEXT)
    assert "a tokenizer that transformers can read, got ValueError: Could" in line
    assert "from one of: (1)" in line  # what follows a colon is told, too
    # One of characters needs no files.
    (tmp_path / "config.json").write_text('{"model_type": "canine"}')
    assert _model._tokenizer(_load.Source(tmp_path, None))("a")["input_ids"][1] == ord("a")


def test_an_unknown_class_falls_back_to_the_family(models, tmp_path, looked):
    folder = changed(models / "llama", tmp_path / "own", architectures=["OwnLlama"])
    trace, _, _ = looked(folder, "--text", TEXT)
    assert [layer.name for layer in trace.layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    check_weights(trace, models / "llama", {"input_ids": ids_of(TEXT.split())})


def test_attention_that_cannot_be_replaced(models, looked, refused, monkeypatch):
    monkeypatch.setattr(introspect, "look", None)
    with monkeypatch.context() as patch:
        patch.setattr("scaledot._watch.show", lambda *given: None)
        line = refused("--model", models / "llama", "--text", TEXT)
    assert "must be one that can be replaced, got LlamaForCausalLM" in line


def test_where_a_gguf_file_is(tmp_path, refused, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert _load.source_of(file) == _load.source_of(tmp_path) == (tmp_path, "a.gguf")
    find = _load.importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(
            _load.importlib.util, "find_spec",
            lambda name: None if name in ("gguf", "accelerate") else find(name),
        )
        line = refused("--model", file, "--text", TEXT)
    assert "gguf and accelerate must be installed" in line
    assert "pip install gguf accelerate" in line
    (tmp_path / "b.gguf").touch()
    assert "one .gguf file, got a.gguf and b.gguf" in refused("--model", tmp_path, "--text", TEXT)


@pytest.mark.parametrize(("module", "extra"), [("transformers", "hf"), ("torch", "torch")])
def test_a_missing_extra(models, refused, monkeypatch, module, extra):
    find = _load.importlib.util.find_spec
    monkeypatch.setattr(
        _load.importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    line = refused("--model", models / "llama", "--text", TEXT)
    assert f"{module} is needed here" in line
    assert f"pip install 'scaledot[{extra}]'" in line


def test_the_command_line_loads_neither_torch_nor_transformers():
    program = "import sys, scaledot.cli._app; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"
