"""``scaledot bench``: what is compared and timed, what is told, what is refused."""

import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import scaledot as sd
from cli_runs import one_line
from compare import EPS, assert_close
from scaledot import _watch
from test_plot import pixels

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
folders = pytest.importorskip("model_folders")

from scaledot.cli import _bench, _load, app  # noqa: E402

SMALL = ["--prompt-tokens", 40, "--new-tokens", 5, "--repeats", 2]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "bert", "vit", "t5"):
        folders.save_model(name, folder)
    bloom = hf.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=13)
    hf.BloomForCausalLM(bloom).save_pretrained(folder / "bloom")
    falcon = hf.FalconConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=13
    )
    hf.FalconForCausalLM(falcon).save_pretrained(folder / "falcon")
    common = folders.SPAN | folders.WIDTHS | folders.NUMBERS | {
        "num_key_value_heads": 2, "head_dim": 8
    }  # fmt: skip
    gemma = hf.Gemma2Config(**common)
    hf.Gemma2ForCausalLM(gemma).save_pretrained(folder / "gemma2")
    experts = hf.GptOssConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    hf.GptOssForCausalLM(experts).save_pretrained(folder / "gpt_oss")
    return folder


@pytest.fixture
def llama(models):
    return _load.load(_load.source_of(models / "llama"), "float32", pytest.fail)


def invoke(*arguments):
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})
    return runner.invoke(app, ["bench", *map(str, arguments)])


