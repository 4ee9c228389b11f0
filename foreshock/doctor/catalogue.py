"""The catalogue of causes: a row has the variants to try, the sentence of a finding, and the fix.

Within a family rows are in the order in which they are tried: frequent causes first. Families are ordered by their
cost: `data` needs no replay of its own, `sampling` only the logits of the first one, `weights` and `forward` one replay
a variant, `parts` up to one for each layer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from foreshock.doctor import fills
from foreshock.doctor.changes import Change, Subject
from foreshock.doctor.data import DATA_CHANGES

FREE = ("data", "sampling")
FAMILIES = (*FREE, "weights", "forward", "parts")
PRECISIONS = ("bfloat16", "autocast", "float32", "bfloat16_head32", "float16")
"""Precisions of a forward pass: ordinary numerics, never a cause. The first three measure the floor."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to try a row of the catalogue: a change to replay, a fit of a sampling parameter, or a change of data."""

    cause: str
    label: str
    change: Change = field(default_factory=Change)
    fit: str = ""
    data: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """A row. `says` completes "the log-probs of the engine (or trainer) …"; {label} is the variant's.

    `fixes`: what to set, by framework. `confirm`: the experiment that would confirm it. `fill` returns the variants for
    a side of a subject.
    """

    name: str
    family: str
    says: str
    fixes: Mapping[str, str]
    fill: Callable[[Subject, str], Iterator[Variant]]
    confirm: str = "apply the fix and log one step"


def _data(name: str, says: str, fix: str, *changes: str) -> Cause:
    def fill(subject: Subject, side: str) -> Iterator[Variant]:
        for change in changes or (name,):
            assert change in DATA_CHANGES
            yield Variant(name, _DATA_LABELS.get(change, change if changes else ""), data=change)

    return Cause(name, "data", says, {"any": fix}, fill)


_DATA_LABELS = {"shift-1": "the token before", "shift+1": "the token after", "base2": "2", "base10": "10"}
_DATA_LABELS |= {"shift-2": "the token two places before", "shift+2": "the token two places after"}


def _fit(name: str, says: str, *fits: str, **fixes: str) -> Cause:
    def fill(subject: Subject, side: str) -> Iterator[Variant]:
        for fit in fits or (name,):
            yield Variant(name, fit, fit=fit)

    confirm = "declare it, or set it to its neutral value for one step"
    if name in _TRUNCATIONS:
        confirm += "; a truncation that keeps the same ids (typical-p, top-nσ, a grammar) looks the same"
    return Cause(name, "sampling", says, fixes, fill, confirm=confirm)


_TRUNCATIONS = frozenset({"top_p", "top_k", "min_p", "sampling"})


def _changes(
    name: str,
    says: str,
    fill: fills.Fill,
    family: str = "forward",
    confirm: str = "apply the fix and log one step",
    **fixes: str,
) -> Cause:
    def variants(subject: Subject, side: str) -> Iterator[Variant]:
        for label, values in fill(subject, side):
            yield Variant(name, label, Change.of(**values))

    return Cause(name, family, says, fixes, variants, confirm)


def _field(name: str, has: str, fill: fills.Values, **fixes: str) -> Cause:
    return _changes(name, f"have {has}: {{label}}", fills.fields(fill), **_CONFIGURATION_FIX, **fixes)


def _held(name: str, says: str, fill: fills.Fill, family: str = "parts") -> Cause:
    confirm = "compare checksums of the engine's tensors with this checkpoint"
    return _changes(name, says, fill, family, confirm, **_SYNC_FIX)


def _prompt(name: str, has: str, fill: fills.Fill, **fixes: str) -> Cause:
    confirm = "log the prompt's token ids as the engine received them"
    return _changes(name, f"have {has}: {{label}}", fill, confirm=confirm, **_PROMPT_FIX, **fixes)


def _edit(name: str, says: str, fix: str, pattern: str, **labels: tuple[Any, ...]) -> Cause:
    return _changes(name, says, fills.values("tensors", pattern, **labels), any=fix)


def _off(option: str, neutral: str) -> dict[str, str]:
    return {"vLLM": f"SamplingParams.{option}={neutral}", "SGLang": f"sampling_params.{option}={neutral}"}


