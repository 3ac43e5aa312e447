"""scaledot behind the neutral interface of `attention_cases`.

Gradients come from `attention_vjp`, or from PyTorch, which differentiates through `attention`.
"""

import numpy as np

import scaledot as sd
from attention_cases import Unsupported
from scaledot._paged import paged_state
from scaledot._spec import Options

GRADIENTS = {"dq": "query", "dk": "key", "dv": "value", "dbias": "bias", "dsinks": "sinks"}


def candidate(op, want=("out",), impl="auto", library="numpy", **arguments):
    """Run one case by one implementation and return the results it wants, as NumPy arrays.

    ``library`` is the one that takes gradients.
    """
    if op == "set_threads":
        sd.set_num_threads(arguments["n"])
        return {}
    run = {
        "attention": attention, "varlen": varlen, "merge": merge, "decode": decode, "paged": paged,
        "ring": ring,
    }.get(op)  # fmt: skip
    if run is None:
        raise Unsupported(f"{op} is not part of this version")
    if op == "merge":
        return run(want, arguments)
    arguments = {**arguments, "impl": impl}
    return run(want, arguments) if op == "decode" else run(want, arguments, library)


def paged(want, arguments, library):
    names = ("q", "k_pages", "v_pages", "block_table", "kv_lens")
    given = [arguments.pop(name) for name in names]
    options = {"causal": False} | arguments
    return {
        "out": sd.paged_attention(*given, **options),
        "lse": paged_state(*given, Options(**options)).lse,
    }


def ring(want, arguments, library):
    """Each rank with its shard, in threads of this process; tensors of PyTorch."""
    try:
        import torch

        import ring_calls
    except ImportError as error:
        raise Unsupported("rings need torch") from error
    given = {long: arguments.pop(n) for n, long in (("q", "query"), ("k", "key"), ("v", "value"))}
    world, layout, dout = (arguments.pop(name) for name in ("world", "scheme", "dout"))
    shards = ring_calls.shards_of(given["query"].shape[-2], world, layout)

    def work(group):
        rows = shards[group.rank]
        share = ring_calls.as_tensors(ring_calls.own_share(given, rows, rows)) | arguments
        grad_out = torch.tensor(dout[..., rows, :])
        return ring_calls.differentiate(
            sd.ring_attention, share, grad_out, group=group, layout=layout
        )

    found = ring_calls.Found(given, sd.InProcessRing(world).run(work), shards, shards)
    results = {"out": found.out, "dq": found.grads["query"], "dk": found.grads["key"],
               "dv": found.grads["value"]}  # fmt: skip
    return {name: x.numpy() for name, x in results.items()}


def merge(want, arguments):
    states = [sd.State(*pair) for pair in zip(arguments["outs"], arguments["lses"], strict=True)]
    total = states[0]
    for state in states[1:]:
        total = sd.merge(total, state)
    return {"out": total.out, "lse": total.lse}


def decode(want, arguments):
    """Feed tokens through a cache of fixed capacity that holds nan behind the valid keys."""
    query, key, value = (arguments.pop(name) for name in "qkv")
    steps, capacity = arguments.pop("steps"), arguments.pop("capacity")
    cached = [
        np.full((*x.shape[:-2], capacity, x.shape[-1]), np.nan, x.dtype) for x in (key, value)
    ]
    outputs, end = [], 0
    for count in steps:
        new = slice(end, end + count)
        end += count
        for cache, x in zip(cached, (key, value), strict=True):
            cache[..., new, :] = x[..., new, :]
        outputs.append(
            sd.attention(query[..., new, :], *cached, causal=True, kv_len=end, **arguments)
        )
    return {"out": np.concatenate(outputs, axis=-2)}


def attention(want, arguments, library):
    dout, dlse = (arguments.pop(name, None) for name in ("dout", "dlse"))
    names = {"q": "query", "k": "key", "v": "value", "kv_lens": "kv_len"}
    options = {names.get(name, name): x for name, x in arguments.items()}
    align = options.pop("align", "bottom_right")
    q_lens = options.pop("q_lens", None)
    if align == "top_left":
        options["q_offset"] = 0
    elif q_lens is not None:
        len_kv = options.get("kv_len", options["key"].shape[-2])
        options["q_offset"] = np.asarray(len_kv) - np.asarray(q_lens)
    if q_lens is not None:
        rows = np.arange(options["query"].shape[-2])
        ids = np.where(rows < np.asarray(q_lens)[:, None], 0, -1)
        keys = np.zeros((len(ids), options["key"].shape[-2]), dtype=int)
        options["segment_ids"] = (ids, keys)
    q_pos, k_pos = options.pop("q_pos", None), options.pop("k_pos", None)
    if q_pos is not None:
        assert options.pop("causal")
        options["mask_mod"] = lambda batch, head, i, j: k_pos[j] <= q_pos[i]
        options["q_offset"] = 0
    if not len(options["query"]) and dout is None:
        want = ("out", "lse")
    if set(want) & set(GRADIENTS):
        take = with_gradients if library == "numpy" else with_gradients_of_torch
        return take(options, want, dout, dlse)
    results = {"out": sd.attention(**options), "lse": lse_of(options)}
    if "weights" in want:
        shaping = {n: x for n, x in options.items() if n not in ("value", "dropout", "seed")}
        results["weights"] = sd.attention_weights(**shaping)
    return results


