"""The faults by name, with their true causes.

`FAULTS` are described by a row of the catalogue, `FOREIGN` by none, and `CONTROLS` are healthy.
"""

from __future__ import annotations

import torch

from benchmarks.doctor import foreign, healthy, inject, reported
from benchmarks.doctor.case import UNTRAINED, Fault

_QWEN3 = ("random", "tied", "moe", "trained")
_DENSE = ("random", "tied", "biases", "gemma")
"""Of a mixture of experts such small faults are within the rounding."""


def _firsts(*numbers: float) -> tuple[dict[str, float], ...]:
    return tuple({"first": number} for number in numbers)


FAULTS: tuple[Fault, ...] = (
    Fault("one token shifted", "trainer", ("shift",), inject.changed_data(inject.shift, "trainer")),
    Fault("an id zeroed", "trainer", ("zeros",), inject.changed_data(inject.end_zero, "trainer")),
    Fault("last tokens 0", "rollout", ("zeros",), inject.changed_data(inject.last_zero, "rollout")),
    Fault("sentinels", "rollout", ("sentinels",), inject.changed_data(inject.sentinels, "rollout")),
    Fault("clamped", "trainer", ("clamp",), inject.changed_data(inject.clamped, "trainer")),
    Fault("base 10 or 2", "rollout", ("log_base",), inject.changed_data(inject.other_base, "rollout")),
    Fault("other order", "trainer", ("permuted",), inject.permuted, UNTRAINED),
    Fault(
        "temperature, undeclared", "rollout", ("temperature",), inject.of_logits(torch.div, 0.9, 0.8, 0.6)
    ),
    Fault("temperature, not in the trainer", "trainer", ("temperature",), inject.declared),
    Fault("temperature, raw", "both", ("temperature",), inject.raw),
    Fault("top-p", "rollout", ("top_p",), inject.of_logits(inject.top_p, 0.95, 0.9, 0.7)),
    Fault("top-k", "rollout", ("top_k",), inject.of_logits(inject.top_k, 20, 8, 4), UNTRAINED),
    Fault("min-p", "rollout", ("min_p",), inject.of_logits(inject.min_p, 0.05, 0.1, 0.2), UNTRAINED),
    Fault("banned ids", "rollout", ("token_bias",), inject.processed(inject.banned)),
    Fault("logit bias", "rollout", ("token_bias",), inject.of_logits(inject.biased, 1.0, 2.0, 3.0), UNTRAINED),
    Fault("no end early", "rollout", ("banned_end",), inject.processed(inject.no_end), UNTRAINED),
    Fault("repetition penalty", "rollout", ("repetition_penalty",), inject.processed(inject.repetition)),
    Fault(
        "repetition penalty of the response", "rollout", ("repetition_penalty",),
        inject.processed(inject.repetition_of_response), UNTRAINED,
    ),
    Fault("presence penalty", "rollout", ("presence_penalty",), inject.processed(inject.presence), UNTRAINED),
    Fault("soft cap", "rollout", ("softcap",), inject.of_logits(inject.soft_cap, 8.0, 5.0, 3.0)),
    Fault("older weights", "rollout", ("other_weights",), inject.stale),
    Fault("older weights on some ranks", "rollout", ("other_weights",), inject.mixture),
    Fault("weights in flight", "rollout", ("other_weights",), inject.in_flight),
    Fault("cached prompts", "rollout", ("prompt_cache",), inject.prompt_cache, UNTRAINED),
    Fault(
        "head of older weights", "rollout", ("part_of_weights",), inject.part("lm_head.weight"),
        ("random", "moe", "trained"),
    ),
    Fault("layers of older weights", "rollout", ("part_of_weights", "layer_of_weights"), inject.part("layers.")),
    Fault("one layer of older weights", "rollout", ("layer_of_weights",), inject.part("layers.1.")),
    Fault("update applied twice", "rollout", ("update_scaled",), inject.scaled_update(2.0, 2.0, 2.0)),
    Fault("a part of the update", "rollout", ("update_scaled",), inject.scaled_update(0.7, 0.35, 1.4),
          values=({"times": 0.7}, {"times": 0.35}, {"times": 1.4})),
    Fault("quantised", "rollout", ("quantised_weights",), inject.quantised),
    Fault("partly quantised", "trainer", ("quantised_weights",), inject.partly_quantised, ("random", "tied")),
    Fault("rotary base", "rollout", ("rope_theta",), inject.config(rope_theta=(5e5, 1e5, 1e6))),
    Fault("rotary scaling", "rollout", ("rope_scaling",), inject.config(rope_factor=(2.0, 4.0, 8.0))),
    Fault("norm epsilon", "rollout", ("norm_eps",), inject.config(rms_norm_eps=(1e-3, 1e-2, 1e-2)), UNTRAINED),
    Fault("positions", "trainer", ("positions",), inject.scored("trainer", positions=inject.positions)),
    Fault("padding attended", "trainer", ("padding_attended",), inject.pads),
    Fault("mask", "trainer", ("attention_mask", "prompt_start"), inject.scored("trainer", mask=inject.mask)),
    Fault("window", "rollout", ("window",), inject.scored("rollout", mask=inject.window)),
    Fault("packing", "trainer", ("packing",), inject.packed),
    Fault("FP8 cache", "rollout", ("kv_cache",), inject.kv, _QWEN3),
    Fault(
        "head tied", "rollout", ("tied_head",), inject.config(tie_word_embeddings=(True, True, True)), ("random", "moe")
    ),
    Fault("attention scale", "rollout", ("attention_scale",), inject.scale),
    Fault("query and key norms", "rollout", ("qk_norm",), inject.no_qk_norm, ("random", "tied")),
    Fault("norm weights", "rollout", ("norm_weights",), inject.edited(inject.norm_one)),
    Fault(
        "activation", "rollout", ("activation",), inject.config(hidden_act=("gelu", "relu", "gelu_pytorch_tanh")),
        ("random", "tied", "trained"),
    ),
    Fault("experts", "rollout", ("experts",), inject.config(num_experts_per_tok=(3, 1, 1)), ("moe",)),
    Fault("layers exchanged", "rollout", ("layers",), inject.edited(inject.swap)),
    Fault("a layer skipped", "rollout", ("layers",), inject.edited(inject.skipped_layer)),
    Fault("configurations differ", "both", ("configuration",), inject.other_configuration, ("random", "moe")),
    Fault("bypass", "trainer", ("bypass",), inject.bypass),
    Fault("several ends excluded early", "rollout", ("banned_end",), inject.processed(inject.ends), UNTRAINED),
    Fault("a bias of all ids", "rollout", ("head_bias",), inject.processed(inject.bias_of_all), UNTRAINED),
    Fault(
        "soft cap by the wrong formula", "rollout", ("softcap",),
        inject.of_logits(inject.soft_cap_product, 8.0, 5.0, 3.0), UNTRAINED,
    ),
    Fault("truncated, raw", "rollout", ("top_k", "top_p", "min_p"), inject.truncated_and_raw, UNTRAINED),
    Fault("BOS twice", "rollout", ("bos",), inject.prompt(inject.bos_twice, 1)),
    Fault("BOS of the engine only", "rollout", ("bos",), inject.prompt(inject.another_bos), UNTRAINED),
    Fault(
        "first prompt tokens missing", "rollout", ("prompt_start",), inject.prompt(inject.first_cut),
        values=_firsts(1, 2, 4),
    ),
    Fault("last prompt tokens missing", "rollout", ("prompt_end",), inject.prompt(inject.last_cut)),
    Fault("a system prompt missing", "rollout", ("prompt_start",), inject.prompt(inject.prefix_cut, 5)),
    Fault("prompts truncated", "rollout", ("prompt_truncated",), inject.prompt(inject.truncated)),
    Fault("running sums", "rollout", ("cumulative",), inject.changed_data(inject.cumulative, "rollout")),
    Fault("divided by the length", "trainer", ("by_length",), inject.changed_data(inject.by_length, "trainer")),
    Fault("one value a rollout", "trainer", ("averaged",), inject.changed_data(inject.one_value, "trainer")),
    Fault("one decimal", "trainer", ("decimals",), inject.rounded(lambda each: (10 * each).round() / 10)),
    Fault("float16", "trainer", ("float16",), inject.rounded(torch.Tensor.half)),
    Fault("log-probs of the likeliest tokens", "rollout", ("largest",), inject.likeliest),
    Fault("gate and up exchanged", "rollout", ("gate_and_up",), inject.edited(inject.gate_and_up)),
    Fault("biases dropped", "rollout", ("biases",), inject.edited(inject.no_biases), ("biases",)),
    Fault("norms without + 1", "rollout", ("norm_weights",), inject.edited(inject.minus_one), ("gemma",)),
    Fault("final norm not loaded", "rollout", ("final_norm",), inject.other_final_norm, _QWEN3),
    Fault("embeddings scaled", "rollout", ("embedding_scale",), inject.embedding_scale),
    Fault("rotary embedding of neighbours", "rollout", ("rotary_pairs",), inject.rotated_neighbours, _QWEN3),
    Fault("positions as in Llama 3", "rollout", ("llama3_positions",), inject.scaled_as("llama3"), UNTRAINED),
    Fault("YaRN", "rollout", ("yarn_positions",), inject.scaled_as("yarn"), UNTRAINED),
    Fault("positions not scaled", "rollout", ("unscaled_positions",), inject.unscaled, UNTRAINED),
    Fault("soft caps not applied", "rollout", ("soft_caps",), inject.config(
        attn_logit_softcapping=(None, 3.0, None), final_logit_softcapping=(5.0, None, 5.0)), ("gemma",)),
    Fault("windows not applied", "rollout", ("configured_window",), inject.without_windows, ("gemma",)),
    Fault("routing weights", "rollout", ("routing_weights",), inject.config(norm_topk_prob=(False,) * 3), ("moe",)),
    Fault("a rank without the update", "rollout", ("rank_of_weights",), inject.stale_rank),
    Fault("an expert without the update", "rollout", ("expert_of_weights",), inject.stale_expert, ("moe",)),
    Fault("queries of older weights", "rollout", ("projection_of_weights",), inject.part("q_proj")),
    Fault("down projections of older weights", "rollout", ("projection_of_weights",), inject.part("down_proj")),
    Fault("query heads exchanged", "rollout", ("query_heads",), inject.edited(inject.queries_regrouped)),
    Fault("FP8 activations", "rollout", ("quantised_activations",), inject.quantised_activations,
          ("random", "tied", "biases")),
)  # fmt: skip
"""Faults that a row of the catalogue describes."""


