"""Bugs to be planted in all but the kernels, and what a planted bug is."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug: ``new`` in place of ``old``, which occurs once in ``file``; ``tests`` find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def in_package(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Return a mutant of src/scaledot with tests named from their file, without ``test_``."""
    ids = tuple("tests/test_" + test.replace("::", ".py::test_", 1) for test in tests)
    return Mutant(name, f"src/scaledot/{file}", old, new, ids)


def by_case(name: str, file: str, old: str, new: str, *cases: str) -> Mutant:
    """Return a mutant that named cases of attention find, such as ``dense-causal``."""
    ids = (f"attention::named_case[numpy-{case}]" for case in cases)
    return in_package(name, file, old, new, *ids)


def by_gradients(name: str, file: str, old: str, new: str, *cases: str) -> Mutant:
    """Return a mutant that gradients of named cases find, such as ``dense-causal-float32``."""
    ids = (f"gradients::named_case[{case}]" for case in cases)
    return in_package(name, file, old, new, *ids)


PACKAGE = (
    # From a product to a score
    by_case(
        "scale-forgotten", "_scores.py",
        "score = product * scale",
        "score = product", "dense-plain",
    ),
    by_case(
        "scale-without-root", "_spec.py",
        "scale = 1 / math.sqrt(d_k) if d_k else 0.0",
        "scale = 1 / d_k if d_k else 0.0", "dense-plain",
    ),
    by_case(
        "scale-zero-is-default", "_spec.py",
        "if options.scale is not None:",
        "if options.scale:", "dense-scale_zero",
    ),
    by_case(
        "softcap-after-bias", "_reference.py",
        """\
    before = _scores.logit(scores, spec.scale, spec.softcap, None, None, None, xp.tanh)
    bias = _finite_bias(xp, terms.bias, seen, scores.dtype)
    scores = _scores.logit(before, 1.0, None, bias, terms.slopes, distance, xp.tanh)
""",
        """\
    before = _scores.logit(scores, spec.scale, None, None, None, None, xp.tanh)
    before = before + _finite_bias(xp, terms.bias, seen, scores.dtype)
    scores = _scores.logit(before, 1.0, spec.softcap, None, terms.slopes, distance, xp.tanh)
""",
        "dense-bias_softcap_sinks_segments",
    ),
    by_case(
        "alibi-sign", "_scores.py",
        "score = score - slope * distance",
        "score = score + slope * distance", "dense-alibi",
    ),
    by_case(
        "alibi-signed-distance", "_reference.py",
        "xp.abs(q_pos - kv_pos)",
        "(q_pos - kv_pos)", "dense-chunk_alibi_window_dropout",
    ),
    in_package(
        "bias-overflows", "_reference.py",
        "bounded = xp.clip(bias, limits.min, limits.max)",
        "bounded = bias", "attention::bias_beyond_the_range_of_float32[dense]",
    ),
    by_case(
        "sum-of-finite-terms-excludes", "_reference.py",
        "return xp.where(fell, xp.full_like(scores[..., :1], xp.finfo(scores.dtype).min), scores)",
        "return scores", "dense-bias_falls",
    ),
    # Which keys are seen
    by_case(
        "causal-off-by-one", "_masks.py",
        "(kv_pos - q_pos <= right)",
        "(kv_pos - q_pos < right)", "dense-causal",
    ),
    by_case(
        "window-swapped", "_reference.py",
        "for x in (spec.left, spec.right))",
        "for x in (spec.right, spec.left))", "dense-window_both",
    ),
    in_package(
        "kv_len-ignored", "_spec.py",
        "kv_end=None if kv_len is None else kv_offset + kv_len",
        "kv_end=None if kv_len is None else kv_offset + spec.len_kv",
        "determinism::positions_beyond_32_bits[dense-kv_len-2147483645]",
    ),
    in_package(
        "kv_len-from-position-0", "_spec.py",
        "kv_end=None if kv_len is None else kv_offset + kv_len",
        "kv_end=kv_len", "determinism::positions_beyond_32_bits[dense-kv_len-2147483645]",
    ),
    by_case(
        "mask-inverted", "_reference.py",
        "conditions.append(terms.mask)",
        "conditions.append(~terms.mask)", "dense-mask_key",
    ),
    by_case(
        "minus-infinity-does-not-exclude", "_reference.py",
        "conditions.append(terms.bias != -math.inf)",
        "pass", "dense-bias_excludes",
    ),
    by_case(
        "lowest-number-excludes", "_reference.py",
        "conditions.append(terms.bias != -math.inf)",
        "conditions.append(terms.bias > -1e38)", "dense-bias_minimum",
    ),
    by_case(
        "negative-segments-seen", "_masks.py",
        "(q_segment == kv_segment) & (kv_segment >= 0)",
        "q_segment == kv_segment", "dense-segments_negative",
    ),
    by_case(
        "block_mask-transposed", "_reference.py",
        "spread: Array = problem.block_mask",
        "spread: Array = xp.matrix_transpose(problem.block_mask)", "dense-block_mask",
    ),
    in_package(
        "block_mask-counted-in-tiles", "_reference.py",
        "np.asarray(indices, dtype=np.int64) // BLOCK_MASK",
        "np.arange(len(indices)) // BLOCK_MASK",
        "poison::hidden_keys_cannot_matter[blockwise-with_block_mask]",
    ),
    by_case(
        "default-q_offset-top-left", "_spec.py",
        "q_offset = kv_offset + (spec.len_kv if kv_len is None else kv_len) - places.len_q",
        "q_offset = kv_offset", "dense-causal",
    ),
    by_case(
        "default-q_offset-without-kv_len", "_spec.py",
        "q_offset = kv_offset + (spec.len_kv if kv_len is None else kv_len) - places.len_q",
        "q_offset = kv_offset + spec.len_kv - places.len_q", "dense-kv_len_batch",
    ),
    # Softmax, values, states
    in_package(
        "maximum-before-masks", "_reference.py",
        "row_max = xp.max(scores, axis=-1, keepdims=True)",
        "row_max = xp.max(_masked_scores(xp, problem, None), axis=-1, keepdims=True)",
        "poison::hidden_keys_cannot_matter[dense-with_mask]",
    ),
    in_package(
        "lse-without-maximum", "_reference.py",
        "row_max + xp.log(row_sum)",
        "xp.log(row_sum)", "attention::named_case[numpy-dense-plain]",
    ),
    in_package(
        "nan-counts-as-empty", "_reference.py",
        "empty = row_sum == 0",
        "empty = ~(row_sum > 0)", "poison::infinite_scores_are_the_oracles[dense-numpy-query]",
    ),
    in_package(
        "nan-leaks-from-values", "_reference.py",
        "if not not_finite(xp, v):",
        "if True:", "poison::hidden_keys_cannot_matter[dense-with_mask]",
    ),
    in_package(
        "nan-of-values-swallowed", "_reference.py",
        "lost = reached(xp.isnan(v)) | (up & down)",
        "lost = up & down", "poison::infinite_scores_are_the_oracles[dense-numpy-query]",
    ),
    by_case(
        "heads-interleaved", "_reference.py",
        """\
    rows = xp.reshape(rows, (*rows.shape[:-3], num_kv_heads, num_heads // num_kv_heads * m, k))
    product = xp.matmul(rows, columns)
    return xp.reshape(product, (*product.shape[:-3], num_heads, m, n))
""",
        """\
    rows = xp.reshape(rows, (*rows.shape[:-3], num_heads // num_kv_heads, num_kv_heads, m, k))
    product = xp.matmul(rows, columns[..., None, :, :, :])
    return xp.reshape(product, (*product.shape[:-4], num_heads, m, n))
""",
        "dense-gqa",
    ),
    in_package(
        "merge-weights-swapped", "_state.py",
        "_weighted(xp, a, weight_a / divisor) + _weighted(xp, b, weight_b / divisor)",
        "_weighted(xp, a, weight_b / divisor) + _weighted(xp, b, weight_a / divisor)",
        "attention::merge_is_commutative_to_the_bit_and_takes_empty_states[numpy]",
    ),
    in_package(
        "merge-overflows", "_state.py",
        "larger = xp.maximum(a.lse, b.lse)",
        "larger = xp.zeros_like(a.lse)", "shared_cases::shared_case[B65-blockwise]",
    ),
    in_package(
        "merge-of-empty-states-nan", "_state.py",
        "divisor = xp.where(empty, xp.ones_like(total), total)",
        "divisor = total", "shared_cases::shared_case[B10-blockwise]",
    ),
    in_package(
        "merge-swallows-nan", "_state.py",
        "empty = total == 0",
        "empty = ~(total > 0)", "attention::merge_keeps_nan",
    ),
    by_case(
        "sinks-scaled", "_reference.py",
        "return State(xp.zeros_like(sinks), sinks[..., 0])",
        "return State(xp.zeros_like(sinks), sinks[..., 0] * problem.spec.scale)", "dense-sinks",
    ),
    in_package(
        "sinks-in-every-tile", "_blockwise.py",
        "return functools.reduce(lambda a, b: merged(xp, a, b), states)",
        "if problem.sinks is not None:\n"
        "        from scaledot._reference import keyless\n"
        "        states = (merged(xp, state, keyless(xp, problem)) for state in states)\n"
        "    return functools.reduce(lambda a, b: merged(xp, a, b), states)",
        "determinism::blocks_against_dense[blockwise-mask, bias, sinks]",
    ),
    in_package(
        "weights-without-sinks", "_reference.py",
        "state = merged(xp, state, keyless(xp, problem))",
        "pass", "attention::named_case[numpy-dense-sinks]",
    ),
    in_package(
        "positions-of-rows-forgotten", "_spec.py",
        "terms=terms, rows=rows,\n        spec=",
        "terms=terms, rows=range(len(rows)),\n        spec=",
        "attention::weights_of_rows[numpy-dense]",
    ),
    by_case(
        "dropout-not-rescaled", "_reference.py",
        "1 / (1 - spec.dropout) if",
        "1.0 if", "dense-dropout",
    ),
    in_package(
        "dropout-keyed-by-tile", "_reference.py",
        "return _masks.dropout_keeps(row_a, row_b, kv_pos, threshold)",
        "return _masks.dropout_keeps(row_a, row_b, kv_pos - problem.columns[0], threshold)",
        "laws::laws_beyond_one_block[blockwise]",
    ),
    in_package(
        "one-seed-for-all-entries", "_spec.py",
        "np.arange(1, count + 1, dtype=u64)",
        "np.ones(count, dtype=u64)", "attention::named_case[numpy-dense-dropout]",
    ),
    in_package(
        "rounded-to-no-dtype", "_attention.py",
        "out = xp.astype(state.out, cast(Any, query).dtype, copy=False)",
        "out = state.out", "attention::named_case_in_other_dtypes[dense-plain-float16]",
    ),
    in_package(
        "query-scaled-in-place", "_reference.py",
        "scores = _products(xp, problem, accumulation(problem.query, problem.spec))",
        "problem.query[...] = problem.query * problem.spec.scale\n"
        "    scores = _products(xp, problem, accumulation(problem.query, problem.spec))",
        "attention::named_case[numpy-readonly-dense-plain]",
    ),
    # Tiles
    in_package(
        "last-visible-block-skipped", "_masks.py",
        "last + right - kv_start + 1",
        "last + right - kv_start",
        "laws::decoding_step_by_step_is_the_whole",
    ),
    in_package(
        "first-visible-block-skipped", "_blockwise.py",
        "range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV)",
        "range(-(-low // BLOCK_KV) * BLOCK_KV, high, BLOCK_KV)",
        "attention::named_case[numpy-blockwise-window_long]",
    ),
    in_package(
        "key-heads-cut-like-query-heads", "_spec.py",
        "start // group, -(-stop // group)",
        "start, stop", "determinism::blocks_against_dense[blockwise-plain]",
    ),
    # Compositions, checks, surroundings
    in_package(
        "chunks-all-at-position-0", "_chunks.py",
        "kv_offset=chunk.kv_offset",
        "kv_offset=0", "attention::chunks_in_any_order_are_the_whole[numpy]",
    ),
    in_package(
        "packed-positions", "_varlen.py",
        "mask_mod=_mask_mod_of(mask_mod, number),",
        "mask_mod=_mask_mod_of(mask_mod, number),\n"
        "            q_offset=starts_q[number], kv_offset=starts_kv[number],",
        "shared_cases::shared_case[B42-blockwise]",
    ),
    in_package(
        "heads-not-joined", "_family.py",
        "joined = xp.moveaxis(heads, -3, -2)",
        "joined = heads", "multi_head::as_many_heads_of_keys_by_default",
    ),
    in_package(
        "heads-that-do-not-divide", "_checks.py",
        "if heads[0] % heads[1] if heads[1] else heads[0]:",
        "if not heads[1] and heads[0]:",
        "errors::arguments[attention-key-value-4 and 3 (query (2, 4, 5, 8), key (2, 3, 7, 8)]",
    ),
    in_package(
        "kv_len-beyond-the-keys", "_spec.py",
        "((known_count < 0) | (known_count > spec.len_kv))",
        "(known_count < 0)", "errors::arguments[attention-kv_len- to 8_0]",
    ),
    in_package(
        "plot-loaded-at-import", "__init__.py",
        '__version__ = "',
        'import scaledot.plot\n\n__version__ = "',
        "imports::import_from_the_sources_loads_nothing_heavy",
    ),
    # Gradients by array operations
    by_gradients(
        "delta-without-lse", "_passes.py",
        "delta = delta - rows(grad_lse, 1)",
        "pass", "dense-plain-float64",
    ),
    by_gradients(
        "key-gradient-without-scale", "_derivatives.py",
        """\
            if sums.wants("key"):
                sums.add(place, key=_outer(xp, part, grads, part.query))
    return""",
        """\
            if sums.wants("key"):
                sums.add(place, key=_outer(xp, part, grads, part.query) / part.spec.scale)
    return""",
        "dense-plain-float64",
    ),
    by_gradients(
        "value-gradient-without-dropout", "_derivatives.py",
        "weights = _kept(tile, tile.weights)\n            if",
        "weights = tile.weights\n            if", "dense-dropout-float64",
    ),
    by_gradients(
        "softcap-without-slope", "_derivatives.py",
        "return scale if tile.angle is None else scale * (1 - tile.angle**2)",
        "return scale", "dense-softcap-float64",
    ),
    by_gradients(
        "sinks-gradient-sign", "_passes.py",
        "sinks=-_of_heads(xp, problem, shares)",
        "sinks=_of_heads(xp, problem, shares)", "dense-sinks-float64",
    ),
    by_gradients(
        "weights-of-a-huge-lse", "_derivatives.py",
        "weights = weights if rows.mass is None else weights / rows.mass",
        "pass", "dense-bias_minimum-float32",
    ),
    by_gradients(
        "gradients-of-the-first-block", "_derivatives.py",
        "into[index] = into[index] + reduced(self.xp, x, tuple(into[index].shape))",
        "into[index] = reduced(self.xp, x, tuple(into[index].shape))",
        "blockwise-long-float32",
    ),
    in_package(
        "bias-gradient-over-other-axes", "_derivatives.py",
        "padded = (1,) * (rank - len(shape)) + shape",
        "padded = ((1,) * (rank - len(shape)) + shape)[::-1]",
        "gradients_options::a_broadcast_bias_gets_the_sum[dense-(4, 1, 140)]",
    ),
    in_package(
        "hidden-gradients-stay", "_derivatives.py",
        "return x if tile.seen is None else xp.where(tile.seen, x, xp.zeros_like(x[..., :1]))",
        "return x", "gradients_options::hidden_keys_cannot_matter[dense-with_mask]",
    ),
    in_package(
        "nan-of-a-gradient-swallowed", "_derivatives.py",
        "return xp.where(reached, xp.full_like(total, math.nan), total)",
        "return total",
        "gradients_options::nan_of_a_gradient_of_out_reaches_what_it_must[dense-float64-nan]",
    ),
    in_package(
        "empty-rows-have-a-delta", "_passes.py",
        "return Rows(known, grad_out, xp.where(empty, xp.zeros_like(delta), delta), mass=mass)",
        "return Rows(known, grad_out, delta, mass=mass)",
        "gradients_options::rows_that_see_nothing_beside_a_sink_of_minus_infinity[dense]",
    ),
    in_package(
        "tangent-without-the-mean", "_passes.py",
        "return total - mean * rows.grad_out, mean",
        "return total, mean",
        "gradients_options::tangents_of_shapes[dense-mqa]",
    ),
    in_package(
        "tangent-without-softcap", "_derivatives.py",
        "moved = moved * (1 - tile.angle**2)",
        "pass", "gradients_options::tangents_over_several_tiles[dense-float32]",
    ),
    in_package(
        "second-without-the-bend", "_derivatives.py",
        "grads = grads + scale * first * bend * _moved_products(xp, tile, given)",
        "pass", "gradients_second::second_derivatives[dense-causal, softcap-float64]",
    ),
    in_package(
        "second-without-the-mean", "_derivatives.py",
        "- row.tangent * products - row.mean",
        "- row.tangent * products",
        "gradients_second::second_derivatives[dense-plain-float64]",
    ),
    in_package(
        "second-of-sinks-forgotten", "_passes.py",
        "weighed = weighed - rows.delta * given.sinks",
        "pass",
        "gradients_second::second_derivatives[dense-full bias, sinks-float64]",
    ),
    in_package(
        "packed-slopes-of-the-last-sequence", "_varlen.py",
        "functools.reduce(lambda a, b: a + b, [",
        "functools.reduce(lambda a, b: b, [",
        "gradients_calls::packed_sequences[dense-alibi, scale-numpy]",
    ),
    in_package("weights-traced-as-array-operations", "_rules.py",
               "return _torch_rules if _torch_rules.traces(query, options) else None",
               "return None", "torch_weights::a_mode_sees_the_operators"),
    in_package("gradients-of-weights-beside-their-arguments", "_torch_ops.py",
               'place - (place > PLACES["value"])', "place",
               "torch_weights::a_mode_sees_the_operators"),
    # Packed sequences
    in_package("varlen-dropout-of-the-first", "_packed_gradients.py",
               'records["head_keys"] += 8 * spec.num_heads * number',
               'records["head_keys"] += 0 * number',
               "varlen::each_sequence_has_what_it_has_alone"),
    in_package("varlen-mass-of-sinks", "_packed_gradients.py",
               "weights if mass is None else weights / mass", "weights",
               "varlen::sinks_beside_scores_that_are_as_large"),
    in_package("varlen-slopes-of-the-last-group", "_packed_gradients.py",
               "total = total + alike.reshape(", "total = alike.reshape(",
               "varlen::slopes_of_sequences_in_different_numbers_of_ranges"),
    # Pages and caches
    in_package("pages-shared-by-first-page", "_page_kernels.py",
               "start // page_size : -(-stop // page_size)].tobytes()", ": 1].tobytes()",
               "page_kernels::branches_of_branches"),
    in_package("pages-parts-of-the-longest", "_page_kernels.py",
               "parts = [room.num_parts(length) for length in lengths]",
               "parts = [room.num_parts(max(lengths)) for length in lengths]",
               "page_kernels::branches_of_branches"),
    # Pictures and their files
    in_package("plot-heads-that-see-nothing", "plot/_heads.py",
               "out=np.full(count.shape, np.nan)", "out=np.zeros(count.shape)",
               "plot_heads::a_head_that_sees_nothing_is_white"),
    in_package("plot-nan-in-a-scale", "plot/_axes.py",
               "x.max(initial=0.0, where=np.isfinite(x))", "x.max(initial=0.0)",
               "plot_heads::nan_has_no_say_in_a_scale"),
    in_package("plot-marks-on-each-other", "plot/_keys.py",
               "steps = gap * np.arange", "steps = 0.0 * np.arange",
               "plot_heads::keys_that_lie_close_have_marks_apart"),
    in_package("plot-distances-top-left", "plot/_keys.py",
               "first = start + len_kv - len_q if", "first = start if", "plot_heads::distances"),
    in_package("plot-full-tiles-by-their-first-query", "plot/_visible.py",
               "(band.low[last] <= starts)", "(band.low[first] <= starts)",
               "plot_visible::tiles_by_positions"),
    in_package("plot-sums-for-means-of-a-map", "_stats.py",
               "means = sums / np.add.reduceat(counts, rows)[:, None]", "means = sums",
               "plot_heads::large_matrices_become_block_maps"),
    in_package("plot-title-on-one-line", "plot/_axes.py",
               "wrapped(glyphs(title), TITLE, across)", "glyphs(title)",
               "plot_tidy::a_title_without_room_has_several_lines"),
    in_package("plot-replaces-what-appeared", "_targets.py",
               "    if overwrite:\n        finished.replace",
               "    if True:\n        finished.replace",
               "plot::a_file_that_appears_while_it_draws_stays"),
    # Looking inside
    in_package("rollout-nan-everywhere", "introspect/_rollout.py",
               "    if lost.any():", "    if False:",
               "introspect_compare::nan_reaches_the_rows_of_a_rollout_that_see_it[query-mean]"),
    in_package("heads-without-numbers-last", "introspect/_compare.py",
               "np.where(broken, -np.inf, -values)", "-values",
               "introspect_compare::heads_without_numbers_come_first[None]"),
    in_package("sinks-of-a-rounded-lse", "introspect/_facts.py",
               "return np.where(coarse, each[:, None], np.minimum(share, 1))", "return share",
               "introspect_detectors::the_weight_of_a_sink_beside_scores_as_large[100000000.0]"),
    in_package("sink-of-all-queries", "introspect/_facts.py",
               "mass[head] = np.maximum(mass[head] - given - hidden, 0.0)", "pass",
               "introspect_detectors::scores_are_those_of_dense_weights[causal]"),
    in_package("induction-one-key-early", "introspect/_detectors.py",
               "after = np.append(-1, np.where(together, key[:-1], -1))", "after = key",
               "introspect_detectors::planted_heads[True]"),
    in_package("report-codes-rounded-down", "report/_codes.py",
               "np.rint(scaled)", "np.floor(scaled)",
               "report::weights_are_within_half_a_step[False]"),
)