_CONFIGURATION_FIX = {
    "vLLM": "hf_overrides={…}",
    "SGLang": "--json-model-override-args '{…}'",
    "verl": "actor_rollout_ref.model.override_config",
    "any": "use the config.json of the checkpoint on both sides",
}
_LOADED = "load all tensors of the checkpoint, and compare their names with the model's"
_CONVERTED = "check the conversion of the weights: compare the tensors' names and the order of their rows"
_UNTIED = "--untie-embeddings-and-output-weights"
_ROUTER = "--moe-router-pre-softmax, --moe-router-topk-scaling-factor"
_PROMPT_FIX = {
    "any": "pass the token ids of the engine's prompt to the trainer; do not tokenize or template them again"
}
_ADD_SPECIAL_TOKENS = "pass prompt_token_ids; with text, add_special_tokens=False if the template has the BOS"
_TRUNCATION = "check data.max_prompt_length and data.truncation"
_QUANTISED_FIX = {
    "vLLM": "--quantization None",
    "SGLang": "no --quantization",
    "any": "expected for a quantised engine; correct by importance sampling, or quantise in the trainer too",
}
_POSITION_FIX = {
    "verl": "compare with actor_rollout_ref.model.use_remove_padding=False",
    "any": "pass position_ids computed from the attention mask, and reset them for each packed sequence",
}
_SYNC_FIX = {
    "verl": "check the weight sync after each actor update (actor_rollout_ref.rollout.load_format)",
    "slime": "--update-weights-interval 1",
    "vLLM": "compare checksums by a worker extension after each update",
    "SGLang": "POST /weights_checker after each update",
    "any": "verify after each update that all ranks and all tensors were received",
}

SAMPLING = _fit("sampling", "are those of several sampling parameters: {label}")
"""What a finding says of several rows of the family, which are fitted and judged together."""