def _together(*kinds: str, sizes: tuple[tuple[float, ...], ...]) -> Fault:
    # Where no token was repeated, the two penalties are their sum.
    are_one = kinds == ("presence penalty", "frequency penalty")
    causes = ("sampling", *(each.replace(" ", "_") for each in kinds if are_one))
    return Fault(
        " + ".join(kinds), "rollout", causes, inject.together(*kinds, sizes=sizes), UNTRAINED,
        tuple(dict(zip(kinds, each, strict=True)) for each in sizes), ((4, 2), (8, 5), (16, 16)),
    )  # fmt: skip


TOGETHER: tuple[Fault, ...] = (
    _together("temperature", "top p", sizes=((0.6, 0.95), (0.8, 0.9), (1.2, 0.95))),
    _together("temperature", "top k", sizes=((0.6, 8), (0.8, 20), (1.3, 10))),
    _together("temperature", "min p", sizes=((0.7, 0.1), (0.8, 0.05), (1.2, 0.1))),
    _together("temperature", "repetition penalty", sizes=((0.6, 1.2), (0.8, 1.1), (1.2, 1.1))),
    _together("temperature", "presence penalty", sizes=((0.6, 1.0), (0.8, 0.5), (1.2, 0.5))),
    _together("temperature", "frequency penalty", sizes=((0.6, 0.8), (0.8, 0.5), (1.2, 0.5))),
    _together("temperature", "id 5", sizes=((0.6, 2.0), (0.8, 2.0), (1.2, 1.5))),
    _together("temperature", "at the first", sizes=((0.6, 6), (0.8, 8), (1.2, 10))),
    _together("top p", "top k", sizes=((0.9, 8), (0.95, 10), (0.9, 6))),
    _together("top p", "presence penalty", sizes=((0.9, 1.0), (0.95, 0.5), (0.8, 0.7))),
    _together("top k", "repetition penalty", sizes=((8, 1.2), (10, 1.1), (5, 1.3))),
    _together("presence penalty", "frequency penalty", sizes=((0.6, 0.4), (0.5, 0.3), (0.4, 0.6))),
)
"""Two sampling parameters at 8, 40 and 256 rollouts: one finding, with both."""


