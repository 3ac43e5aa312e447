"""Bugs to be planted in the kernels and around them; each is compiled anew, which takes seconds.

Most are in what every processor runs, and are found by the kernel that compiles fastest: that of
weights, or one in float64.
"""

from __future__ import annotations

from planted import Mutant, in_package

TILES = "tiles::options_over_several_tiles"
PARTS = "decode::options_over_several_parts"
EDGES = "decode::edges_of_tiles_parts_and_vectors[float64]"
WEIGHTS = "tiles::weights_over_several_tiles"
ROWS = "tiles::weights_of_rows_apart"
ODD = "tiles::odd_values_reach_who_sees_them"
ODD_PARTS = "decode::odd_values_reach_who_sees_them"


def kernel(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Return a mutant of src/scaledot/_kernels."""
    return in_package(f"kernel-{name}", f"_kernels/{file}", old, new, *tests)


KERNELS = (
    # Numbers
    kernel("power-of-two", "simd.py", "5.550332471162809e-2", "5.56e-2",
           "tiles::weights_at_edges[float32-127]"),
    kernel("tanh-sign", "softmax.py",
           'far = simd.call(b, f"llvm.copysign.{v.suffix}", v.vector, far, x)', "pass",
           f"{WEIGHTS}[softcap, bias]"),
    kernel("long-sums", "tile.py", "DEPTH = 64", "DEPTH = 1024",
           "kernels::long_sums_over_few_keys_keep_the_rule[40-512]"),
    kernel("float16-subnormal-flushed", "pack.py",
           "np.uint32(np.rint(abs(value) * np.float32(2.0**24)))", "np.uint32(0)",
           "decode::results_are_rounded_once_to_nearest[4-float16-2e-05]"),
    kernel("float16-without-infinity", "pack.py", "np.uint32(0x477FF000)", "np.uint32(0x7F800000)",
           "decode::results_are_rounded_once_to_nearest[4-float16-20000.0]"),
    kernel("bfloat16-truncated", "pack.py", "np.uint32(x + np.uint32(0x7FFF) + (",
           "np.uint32(x + np.uint32(0) * (",
           "decode::results_are_rounded_once_to_nearest[4-bfloat16-1.0]"),
    # Softmax
    kernel("forgets-to-rescale-sums", "softmax.py",
           "v.store(b, p_sum, first, b.fmul(v.load(b, p_sum, first), a))", "pass",
           "tiles::edges_of_tiles_and_vectors[float64-257]"),
    kernel("forgets-to-rescale-values", "matmul.py", "v.fma(bd, old, factors[n], sums[r * nr + n])",
           "bd.fadd(old, sums[r * nr + n])", "tiles::edges_of_tiles_and_vectors[float64-257]"),
    kernel("nothing-seen-yet", "softmax.py", 'b.fcmp_ordered("==", old, new), v.const(1.0), a)',
           'b.fcmp_ordered("==", old, v.const(2.5)), v.const(1.0), a)',
           f"{TILES}[causal from inside a tile]"),
    # Which keys are seen
    kernel("causal-off-by-one", "tile.py", "p + call.right + 1))", "p + call.right))",
           f"{WEIGHTS}[causal from inside a tile]"),
    kernel("window-off-by-one", "tile.py", "max(0, p - call.left)", "max(0, p - call.left + 1)",
           f"{WEIGHTS}[window]"),
    kernel("kv_len-in-a-tile", "forward.py",
           "end = clip(load_int64(call.kv_count + 8 * entry) - tile, 0, BLOCK_KV)",
           "end = BLOCK_KV", f"{WEIGHTS}[kv_len, q_offset]"),
    kernel("diagonal-computed-whole", "forward.py", "<= first and top - tile >= last", "<= first",
           f"{WEIGHTS}[causal]"),
    kernel("bytes-of-another-key", "forward.py",
           "scratch.scores + size(kind) * low * span + column, span, high - low",
           "scratch.scores + size(kind) * first * span + column, span, high - low",
           f"{WEIGHTS}[mask, window]"),
    kernel("mask-of-first-queries", "visible.py", "target + j * span + first, span)",
           "target + j * span, span)", f"{WEIGHTS}[mask]"),
    kernel("mask-counts-as-full", "visible.py", "every &= flag", "every |= flag",
           f"{WEIGHTS}[mask]"),
    kernel("mask_mod-forgets-mask", "visible.py", "seen[i] &= kept[i]", "seen[i] = kept[i]",
           f"{WEIGHTS}[mods, mask]"),
    kernel("negative-segments", "visible.py", "(q[i] == mine) & (mine >= 0)", "q[i] == mine",
           f"{WEIGHTS}[negative segments]"),
    kernel("segments-that-hide-nothing", "visible.py", "hidden |= k[j] < 0", "pass",
           f"{WEIGHTS}[negative segments]"),
    kernel("block-of-first-query", "visible.py", "block = (call.first_row + row + i)",
           "block = (call.first_row + row)", f"{WEIGHTS}[block_mask]"),
    kernel("blocks-of-other-rows", "visible.py", "row += call.first_row", "pass",
           f"{ROWS}[block_mask]"),
    kernel("classes-of-all-heads", "visible.py", "call.num_heads if call.class_head else 1",
           "call.num_heads", f"{WEIGHTS}[mod of entries]"),
    # Scores
    kernel("bias-of-keys-once", "tile.py", "step = 0 if call.bias_row == 0 else BLOCK_KV",
           "step = BLOCK_KV", f"{WEIGHTS}[bias of keys]"),
    kernel("bias-excludes-nothing", "tile.py",
           'b.select(b.fcmp_ordered("==", term, low), low, total)', "total",
           f"{WEIGHTS}[bias that excludes]"),
    kernel("sum-of-finite-terms-excludes", "tile.py",
           "lowest if total == -np.inf and s != -np.inf else total", "total",
           "attention::named_case[numpy-kernels-bias_falls]"),
    kernel("alibi-signed", "tile.py", "abs(number(kind, float(distance + i - j)))",
           "number(kind, float(distance + i - j))", f"{WEIGHTS}[alibi]"),
    kernel("options-at-another-key", "forward.py", "count, tile + first, high - first, start",
           "count, tile + low, high - first, start", f"{WEIGHTS}[bias of half precision]"),
    kernel("score_mod-of-first-key", "tile.py", "entry, head, q_pos, kv_pos + j, count)",
           "entry, head, q_pos, kv_pos, count)", f"{WEIGHTS}[score_mod]"),
    # Forward
    kernel("swaps-heads-of-a-group", "forward.py", "head // call.group_size\n",
           "head % (call.num_heads // call.group_size)\n",
           f"{TILES}[causal from inside a tile]"),
    kernel("dropout-of-one-key", "options.py", "low_word(kv_pos + j)",
           "low_word(kv_pos)", "decode::dropout_over_several_parts[9]"),
    kernel("odd-values-multiplied", "pack.py", "marks[j] = _clear(kind, place, valid)",
           "marks[j] = 0", f"{ODD}[mask-float64-5]"),
    kernel("odd-values-of-last-tile", "forward.py", "if odd and met == 0:", "if odd:",
           f"{ODD}[mask-float64-5]"),
    kernel("odd-values-in-place", "forward.py",
           "if plain and all_finite(kind, source, call.v_row, count, width):", "if plain:",
           f"{ODD}[mask-float64-16]"),
    # Decode
    kernel("part-without-its-last-tile", "decode.py", "min(call.len_kv, (part + 1) * length)",
           "min(call.len_kv, (part + 1) * length - 128)", EDGES),
    kernel("parts-weigh-the-same", "decode.py", "weight = number(kind, math.exp(float(lse - top)))",
           "weight = number(kind, 1.0)", EDGES),
    kernel("merged-too-early", "decode.py", "1) == parts - 1:", "1) == parts - 2:", EDGES),
    kernel("decode-of-last-query", "decode.py",
           "clip(end_key(call, entry, row) - tile, 0, end)",
           "clip(end_key(call, entry, call.len_q - 1) - tile, 0, end)", EDGES),
    kernel("decode-swaps-heads", "decode.py", "key_head * group + r // call.len_q",
           "key_head * group + r % group", EDGES),
    kernel("decode-rescales-no-values", "rows.py",
           "v.fma(b, v.load(b, row, place), a, sums[r * columns + c])",
           "b.fadd(v.load(b, row, place), sums[r * columns + c])", EDGES),
    kernel("decode-half-of-the-width", "decode.py", "c += wide if whole else 2 * lanes(kind)",
           "c += wide",
           "decode::who_sees_one_key_gets_its_value_to_the_bit[float64-64]"),
    kernel("decode-odd-values-multiplied", "decode.py",
           "careful = not is_finite(kind, room.acc, rows * width)", "careful = False",
           f"{ODD_PARTS}[float64-32]"),
    kernel("decode-odd-values-seen-by-all", "decode.py", "BLOCK_KV)[j] != -INF:",
           "BLOCK_KV)[j] != INF:", f"{ODD_PARTS}[float64-5]"),
    kernel("decode-dropout-of-a-part", "options.py",
           "line, start = numbers(kind, weights, keys), low_word(kv_pos)",
           "line, start = numbers(kind, weights, keys), low_word(kv_pos % 1024)",
           "decode::dropout_over_several_parts[3]"),
    # Weights
    kernel("weights-without-sinks", "weights.py",
           "total += number(kind, math.exp(float(sink - shift)))", "pass", f"{WEIGHTS}[sinks]"),
    kernel("weights-forget-last-keys", "weights.py", "end[:rest] = tail", "pass",
           "tiles::weights_at_edges[float32-17]"),
    kernel("subnormal-weights", "rows.py",
           'b.select(b.fcmp_ordered("<", x, smallest), v.const(0.0), x)', "x",
           "tiles::no_weight_is_subnormal[float32]"),
    # Mods
    kernel("mod-of-shifted-arguments", "mods.py", 'first = 1 if name == "score_mod" else 0',
           "first = 1", f"{WEIGHTS}[mod of entries]"),
    kernel("mask_mod-of-first-query", "mods.py", "] = mod(batch, head, q_pos + i,",
           "] = mod(batch, head, q_pos,", f"{WEIGHTS}[mod of distance]"),
    kernel("zeros-of-both-signs-are-one", "closures.py", "Leaf((kind, x.hex()), x)",
           "Leaf((kind, x), x)", "mods_cache::equal_numbers_of_other_kinds_are_told_apart"),
    kernel("copies-not-current", "closures.py", "return None if dtype.isnative else",
           "return None if not dtype.isnative else", "mods_cache::changes_in_place_are_seen"),
    # The bridge, and which implementation is taken
    in_package("mod-classes-beside-offsets", "_bridges/cpu.py",
               "mod.uses_batch or max(np.size(x) for x in (terms.q_start, terms.kv_start)) > 1",
               "mod.uses_batch", f"{WEIGHTS}[mod beside offsets]"),
    in_package("rows-taken-for-neighbours", "_bridges/cpu.py",
               "np.flatnonzero(np.diff(rows) != 1)", "np.flatnonzero(np.diff(rows) == 0)",
               f"{ROWS}[alibi_slopes]"),
    in_package("rows-from-position-0", "_bridges/cpu.py",
               "_per_entry(terms.q_start + _first_row(problem), spec)",
               "_per_entry(terms.q_start, spec)", f"{ROWS}[causal]"),
    in_package("kernel-dropout-not-rescaled", "_bridges/cpu.py",
               "1 / (1 - spec.dropout) if spec.dropout < 1 else 0.0", "1.0",
               "decode::dropout_over_several_parts[3]"),
    in_package("packed-queries-top-left", "_packed.py",
               "q_start=entries(group.kv_count - group.q_count)",
               "q_start=entries(0 * group.q_count)", "attention::varlen[numpy]"),
    in_package("error-of-a-mod-hidden", "_choice.py",
               "return _blockwise.blockwise(complete(problem))  # shows",
               "raise  # shows", "errors::a_mod_that_raises[attention-decode]"),
    in_package("bytes-in-another-order", "_choice.py", "swapped = any(not x.dtype.isnative",
               "swapped = any(False and not x.dtype.isnative",
               "errors::arguments[attention-impl-bias-the bytes of an array are not in this"
               " machine's order]"),
    in_package("kernels-without-gradient", "_choice.py",
               'return "a tensor requires a gradient"', 'return ""',
               "autograd::auto_differentiates"),
)