def lse_of(options):
    """Log-sum-exp of a call, sinks included."""
    options = dict(options)
    sinks = options.pop("sinks", None)
    if options.get("q_offset") is None:  # what attention resolves None to
        len_q, len_kv = options["query"].shape[-2], options["key"].shape[-2]
        valid = options.get("kv_len")
        options["q_offset"] = (len_kv if valid is None else valid) - len_q
    state = sd.attention_state(**options)
    if sinks is None:
        return state.lse
    sink = sinks[:, None] if isinstance(sinks, np.ndarray) else sinks.reshape(-1, 1)
    return sd.merge(state, sd.State(sink[..., None] * 0, sink)).lse


def with_gradients(options, want, dout, dlse):
    out, pullback = sd.attention_vjp(**options)
    grads = pullback(np.zeros_like(out) if dout is None else dout, dlse)
    results = {"out": out, "lse": pullback.lse}
    return results | {name: getattr(grads, GRADIENTS[name]) for name in set(want) & set(GRADIENTS)}


def with_gradients_of_torch(options, want, dout, dlse):
    try:
        import torch
    except ImportError as error:
        raise Unsupported("gradients need torch") from error
    tensors = {
        name: torch.tensor(np.ascontiguousarray(x), requires_grad=x.dtype.kind == "f")
        for name, x in options.items()
        if isinstance(x, np.ndarray)
    }
    options = {**options, **tensors}
    results = {"out": sd.attention(**options), "lse": lse_of(options)}
    loss = 0
    if dout is not None:
        loss = loss + (results["out"] * torch.tensor(np.ascontiguousarray(dout))).sum()
    if dlse is not None:
        loss = loss + (results["lse"] * torch.tensor(np.ascontiguousarray(dlse))).sum()
    loss.backward()
    for name in set(want) & set(GRADIENTS):
        tensor = tensors[GRADIENTS[name]]
        results[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return {name: x.detach().numpy() for name, x in results.items()}


def varlen(want, arguments, library):
    dout = arguments.pop("dout", None)
    query, key, value = (arguments.pop(n) for n in "qkv")
    starts = arguments.pop("cu_q"), arguments.pop("cu_k")
    if dout is not None:
        take = varlen_with_gradients if library == "numpy" else varlen_with_gradients_of_torch
        return take(query, key, value, *starts, dout, arguments)
    return {
        "out": sd.varlen_attention(query, key, value, *starts, **arguments),
        "lse": varlen_lse(query, key, value, *starts, arguments),
    }


def varlen_lse(query, key, value, cu_q, cu_k, options):
    parts = []
    for s in range(len(cu_q) - 1):
        rows, columns = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        q, k, v = (x.swapaxes(0, 1) for x in (query[rows], key[columns], value[columns]))
        parts.append(sd.attention_state(q, k, v, q_offset=k.shape[1] - q.shape[1], **options).lse)
    return np.concatenate(parts, axis=1)


def varlen_with_gradients(query, key, value, cu_q, cu_k, dout, options):
    out, pullback = sd.varlen_attention_vjp(query, key, value, cu_q, cu_k, **options)
    grads = pullback(dout)
    results = {"out": out, "dq": grads.query, "dk": grads.key, "dv": grads.value}
    return dict(results, lse=varlen_lse(query, key, value, cu_q, cu_k, options))


def varlen_with_gradients_of_torch(query, key, value, cu_q, cu_k, dout, options):
    try:
        import torch
    except ImportError as error:
        raise Unsupported("gradients need torch") from error
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (query, key, value))
    out = sd.varlen_attention(q, k, v, cu_q, cu_k, **options)
    (out * torch.tensor(dout)).sum().backward()
    results = {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    results = {name: x.detach().numpy() for name, x in results.items()}
    return dict(results, lse=varlen_lse(query, key, value, cu_q, cu_k, options))
