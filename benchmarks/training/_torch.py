"""Gradients by PyTorch of a function of query, key, value and, where there is one, bias."""

from __future__ import annotations

import torch

from peers._tensors import to_numpy


def pulled(case, x, attend):
    """Build the call of a case: ``attend`` and what is asked of its gradients."""
    grad_out = x.pop("grad_out")
    inputs = {name: x[name].requires_grad_() for name in case.shapes}

    def call():
        out, given = attend(**inputs), list(inputs.values())
        twice = case.passes == "double"
        grads = torch.autograd.grad(out, given, grad_out, create_graph=twice)
        if not twice:
            return out.detach(), *grads
        return torch.autograd.grad(sum(g.square().sum() for g in grads) / 2, given)

    def named(results):
        found = {n: to_numpy(r) for n, r in zip(case.results, results, strict=True)}
        return found | ({"kept": kept(inputs, attend)} if case.dropout else {})

    return call, named


def kept(inputs, attend):
    """Which weights of the last head dropout leaves."""
    query, key = inputs["query"].detach(), inputs["key"].detach()
    one = torch.eye(key.shape[-2]).expand(*key.shape[:-1], -1)
    return to_numpy(attend(torch.zeros_like(query), key, one)[-1, -1]) > 0
