"""Bugs to be planted where models are served: transformers, diffusers, capture, `--model`."""

from __future__ import annotations

from planted import Mutant, in_package

PIECES = "_caches::a_prompt_in_pieces_is_the_whole[mistral, left, sliding]"
SEEN = "_masks::what_is_seen_equals_the_matrix"
STANDARD = "diffusers::as_the_standard_processor"


def of_transformers(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Return a mutant of src/scaledot/transformers; tests as after ``test_transformers``."""
    ids = (f"transformers{test}" for test in tests)
    return in_package(f"hf-{name}", f"transformers/{file}", old, new, *ids)


MODELS = (
    # The attention function of transformers
    of_transformers("causal-bottom-right", "_attend.py",
                    'return options | {"causal": True, "q_offset": 0}, min(len_q, len_kv)',
                    'return options | {"causal": True}, len_kv',
                    "_calls::causality_without_mask_is_that_of_sdpa"),
    of_transformers("window-of-one-more", "_attend.py",
                    "= (sliding_window - 1,", "= (sliding_window,",
                    "_calls::a_window_without_mask_is_kept"),
    of_transformers("one-seed-for-all", "_attend.py",
                    "seed = seeds(query, key, value) if dropout else None",
                    "seed = 0 * seeds(query, key, value) if dropout else None",
                    "_training::dropout_is_the_one_that_the_seeds_give"
                    "[mistral, 0.1, checkpoints]"),
    of_transformers("unknown-arguments-taken", "_attend.py",
                    "if name not in HARMLESS and given is not None and given is not False:",
                    "if False:", "_calls::what_is_not_understood_is_an_error"),
    of_transformers("sinks-forgotten", "_attend.py",
                    '"sinks": sinks}', '"sinks": None}',
                    "_calls::scaling_softcap_and_sinks_are_those_of_the_formula"),
    of_transformers("bias-in-place-of-mask", "_attend.py",
                    'given["bias"] = bias + options["bias"] if "bias" in options else bias',
                    'given["bias"] = bias',
                    "_calls::masks_of_the_user_are_used_as_they_are[added, with a bias]"),
    of_transformers("weights-of-seen-keys-alone", "_attend.py",
                    "weights = torch.nn.functional.pad(weights, (0, len_kv - end))", "pass",
                    "_masks::attention_sees_what_the_matrix_says"),
    # Its masks
    of_transformers("padding-on-the-left-a-length", "_mask.py",
                    "if bool((padding[:, 1:] & ~padding[:, :-1]).any()):", "if False:",
                    PIECES),
    of_transformers("window-reaches-all", "_mask.py",
                    "left >= first + q_length - 1", "left >= first", SEEN),
    of_transformers("offset-of-keys-forgotten", "_mask.py",
                    "first = q_offset - kv_offset", "first = q_offset - 0 * kv_offset",
                    PIECES),
    of_transformers("chunks-begin-with-padding", "_mask.py",
                    "begin = kv_offset - start[:, None]", "begin = kv_offset - 0 * start[:, None]",
                    "_masks::chunks_begin_behind_the_padding"),
    of_transformers("masks-added", "_mask.py",
                    'if name.strip("_") in _ARITHMETIC:', "if False:",
                    "_masks::uses_that_cannot_be_right_are_errors"),
    of_transformers("pattern-of-one-more", "_pattern.py",
                    'return Pattern(left=_enclosed(function)["sliding_window"] - 1)',
                    'return Pattern(left=_enclosed(function)["sliding_window"])',
                    PIECES),
    of_transformers("pattern-of-the-last-part", "_pattern.py",
                    "_least(whole.left, part.left)", "part.left",
                    SEEN),
    of_transformers("pattern-of-any-two-chunks", "_pattern.py",
                    "if part is None or part.packed or (part.chunk and whole.chunk):",
                    "if part is None or part.packed:",
                    "_masks::anything_else_is_a_boolean_matrix[chunks twice]"),
    of_transformers("own-attention-taken", "_model.py",
                    "if not model._can_set_attn_implementation()", "if False",
                    "::models_that_use_masks_in_their_own_way_are_refused[bloom]"),
    # diffusers
    in_package("diffusers-pixels-hidden", "diffusers.py",
               "seen = float(mask.dtype == torch.bool)", "seen = 0.0",
               "diffusers::boolean_masks_say_what_is_seen"),
    in_package("diffusers-residual-forgotten", "diffusers.py",
               "if attn.residual_connection:", "if False:", STANDARD),
    in_package("diffusers-norms-of-the-image", "diffusers.py",
               "query_of_text, key_of_text, attn.norm_added_q, attn.norm_added_k",
               "query_of_text, key_of_text, attn.norm_q, attn.norm_k", STANDARD),
    in_package("diffusers-any-form", "diffusers.py",
               "_EXCHANGED.get(kind) == _form(module)", "kind in _EXCHANGED",
               "diffusers_forms::processor_and_module_must_be_of_one_form"),
    # Looking at models while they run
    in_package("capture-goes-on", "introspect/_capture.py",
               "seen._is_over = True", "pass",
               "transformers_capture::of_generate_it_is_the_prompt"),
    in_package("capture-first-of-a-batch", "introspect/_capture.py",
               "np.unravel_index(entry % batch, lead)", "np.unravel_index(0, lead)",
               "transformers_capture::statistics_are_those_of_the_weights[mistral]"),
    in_package("capture-of-a-cache-that-is-written", "introspect/_capture.py",
               "query=layer.query.copy(), key=layer.key.copy()",
               "query=layer.query, key=layer.key",
               "transformers_caches::what_capture_keeps_is_not_of_a_cache_that_is_written_again"),
    in_package("watchers-replaced", "_watch.py",
               "_watchers.set((*_watchers.get(), watcher))", "_watchers.set((watcher,))",
               "transformers_capture::contexts_nest"),
    # inspect --model and bench --model
    in_package("model-text-beyond-its-places", "cli/_model.py",
               "most = min(asked.most, places, tokenizer.model_max_length)",
               "most = min(asked.most, tokenizer.model_max_length)",
               "cli_model::a_long_text_is_cut"),
    in_package("model-channels-in-a-row", "cli/_model.py",
               "samples.reshape(-1, channels).mean(axis=1)",
               "samples.reshape(channels, -1).mean(axis=0)",
               "cli_model::channels_are_averaged_and_long_recordings_cut"),
    in_package("model-parts-of-characters", "cli/_model.py",
               'name if not text or "\\ufffd" in text else text', "text",
               "cli_model::parts_of_characters_have_the_names_of_their_tokens"),
    in_package("model-without-its-head", "cli/_load.py",
               "for name in config.architectures or ():", "for name in ():",
               "cli_model::a_text_and_what_is_written"),
    in_package("model-of-other-shapes", "cli/_load.py",
               'in sorted(found["mismatched_keys"]):', "in ():",
               "cli_model::folders_with_half_a_model"),
    in_package("bench-each-its-own-tokens", "cli/_bench.py",
               "answers[-1].argmax() if follow is None else follow[step]", "answers[-1].argmax()",
               "cli_bench::tokens_to_follow_are_followed"),
    in_package("bench-any-answer", "cli/_bench.py",
               "figures.allowed = 2 * yardstick + eps * largest", "figures.allowed = math.inf",
               "cli_bench::wrong_answers_are_not_timed"),
    in_package("bench-of-another-attention", "cli/_bench.py",
               'if (calls > 0) != (name == "scaledot"):', "if False:",
               "cli_bench::models_that_compute_their_own_attention_are_not_measured"),
)
