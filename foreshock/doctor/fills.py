"""The values to try for rows of the catalogue, from what is known of the models.

Each function yields, for a side of a subject, the label of a variant and the values of its change.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foreshock.doctor.changes import Subject, hashable

Labelled = Iterator[tuple[str, dict[str, Any]]]
Fill = Callable[[Subject, str], Labelled]
"""For a side of a subject: the label of each variant, and the values of its change."""


def _others(subject: Subject, side: str) -> Iterator[str]:
    """Yield the weights other than a side's announced ones, alternately from the last and the first version."""
    names = sorted(
        (name for name in subject.weights if name != subject.announced[side]),
        key=lambda each: subject.versions.get(each, 0),
    )
    while names:
        yield names.pop()
        if names:
            yield names.pop(0)


def _configuration(subject: Subject, side: str) -> Mapping[str, Any]:
    return subject.configurations[subject.announced[side]]


def _of_others(label: str, values: Callable[[str], dict[str, Any]]) -> Fill:
    return lambda subject, side: ((label.format(name), values(name)) for name in _others(subject, side))


whole = _of_others("{}", lambda name: {"weights": name})
cached = _of_others("{}", lambda name: {"prompt_weights": name})
delta = _of_others("since {}", lambda name: {"delta": (name, None)})
"""Updates since each of the other weights, of which `Replays` fits a fraction."""


def _parts(labels: Callable[[Subject, str], Mapping[str, str]]) -> Fill:
    """Return a fill that tries parts, by their labels, of each of the other weights."""

    def fill(subject: Subject, side: str) -> Labelled:
        for label, part in labels(subject, side).items():
            for name in _others(subject, side):
                yield f"{label} of {name}", {"part": (name, part)}

    return fill


def _same(*labels: str) -> dict[str, str]:
    return dict(zip(labels, labels, strict=True))


def _layers(subject: Subject, side: str) -> dict[str, str]:
    """Return first or last layers, as pipeline stages hold them (halves and quarters), then each layer."""
    number = subject.layers
    found: dict[str, str] = {}
    for border in (round(number * part / 4) for part in (2, 1, 3)):
        for first, last in ((0, border - 1), (border, number - 1)):
            if first < last and 0 < border < number:
                found[f"layers {first} to {last}"] = f"layers.{first}-{last}"
    return found | {f"layer {layer}": f"layers.{layer}" for layer in range(number)}


_PROJECTIONS = {
    "the queries": "q_proj",
    "the keys": "k_proj",
    "the values": "v_proj",
    "the attention outputs": "o_proj",
}
_PROJECTIONS |= {"the gates": "gate_proj", "the up projections": "up_proj", "the down projections": "down_proj"}
_PROJECTIONS |= {"the attention": "attention", "the MLPs": "mlp", "the norms": "norms"}
_MOST_EXPERTS = 64


def _experts(subject: Subject, side: str) -> dict[str, str]:
    number = _number_of_experts(_configuration(subject, side))
    return _same(*(f"expert {each}" for each in range(number if number <= _MOST_EXPERTS else 0)))


parts = _parts(lambda *_: _same("lm_head", "embeddings", "layers", "other"))
layer_parts = _parts(_layers)
projections = _parts(lambda *_: _PROJECTIONS)
ranks = _parts(lambda *_: _same(*(f"rank {rank} of {number}" for number in (2, 4, 8) for rank in range(number))))
single_experts = _parts(_experts)


def engines(subject: Subject, side: str) -> Labelled:
    """Yield the engines that have an option; the others are ordinary numerics."""
    asked = subject.engines if side == "rollout" else ()
    return ((each, {"engine": each}) for each in asked if ":" in each)


def moved_layers(subject: Subject, side: str) -> Labelled:
    for layer in range(subject.layers):
        yield f"layer {layer} is skipped", {"tensors": ("skipped", layer)}
    for layer in range(subject.layers - 1):
        yield f"layers {layer} and {layer + 1} are exchanged", {"tensors": ("exchanged", layer, layer + 1)}


_IGNORED_FIELDS = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    "router_aux_loss_coef",
}


def differing_fields(subject: Subject, one: str, other: str) -> list[str]:
    """Return the fields that differ between the config.json of two weights, and that a forward pass can depend on."""
    first, second = subject.configurations[one], subject.configurations[other]
    fields = sorted((first.keys() | second.keys()) - _IGNORED_FIELDS)
    return [field for field in fields if first.get(field) != second.get(field)]