TRUNCATIONS = ("top_p", "top_k", "min_p", "sampling")
"""Right names of a truncation that no row describes if what they leave is rounding: they keep the same ids."""

FOREIGN: tuple[Fault, ...] = (
    Fault("noise of logits", "rollout", (), inject.processed(foreign.noisy)),
    Fault("weights of nobody", "rollout", (), foreign.random_updates),
    Fault("dropout", "trainer", (), foreign.dropout, UNTRAINED),
    Fault("heads in another order", "rollout", (), inject.edited(foreign.heads)),
    Fault("another prompt", "rollout", (), foreign.wrong_prompt),
    Fault("noise in the last tokens", "rollout", (), inject.changed_data(foreign.tail, "rollout")),
    Fault("temperature grows with the position", "rollout", (), inject.processed(foreign.growing_temperature)),
    Fault("a feed-forward missing", "rollout", (), inject.edited(foreign.scaled("layers.1.mlp", 0.5))),
    Fault("values scaled", "rollout", (), inject.edited(foreign.scaled("v_proj", 1.4))),
    Fault("embeddings noisy", "rollout", (), inject.edited(foreign.noisy_embeddings), ("random", "moe")),
    Fault(
        "rows of the head exchanged", "rollout", (), inject.edited(foreign.exchanged_rows), ("random", "moe", "trained")
    ),
    Fault("log-probs with an offset by rollout", "trainer", (), inject.changed_data(foreign.offset, "trainer")),
    Fault("one head lost", "rollout", (), inject.edited(foreign.head_lost), UNTRAINED),
    Fault("value heads exchanged", "rollout", (), inject.edited(foreign.values_exchanged), ("random", "moe")),
    Fault("two experts alike", "rollout", (), inject.edited(foreign.experts_alike), ("moe",)),
    Fault("means over three tokens", "trainer", (), inject.changed_data(foreign.smoothed, "trainer")),
    Fault("no pair twice", "rollout", (), inject.processed(reported.repeated_pairs), _DENSE),
    Fault("typical-p", "rollout", TRUNCATIONS, inject.processed(reported.typical), _DENSE),
    Fault("top-nσ", "rollout", TRUNCATIONS, inject.processed(reported.near_the_largest), UNTRAINED),
    Fault("XTC", "rollout", TRUNCATIONS, inject.processed(reported.top_excluded), UNTRAINED),
    Fault("guidance", "rollout", (), inject.processed(reported.guided), UNTRAINED),
    Fault("an end that becomes likelier", "rollout", (), inject.processed(reported.end_grows), UNTRAINED),
    Fault("a grammar", "rollout", (), inject.processed(reported.grammar), UNTRAINED),
    Fault("temperature of the entropy", "rollout", (), inject.processed(reported.dynamic_temperature), UNTRAINED),
    Fault("temperatures of prompts", "rollout", (), inject.processed(reported.temperature_of_prompts), UNTRAINED),
    Fault("watermark", "rollout", (), inject.processed(reported.watermark), UNTRAINED),
    Fault("log-probs of the draft", "rollout", (), reported.drafted),
    Fault("padded vocabulary", "trainer", (), reported.padded_vocabulary, _DENSE),
    Fault("sinks of attention", "rollout", (), reported.sink, ("random", "tied", "biases")),
    Fault("four keys a query", "rollout", (), reported.top_keys, ("random", "tied", "biases")),
    Fault("biases twice", "rollout", (), inject.edited(reported.biases_doubled), ("biases",)),
    Fault("weights in FP4", "rollout", (), inject.edited(reported.four_bit_floats), UNTRAINED),
    Fault("sparse weights", "rollout", (), inject.edited(reported.sparse), UNTRAINED),
    Fault("rows of another kernel", "rollout", (), inject.edited(reported.layout_of_kernel), UNTRAINED),
    Fault("an expert never chosen", "rollout", (), inject.edited(reported.expert_never_chosen), ("moe",)),
    Fault("noise of the router", "rollout", (), reported.router_noise, ("moe",)),
    Fault(
        "first and last keys", "rollout", (),
        inject.scored("rollout", mask=reported.seen_by(reported.first_and_last)), UNTRAINED,
    ),
    Fault(
        "the prompt both ways", "trainer", (),
        inject.scored("trainer", mask=reported.seen_by(reported.prompt_both_ways)), UNTRAINED,
    ),
    Fault(
        "halves of a context", "trainer", (),
        inject.scored("trainer", mask=reported.seen_by(reported.halves)), UNTRAINED,
    ),
    Fault("an id tokenized again", "trainer", (), reported.retokenised, UNTRAINED),
    Fault("log-probs in few bits", "trainer", (), inject.changed_data(reported.grid, "trainer"), _DENSE),
    Fault("a buffer read early", "rollout", (), inject.changed_data(reported.stale_buffer, "rollout")),
    Fault("tokens of other rollouts", "rollout", (), inject.changed_data(reported.of_others, "rollout")),
    Fault("entropies", "trainer", (), reported.entropies, UNTRAINED),
    Fault("smoothed labels", "trainer", (), reported.smoothed_labels, _DENSE),
)  # fmt: skip
"""Faults that no row describes: the doctor must not name any cause."""


CONTROLS: tuple[Fault, ...] = (
    Fault("healthy", "", (), lambda case: None),
    Fault("other batches", "", (), healthy.precision("trainer", "autocast", 3)),
    Fault("float32 trainer", "", (), healthy.precision("trainer", "float32")),
    Fault("bfloat16 trainer", "", (), healthy.precision("trainer", "bfloat16", 40)),
    Fault("float32 engine", "", (), lambda case: case.sampled(dtype=torch.float32)),
    Fault("prefill engine", "", (), healthy.precision("rollout", "bfloat16", 5)),
    Fault("float16 trainer", "", (), healthy.precision("trainer", "float16")),
    Fault("declared lag", "", (), healthy.declared_lag),
    Fault("trainer on another instruction set", "", (), healthy.other_instructions("trainer")),
    Fault("engine on another instruction set", "", (), healthy.other_instructions("rollout")),
    Fault("learning rate too high", "", (), healthy.too_fast),
    Fault("gamed reward", "", (), healthy.gamed),
)
"""Healthy cases: only expected rounding or a declared lag may be found."""