def succeed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def refused(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    return one_line(result.stderr)


def cells(printed, first):
    """Cells of the line of a table that begins so."""
    (line,) = [x.split() for x in printed.splitlines() if x.split()[:1] == [first]]
    return line


def test_the_table_and_the_picture_of_a_decoder(models, tmp_path, monkeypatch):
    clock = iter(range(10**6))
    now = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(_bench, "time", now)
    printed = succeed("--model", models / "llama", *SMALL, "-o", tmp_path / "a.png")
    assert printed.startswith("llama, float32, prompt of 40 tokens, ")
    # By this clock a prefill takes a second, and so do all new tokens together.
    for name in _bench.WAYS:
        row = cells(printed, name)
        assert row[:8] == [name, "40", "1.00", "5", "1.00", "6", "of", "6"]
    assert cells(printed, "eager")[8] == "0.0e+00"
    assert 0 < float(cells(printed, "scaledot")[8]) < 1e-5
    assert f"Picture: {tmp_path / 'a.png'}\n" in printed
    assert pixels(tmp_path / "a.png").ndim == 3


def test_an_encoder_has_no_decoding(models):
    printed = succeed("--model", models / "bert", "--repeats", 1, "--dtype", "bfloat16")
    assert printed.startswith(f"bert, bfloat16, prompt of {folders.PLACES} tokens, ")
    assert "decode" not in printed
    assert "last hidden states" in printed
    assert len(cells(printed, "scaledot")) == 4


def test_speeds_are_those_of_the_medians(llama):
    work = _bench.Work(llama, {"input_ids": torch.zeros(1, 30, dtype=torch.int64)}, 8)
    figures = _bench.Measured(prefill=[9.0, 3.0, 1.0], decode=[2.0, 50.0, 4.0])
    assert _bench.speeds(work, figures) == (10.0, 2.0)
    found = {"eager": _bench.Measured([2.0], [1.0]), "sdpa": figures, "scaledot": figures}
    heights = [bar.get_height() for bar in _bench._drawn("name", work, found).patches]
    assert heights == [1.5, 4.0, 1.0, 1.0, 1.0, 1.0]
    del found["sdpa"]
    drawn = _bench._drawn("name", work, found)
    assert [bar.get_height() for bar in drawn.patches] == [1.0, 1.0, 2 / 3, 0.25]
    assert drawn.get_ylabel() == "tokens per second, eager = 1"


@pytest.mark.parametrize(("name", "kind"), [
    ("gemma2", "Gemma2ForCausalLM"), ("gpt_oss", "GptOssForCausalLM"),
])  # fmt: skip
def test_models_without_sdpa_are_measured_beside_eager(models, name, kind):
    printed = succeed("--model", models / name, *SMALL, "--repeats", 1)
    assert printed.startswith(f"transformers has no sdpa for {kind}: it is left out, and")
    assert "× eager" in printed
    assert "× sdpa" not in printed
    rows = [x.split()[0] for x in printed.splitlines() if x.split()[5:7] == ["6", "of"]]
    assert rows == ["eager", "scaledot"]
    assert cells(printed, "eager")[8] == "0.0e+00"
    allowed = re.search(r"a\s+difference\s+of\s+(\S+)\s+is\s+rounding", printed)[1]
    assert 0 < float(cells(printed, "scaledot")[8]) <= float(allowed) < 1e-4


def test_all_follow_the_tokens_of_generate(llama):
    prompt = torch.randint(1, 13, (1, 40), generator=torch.Generator().manual_seed(3))
    work, passes, forward = _bench.Work(llama, {"input_ids": prompt}, 5), [], llama.forward

    def recording(input_ids, **options):
        passes.append((llama.config._attn_implementation, input_ids[0].tolist()))
        return forward(input_ids=input_ids, **options)

    recording.__signature__ = _bench.inspect.signature(forward)
    llama.forward = recording
    llama.set_attn_implementation("sdpa")
    told = []
    found = _bench.measure(work, 2, lambda: told.append(len(passes)))
    del llama.forward
    assert llama.config._attn_implementation == "sdpa"
    llama.set_attn_implementation("eager")
    written = llama.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    steps = [prompt[0].tolist(), *([token] for token in written[0, 40:].tolist())]
    # Comparing once, then measuring twice, in turns.
    assert passes == [(name, step) for _ in range(3) for name in _bench.WAYS for step in steps]
    assert told == [6 * i for i in range(1, 10)]
    for figures in found.values():
        assert len(figures.prefill) == len(figures.decode) == 2
        assert figures.same == 6
        assert figures.difference <= figures.allowed < 1e-4


def test_tokens_to_follow_are_followed(llama):
    work = _bench.Work(llama, {"input_ids": torch.arange(1, 13)[None]}, 3)
    follow = torch.tensor([7, 1, 5])
    with torch.no_grad():
        answers, fed, _, _ = _bench._passed(work, follow)
        whole = llama(torch.cat([torch.arange(1, 13), follow])[None]).logits[0, 11:]
    assert torch.equal(fed, follow)
    assert_close(answers, whole, eps=EPS["float32"], len_kv=15)


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the latter without sdpa
def test_wrong_answers_are_not_timed(models, name, monkeypatch):
    def deaf(module, query, key, value, attention_mask, **options):
        _watch.show(module, query, key, {})
        return value[:, :, :1].repeat(1, 2, query.shape[2], 1).transpose(1, 2), None

    register = hf.AttentionInterface.register
    own = hf.AttentionInterface()["scaledot"]
    model = _load.load(_load.source_of(models / name), "float32", pytest.fail)
    work = _bench.Work(model, {"input_ids": torch.arange(12)[None]}, 2)
    passed, count = _bench._passed, []
    monkeypatch.setattr(
        _bench, "_passed", lambda *given: count.append(1) or passed(*given)
    )
    register("scaledot", deaf)
    try:
        with pytest.raises(ValueError, match="answers of scaledot must be those of eager"):
            _bench.measure(work, 2)
    finally:
        register("scaledot", own)
    assert len(count) == 3
    assert model.config._attn_implementation == "scaledot"
    assert not model.get_input_embeddings()._forward_hooks


def test_pixels_are_what_is_rounded_otherwise(models, monkeypatch):
    vit = _load.load(_load.source_of(models / "vit"), "float32", pytest.fail)
    monkeypatch.setattr(_bench, "ways", lambda model: ("eager", "scaledot"))
    monkeypatch.setattr(vit, "get_input_embeddings", pytest.fail)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    work = _bench.Work(vit, {"pixel_values": pixels})
    vit.set_attn_implementation("eager")
    with torch.no_grad():
        exact = _bench._passed(work, None)[0]
        difference = (_bench._nudged(work, None) - exact).abs().max()
    assert 0 < difference < 100 * EPS["float32"] * exact.abs().max()
    assert _bench.measure(work, 1)["scaledot"].allowed > 2 * difference
    assert torch.equal(work.inputs["pixel_values"], pixels)


def test_models_without_sdpa_and_without_embeddings_are_refused(models, monkeypatch):
    def fail(self):
        raise NotImplementedError

    monkeypatch.setattr(hf.Gemma2ForCausalLM, "get_input_embeddings", fail)
    line = refused("--model", models / "gemma2", *SMALL)
    assert "have input embeddings for answers to be compared without sdpa, got Gemma2ForC" in line


def test_answers_that_are_not_numbers_are_told(models, llama, tmp_path, monkeypatch):
    state = {n: x * torch.nan if n == "model.norm.weight" else x
             for n, x in llama.state_dict().items()}  # fmt: skip
    llama.save_pretrained(tmp_path, state_dict=state)
    line = refused("--model", tmp_path, *SMALL)
    assert "must be finite numbers, got 78 of 78 with eager that are not" in line  # 6 × 13
    assert "Check the weights" in line
    passed = _bench._passed

    def spoilt(work, follow):
        answers, *rest = passed(work, follow)
        if work.model.config._attn_implementation == "scaledot":
            answers[1, 2] = torch.inf
        return answers, *rest

    monkeypatch.setattr(_bench, "_passed", spoilt)
    assert "got 1 of 78 with scaledot that are not. Nothing was timed; with eager they are. " in (
        refused("--model", models / "llama", *SMALL))  # fmt: skip


def test_a_prompt_that_does_not_fit_into_memory(models, monkeypatch):
    # More than a process can have, whatever the system promises.
    monkeypatch.setattr(_bench, "_passed", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    line = refused("--model", models / "llama", *SMALL)
    assert "a prompt of 40 tokens must fit into memory, got 1,152,921,504,606,846,976 bytes" in line
    assert "eager has matrices of 40 × 40: pass fewer --prompt-tokens" in line

    def fail(*_):
        raise RuntimeError("another failure")

    monkeypatch.setattr(_bench, "_passed", fail)
    with pytest.raises(RuntimeError, match="another failure"):
        _bench.bench(models / "llama", 40, 5)


@pytest.mark.parametrize("command", [["bench"], ["inspect", "--text", folders.TEXT]])
def test_a_model_that_does_not_fit_into_memory(models, monkeypatch, command):
    monkeypatch.setattr(
        hf.LlamaForCausalLM, "from_pretrained",
        lambda *_, **__: torch.empty(2**60, dtype=torch.uint8),
    )
    result = CliRunner().invoke(app, [*command, "--model", str(models / "llama")])
    assert result.exit_code == 2
    line = one_line(result.stderr)
    assert "the model must fit into memory, got 1,152,921,504,606,846,976 bytes asked" in line
    assert "Take a smaller one" in line


def test_models_that_compute_their_own_attention_are_not_measured(models, llama, monkeypatch):
    line = refused("--model", models / "bloom", *SMALL)
    assert re.search(r"attention transformers can change to \w+, got BloomForCausalLM", line)
    line = refused("--model", models / "falcon", *SMALL)
    assert "transformers can exchange, got FalconForCausalLM, which knows its own alone" in line
    # Nor where the implementation is set and another computes.
    own = hf.AttentionInterface()["scaledot"]
    hf.AttentionInterface.register("scaledot", hf.AttentionInterface()["sdpa"])
    try:
        with pytest.raises(ValueError, match="can change to scaledot, got LlamaForCausalLM"):
            _bench.measure(_bench.Work(llama, {"input_ids": torch.arange(12)[None]}, 2), 2)
    finally:
        hf.AttentionInterface.register("scaledot", own)


def test_the_numbers_of_threads(models):
    before = sd.get_num_threads(), torch.get_num_threads()
    sd.set_num_threads(2)
    torch.set_num_threads(2)
    try:
        printed = succeed("--model", models / "bert", "--repeats", 1, "--threads", 1)
        assert "1 of torch's threads, 1 of scaledot's" in printed
        assert (sd.get_num_threads(), torch.get_num_threads()) == (2, 2)
    finally:
        sd.set_num_threads(before[0])
        torch.set_num_threads(before[1])


def test_a_prompt_fits_the_model(models):
    model = hf.BertLMHeadModel(hf.BertConfig(
        **folders.SPAN, **folders.WIDTHS, vocab_size=13, max_position_embeddings=70,
        is_decoder=True,
    ))  # fmt: skip
    work = _bench._work(model, None, None)
    assert (work.inputs["input_ids"].shape, work.new_tokens) == ((1, 6), 64)
    assert _bench._work(model, 60, 10).inputs["input_ids"].shape == (1, 60)
    with pytest.raises(ValueError, match="must fit into the 70 places of the model, got 61 and 10"):
        _bench._work(model, 61, 10)
    with pytest.raises(ValueError, match="got 0 and 70"):
        _bench._work(model, None, 70)
    # RoBERTa's positions begin after that of the padding.
    model = hf.RobertaModel(hf.RobertaConfig(
        **folders.SPAN, **folders.WIDTHS, vocab_size=13, max_position_embeddings=70, pad_token_id=1
    ))  # fmt: skip
    assert _bench._work(model, None, None).inputs["input_ids"].shape == (1, 68)


def test_refusals(models, tmp_path):
    llama = ["--model", models / "llama"]
    for name in ("--prompt-tokens", "--new-tokens", "--repeats"):
        assert f"{name} must be at least 1, got 0" in refused(*llama, name, 0)
    assert "--threads must be at least 1" in refused(*llama, "--threads", 0)
    assert "must end in .png or .svg" in refused(*llama, "-o", tmp_path / "a.pdf")
    (tmp_path / "a.png").touch()
    assert "replace it with --force" in refused(*llama, "-o", tmp_path / "a.png")
    for name in ("vit", "t5"):
        line = refused("--model", models / name)
        assert re.search("must be a decoder, or an encoder of text, got (ViT|T5)", line)
    assert "a model that writes, got BertModel" in refused(
        "--model", models / "bert", "--new-tokens", 3)  # fmt: skip
    assert "must be a directory" in refused("--model", tmp_path / "none")