def other_configuration(subject: Subject, side: str) -> Labelled:
    mine = subject.announced[side]
    for name in subject.weights:
        for name_of_field in differing_fields(subject, mine, name):
            value = subject.configurations[name].get(name_of_field)
            yield f"{name_of_field} = {value}", {"config": (name_of_field, hashable(value))}


Values = Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]
"""For the announced configuration: fields, and other values of them."""


def fields(of: Values) -> Fill:
    """Return a fill that tries other values of configuration fields."""

    def fill(subject: Subject, side: str) -> Labelled:
        configuration = _configuration(subject, side)
        for name, value in _of_each_rope(of, configuration):
            if value != configuration.get(name):
                words = f"{value:g}" if isinstance(value, float) else value
                yield f"{name} = {words}", {"config": (name, hashable(value))}

    return fill


def _of_each_rope(of: Values, configuration: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what `of` tries. Of a model with a rotary embedding for each kind of layer (Gemma 3) one is changed."""
    ropes = _rope(configuration)
    if not ropes or not all(isinstance(rope, Mapping) for rope in ropes.values()):
        yield from of(configuration)
        return
    for kind, rope in ropes.items():
        for name, value in of({**configuration, "rope_parameters": rope}):
            changed = {"rope_parameters": value, "rope_theta": {**rope, "rope_theta": value}}
            changed["rope_factor"] = {**rope, "rope_type": "linear", "factor": value}
            yield ("rope_parameters", {**ropes, kind: changed[name]}) if name in changed else (name, value)


def _rope(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return dict(configuration.get("rope_parameters") or {})


def theta(configuration: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    theta = _rope(configuration).get("rope_theta") or configuration.get("rope_theta") or 0
    for value in dict.fromkeys([1e4, 1e5, 5e5, 1e6, 5e6, 1e7, theta * 10, theta / 10, theta * 2]) if theta else ():
        if value != theta:
            yield "rope_theta", value


def linear(configuration: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return (("rope_factor", value) for value in (2.0, 4.0, 8.0, 0.5))


def unscaled(configuration: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    rope = _rope(configuration)
    if rope.get("rope_type", "default") != "default":
        yield "rope_parameters", {"rope_type": "default", "rope_theta": rope.get("rope_theta")}


def scaled_as(kind: str) -> Values:
    """Return scalings of positions by the factors that are usual, if the configuration has none."""

    def of(configuration: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        rope = _rope(configuration)
        longest = configuration.get("max_position_embeddings")
        if rope.get("rope_type") != "default" or not longest or not rope.get("rope_theta"):
            return
        more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        for factor in (8.0, 32.0) if kind == "llama3" else (4.0, 2.0):
            for original in dict.fromkeys((longest, int(longest / factor), *((8192,) if kind == "llama3" else ()))):
                scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
                yield "rope_parameters", rope | scaling | more

    return of


def rotated_part(configuration: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    rope = _rope(configuration)
    for value in (1.0, 0.5, 0.25) if "partial_rotary_factor" in rope else ():
        if value != rope["partial_rotary_factor"]:
            yield "rope_parameters", rope | {"partial_rotary_factor": value}


def present(**of_fields: tuple[Any, ...]) -> Values:
    """Return values of the fields that the configuration has."""
    return lambda configuration: (
        (field, value)
        for field, tried in of_fields.items()
        for value in (tried if configuration.get(field) is not None else ())
    )


_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu")
epsilons = present(rms_norm_eps=(1e-6, 1e-5, 1e-8, 1e-4, 1e-3, 1e-2), layer_norm_eps=(1e-5, 1e-6, 1e-12))
activations = present(hidden_act=_ACTIVATIONS, hidden_activation=_ACTIVATIONS)
soft_caps = present(attn_logit_softcapping=(None,), final_logit_softcapping=(None,))
# Those of Granite, MiniCPM and Cohere.
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale")
multipliers = present(**dict.fromkeys(_MULTIPLIERS, (1.0,)))


def experts(configuration: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    number = configuration.get("num_experts_per_tok") or 0
    for value in (number - 1, number + 1, 1) if number else ():
        if 0 < value <= _number_of_experts(configuration):
            yield "num_experts_per_tok", value


def _number_of_experts(configuration: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(int(configuration.get(name) or 0) for name in names)


def routing_weights(configuration: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from toggled("norm_topk_prob")(configuration)
    yield from present(routed_scaling_factor=(1.0,))(configuration)


def configured_windows(configuration: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kinds = configuration.get("layer_types") or []
    if "sliding_attention" in kinds:
        yield "layer_types", ["full_attention"] * len(kinds)
    if "full_attention" in kinds and configuration.get("sliding_window"):
        yield "layer_types", ["sliding_attention"] * len(kinds)


def toggled(field: str) -> Values:
    return lambda configuration: ((field, not value) for value in [configuration.get(field)] if isinstance(value, bool))


def _words(label: str) -> str:
    return label.replace("__", ", ").replace("_", " ")


def values(name: str, pattern: str = "", **labels: Any) -> Fill:
    """Return a fill that tries values of a change, if the model has a tensor whose name has `pattern`."""

    def fill(subject: Subject, side: str) -> Labelled:
        is_present = not pattern or any(re.search(pattern, each) for each in subject.tensors)
        return ((_words(label), {name: value}) for label, value in labels.items() if is_present)

    return fill


def quantised_activations(subject: Subject, side: str) -> Labelled:
    for kind, by in {"channel": "channel", "tensor": "tensor", "block": "block of 128"}.items():
        of_values = "fp8_block" if kind == "block" else "fp8_channel"  # the rows of an activation are tokens
        yield f"fp8 per {by}", {"quantise": f"fp8_{kind}", "activations": of_values}


def query_heads(subject: Subject, side: str) -> Labelled:
    """Yield queries in the order of another grouping by key-value heads, in all layers or in one."""
    configuration = _configuration(subject, side)
    groups = configuration.get("num_key_value_heads") or 1
    if 1 < groups < (configuration.get("num_attention_heads") or 1):
        yield "grouped otherwise, with their outputs", {"tensors": ("query_heads", True, r"\d+")}
        yield "grouped otherwise", {"tensors": ("query_heads", False, r"\d+")}
        for layer in range(subject.layers):
            yield f"grouped otherwise in layer {layer}", {"tensors": ("query_heads", False, str(layer))}


def attention_scales(subject: Subject, side: str) -> Labelled:
    size = _configuration(subject, side).get("head_dim")
    for label, factor in (("half", 0.5), ("twice", 2.0), ("not divided by √head_dim", float(size or 0) ** 0.5)):
        if factor not in (0.0, 1.0):
            yield label, {"attention_scale": factor}


def windows(subject: Subject, side: str) -> Labelled:
    size = 8
    while size < subject.longest:
        yield f"a window of {size} tokens", {"visible": ("window", size)}
        size *= 2


_PROMPT_IDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_LAST_IDS = 16
"""Most last ids of a prompt that are cut: a template's beginning of the answer has a few."""
# Rotary positions are relative: first ids that are missing and those that are masked give the same log-probs.
_PROMPTS = {"first": "without the first {} ids, or without attention to them"}
_PROMPTS |= {"last": "without the last {} ids", "keep": "only the last {} ids"}


def another_first_id(subject: Subject, side: str) -> Labelled:
    return ((f"id {token} before the first one", {"prompt": ("before", token)}) for token in subject.first_ids)


def prompts(kind: str) -> Fill:
    """Return a fill that tries prompts without some first or last ids; the search fits their number."""

    def fill(subject: Subject, side: str) -> Labelled:
        least = subject.longest if kind == "keep" else subject.shortest_prompt
        tried = dict.fromkeys((*([subject.common_prompt] if kind == "first" else []), *_PROMPT_IDS))
        for number in (each for each in tried if 0 < each < least and (kind != "last" or each <= _LAST_IDS)):
            yield prompt_of(kind, number)

    return fill


def prompt_of(kind: str, number: int) -> tuple[str, dict[str, Any]]:
    """Return the label and the values of a prompt without some ids."""
    return _PROMPTS[kind].format(number), {"prompt": (kind, number)}


def packed(subject: Subject, side: str) -> Labelled:
    """Yield numbers of rollouts in one row, with and without positions that start again."""
    for size in (2, 4, 8):
        yield f"{size} rollouts in one row, positions not reset", {"packed": (size, False)}
        yield f"{size} rollouts in one row, positions reset", {"packed": (size, True)}