CATALOGUE: tuple[Cause, ...] = (
    _data(
        "zeros",
        "are exactly 0 at tokens that are not certain: they were not recorded there",
        "record them; set response_mask to 0 at tokens that the model did not sample, and only there",
    ),
    _data(
        "sentinels",
        "hold a constant in place of a log-prob at some tokens",
        "record the real log-prob; set response_mask to 0 at tokens that the model did not sample, and only there",
    ),
    _data("clamp", "are clamped from below", "log them before any clamp"),
    _data(
        "shift",
        "are those of {label}",
        "align log-probs with response tokens: logits at position t − 1 score token t",
        *("shift-1", "shift+1", "shift-2", "shift+2"),
    ),
    _data("log_base", "are logarithms to the base {label}", "use the natural logarithm", "base2", "base10"),
    _data("averaged", "are {label} over each rollout", "log one value a token", "means", "sums"),
    _data("cumulative", "are running sums over each rollout", "log one value a token, not cumulative_logprob"),
    _data("by_length", "are divided by the number of tokens of their rollout", "divide the loss, not the log-probs"),
    _data("reversed", "are in reverse order within each rollout", "log them in the order of the tokens"),
    _data(
        "permuted", "belong to other rollouts of the batch", "keep the order of rollouts between generation and logging"
    ),
    _data("bfloat16", "are rounded to bfloat16", "cast logits to float32 before log-softmax and log float32"),
    _data("float16", "are rounded to float16", "cast logits to float32 before log-softmax and log float32"),
    _data("decimals", "are rounded to {label} decimals", "log all digits of a float32", *map(str, range(1, 5))),
    _fit(
        "temperature",
        "are those of temperature {label}",
        vLLM="SamplingParams.temperature, with --logprobs-mode processed_logprobs",
        SGLang="sampling_params.temperature",
        verl="actor_rollout_ref.rollout.temperature",
        TRL="GRPOConfig.temperature",
        slime="--rollout-temperature",
        any="divide the trainer's logits by the same temperature",
    ),
    _fit(
        "top_p",
        "are renormalised to the nucleus of top-p {label}",
        vLLM="SamplingParams.top_p=1",
        verl="actor_rollout_ref.rollout.top_p=1",
        TRL="GRPOConfig.top_p=1.0",
        slime="--rollout-top-p 1",
    ),
    _fit(
        "top_k",
        "are renormalised to the {label} likeliest tokens (top-k)",
        vLLM="SamplingParams.top_k=-1",
        verl="actor_rollout_ref.rollout.top_k=-1",
        TRL="GRPOConfig.top_k=0",
        slime="--rollout-top-k -1",
    ),
    _fit(
        "min_p",
        "are renormalised to the tokens above min-p {label}",
        vLLM="SamplingParams.min_p=0",
        TRL="GRPOConfig.min_p=None",
    ),
    _fit(
        "token_bias",
        "have another logit at single ids: {label}",
        "biases",
        vLLM="SamplingParams.logit_bias, bad_words, allowed_token_ids",
        SGLang="sampling_params.logit_bias",
        any="remove the bias, or apply it in the trainer too",
    ),
    _fit(
        "head_bias",
        "have another logit at each id, as by a bias of the head: {label}",
        "bias_of_ids",
        any="load lm_head.bias on both sides, or on none",
    ),
    _fit(
        "banned_end",
        "exclude the end of the sequence early: {label}",
        "banned_until",
        vLLM="SamplingParams.min_tokens=0",
        SGLang="sampling_params.min_new_tokens=0",
        any="apply min_tokens in the trainer too",
    ),
    _fit(
        "repetition_penalty",
        "have a repetition penalty of {label}",
        "repetition",
        "repetition_of_response",
        **(_off("repetition_penalty", "1") | {"TRL": "GRPOConfig.repetition_penalty=1.0"}),
    ),
    _fit("presence_penalty", "have a presence penalty of {label}", "presence", **_off("presence_penalty", "0")),
    _fit("frequency_penalty", "have a frequency penalty of {label}", "frequency", **_off("frequency_penalty", "0")),
    _fit(
        "softcap",
        "have soft-capped logits (cap {label})",
        "softcap",
        "softcap_product",
        any="apply final_logit_softcapping, c · tanh(logit / c), on both sides or on none",
    ),
    _fit(
        "largest",
        "are those of the likeliest token, not of the sampled one",
        any="log the log-prob of the sampled id, which need not be the first of the returned ones",
    ),
    _held("other_weights", "are those of the weights {label}", fills.whole, "weights"),
    _changes(
        "prompt_cache",
        "have the prompt's cache of the weights {label}",
        fills.cached,
        family="weights",
        vLLM="reset_prefix_cache() after each update",
        SGLang="/flush_cache after each update, or --disable-radix-cache",
        any="drop cached prompts when weights change",
    ),
    _held("part_of_weights", "are those of the announced weights with the {label}", fills.parts, "weights"),
    _changes(
        "update_scaled",
        "have the update of the weights {label}",
        fills.delta,
        family="weights",
        **(
            _SYNC_FIX
            | {
                "any": "merge an adapter once, with its own scale (alpha / r, or alpha / √r of RS-LoRA)",
                "PEFT": "unmerge_adapter() before merge_adapter()",
            }
        ),
    ),
    _changes(
        "engine_option",
        "are those of the engine with another option: {label}",
        fills.engines,
        family="weights",
        any="set the option of the engine that samples as you mean it",
    ),
    _prompt("bos", "a prompt with one more first id", fills.another_first_id, vLLM=_ADD_SPECIAL_TOKENS),
    _prompt("prompt_start", "another prompt", fills.prompts("first")),
    _prompt("prompt_end", "another prompt", fills.prompts("last")),
    _prompt("prompt_truncated", "truncated prompts", fills.prompts("keep"), verl=_TRUNCATION),
    _changes(
        "configuration", "are those of the configuration {label}", fills.other_configuration, **_CONFIGURATION_FIX
    ),
    _changes(
        "positions",
        "have wrong positions: {label}",
        fills.values(
            "positions",
            all_positions_are_0="zero",
            positions_restart_at_the_response="restart",
            positions_jump_from_the_prompt_to_the_padded_width="gap",
            the_response_is_one_position_early="response-1",
            the_response_is_one_position_late="response+1",
        ),
        **_POSITION_FIX,
    ),
    _changes(
        "padding_attended",
        "attend to padding on the left: {label}",
        fills.values("visible", prompts_padded_to_the_longest="pads"),
        **_POSITION_FIX,
    ),
    _changes(
        "attention_mask",
        "have a wrong attention mask: {label}",
        fills.values(
            "visible",
            the_first_token_is_not_seen="no_first",
            the_prompt_is_not_seen_from_the_response="response_only",
            later_tokens_are_seen="bidirectional",
        ),
        any="compare attention masks; in vLLM, sliding_window and chunked local attention",
    ),
    _changes(
        "window",
        "attend to {label}",
        fills.windows,
        vLLM="hf_overrides={'sliding_window': …}",
        any="use the same sliding_window and prompt length on both sides",
    ),
    _changes("packing", "attend to other rollouts: {label}", fills.packed, **_POSITION_FIX),
    _field("rope_theta", "another base of the rotary embedding", fills.theta, Megatron="--rotary-base"),
    _field("rope_scaling", "scaled positions", fills.linear, Megatron="--rotary-seq-len-interpolation-factor"),
    _field("norm_eps", "another ε of the norms", fills.epsilons, Megatron="--norm-epsilon"),
    _changes(
        "kv_cache",
        "have a narrower KV cache: {label}",
        fills.values("kv", fp8_with_scale_1="fp8", int8_per_token="int8_channel", fp8_e5m2="fp8_e5m2"),
        vLLM="--kv-cache-dtype auto",
        SGLang="--kv-cache-dtype auto",
    ),
    _changes(
        "quantised_weights",
        "have quantised weights: {label}",
        fills.values(
            "quantise",
            fp8_per_tensor="fp8_tensor",
            fp8_per_channel="fp8_channel",
            int8_per_channel="int8_channel",
            int4_per_group="int4_group",
            fp8_per_channel_of_the_MLP="fp8_channel/mlp",
            fp8_per_channel_of_gate_and_up="fp8_channel/gate_up",
            fp8_per_channel_of_attention="fp8_channel/attention",
            fp8_per_tensor_of_the_MLP="fp8_tensor/mlp",
            fp8_per_block_of_128="fp8_block",
        ),
        **_QUANTISED_FIX,
    ),
    _field("experts", "another number of experts for each token", fills.experts, Megatron="--moe-router-topk"),
    _field("tied_head", "another head", fills.toggled("tie_word_embeddings"), Megatron=_UNTIED),
    _changes(
        "attention_scale",
        "have another scale of attention scores: {label}",
        fills.attention_scales,
        **_CONFIGURATION_FIX,
    ),
    _edit(
        "qk_norm",
        "are without the norms of queries and keys: {label}",
        "load q_norm and k_norm, and use an implementation that applies them",
        r"\.[qk]_norm\.",
        not_applied=("no_qk_norm",),
    ),
    _edit(
        "norm_weights",
        "have wrong norm weights: {label}",
        "check the conversion of norm weights (Gemma and Megatron store weight − 1)",
        r"norm\.weight$",
        one_is_added=("norms_plus_one",),
        one_is_subtracted=("norms_minus_one",),
    ),
    _edit("final_norm", "are without the final norm's {label}", _LOADED, r"norm\.weight$", weight=("no_final_norm",)),
    _field("activation", "another activation", fills.activations),
    _field("routing_weights", "other weights of the experts", fills.routing_weights, Megatron=_ROUTER),
    _field("unscaled_positions", "positions without the scaling of config.json", fills.unscaled),
    _field("llama3_positions", "positions scaled as in Llama 3", fills.scaled_as("llama3")),
    _field("yarn_positions", "positions scaled by YaRN", fills.scaled_as("yarn")),
    _field("partial_rotary", "another rotated part of each head", fills.rotated_part, Megatron="--rotary-percent"),
    _field("soft_caps", "soft caps that differ from config.json", fills.soft_caps),
    _field("multipliers", "a multiplier of config.json that is not applied", fills.multipliers),
    _field("configured_window", "another use of the sliding window", fills.configured_windows),
    _edit(
        "biases",
        "are without the biases of projections: {label}",
        "load the biases, and set attention_bias and mlp_bias as in the checkpoint",
        r"layers\..*_proj\.bias$",
        queries__keys_and_values=("no_qkv_biases",),
        all=("no_biases",),
    ),
    _edit("gate_and_up", "have {label} exchanged", _CONVERTED, r"gate_(up_)?proj", gate_and_up=("gate_and_up",)),
    _edit(
        "embedding_scale",
        "have embeddings that are {label}",
        "apply the scale √hidden_size of the embeddings (Gemma) once",
        "embed_tokens",
        multiplied_by_the_root_of_the_hidden_size=("embeddings", 0.5),
        divided_by_the_root_of_the_hidden_size=("embeddings", -0.5),
    ),
    _edit(
        "rotary_pairs",
        "rotate other pairs of a head's numbers: {label}",
        "convert query and key weights for the engine's rotary embedding (halves, or neighbours)",
        "[qk]_proj",
        neighbours_in_place_of_halves=("rotary_pairs", False),
        halves_of_weights_for_neighbours=("rotary_pairs", True),
    ),
    _changes(
        "quantised_activations",
        "have quantised weights and activations: {label}",
        fills.quantised_activations,
        **_QUANTISED_FIX,
    ),
    _changes(
        "layers",
        "are computed with other layers: {label}",
        fills.moved_layers,
        family="parts",
        any="check the conversion of pipeline stages and the order of layers",
    ),
    _held("layer_of_weights", "are those of the announced weights with {label}", fills.layer_parts),
    _held("projection_of_weights", "are those of the announced weights with {label}", fills.projections),
    _held("rank_of_weights", "are those of the announced weights with the tensor-parallel {label}", fills.ranks),
    _held("expert_of_weights", "are those of the announced weights with {label}", fills.single_experts),
    _changes(
        "query_heads", "have query heads in another order: {label}", fills.query_heads, family="parts", any=_CONVERTED
    ),
)
"""All causes, in the order in which they are tried within their family."""


def variants_of(family: str, subject: Subject, side: str) -> Iterator[Variant]:
    """Yield the variants of a family for a side."""
    for cause in CATALOGUE:
        if cause.family == family:
            yield from cause.fill(subject, side)
