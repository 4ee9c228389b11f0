"""The values to try for rows of the catalogue, from what is known of the models.

Each function yields, for a side of a subject, the label of a variant and the values of its change.
"""

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


def whole(subject: Subject, side: str) -> Labelled:
    return ((name, {"weights": name}) for name in _others(subject, side))


def cached(subject: Subject, side: str) -> Labelled:
    return ((name, {"prompt_weights": name}) for name in _others(subject, side))


def engines(subject: Subject, side: str) -> Labelled:
    """Yield the engines that have an option; the others are ordinary numerics."""
    asked = subject.engines if side == "rollout" else ()
    return ((each, {"engine": each}) for each in asked if ":" in each)


def delta(subject: Subject, side: str) -> Labelled:
    """Yield updates of which a fraction is fitted (`Replays`): since each of the other weights."""
    return ((f"since {name}", {"delta": (name, None)}) for name in _others(subject, side))


def parts(subject: Subject, side: str) -> Labelled:
    for part in ("lm_head", "embeddings", "layers", "other"):
        for name in _others(subject, side):
            yield f"{part} of {name}", {"part": (name, part)}


def layer_parts(subject: Subject, side: str) -> Labelled:
    yield from stages(subject, side)
    for layer in range(subject.layers):
        for name in _others(subject, side):
            yield f"layer {layer} of {name}", {"part": (name, f"layers.{layer}")}


def stages(subject: Subject, side: str) -> Labelled:
    """Yield first or last layers of other weights, as a pipeline stage holds them: a half, a quarter, three
    quarters."""
    number = subject.layers
    borders = dict.fromkeys(round(number * part / 4) for part in (2, 1, 3))
    for border in (each for each in borders if 0 < each < number):
        for first, last in ((0, border - 1), (border, number - 1)):
            for name in _others(subject, side) if first < last else ():
                yield f"layers {first} to {last} of {name}", {"part": (name, f"layers.{first}-{last}")}


def moved_layers(subject: Subject, side: str) -> Labelled:
    for layer in range(subject.layers):
        yield f"layer {layer} is skipped", {"layers": ("skip", layer, layer)}
    for layer in range(subject.layers - 1):
        yield f"layers {layer} and {layer + 1} are exchanged", {"layers": ("swap", layer, layer + 1)}


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


Field = tuple[str, Callable[[Mapping[str, Any]], list[Any]]]


def fields(*of_fields: Field) -> Fill:
    """Return a fill that tries values of configuration fields; each field's function gives them."""

    def fill(subject: Subject, side: str) -> Labelled:
        configuration = subject.configurations[subject.announced[side]]
        for name, values in of_fields:
            for value in values(configuration):
                if value != configuration.get(name):
                    yield (
                        f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}",
                        {"config": (name, value)},
                    )

    return fill


def theta(configuration: Mapping[str, Any]) -> list[float]:
    theta = (configuration.get("rope_parameters") or {}).get("rope_theta") or configuration.get("rope_theta")
    if not theta:
        return []
    common = [1e4, 1e5, 5e5, 1e6, 5e6, 1e7]
    return [value for value in dict.fromkeys([*common, theta * 10, theta / 10, theta * 2]) if value != theta]


def if_present(field: str, *values: Any) -> Field:
    return field, lambda configuration: list(values) if configuration.get(field) is not None else []


def experts(configuration: Mapping[str, Any]) -> list[int]:
    number = configuration.get("num_experts_per_tok")
    most = configuration.get("num_experts") or configuration.get("num_local_experts") or 0
    return [value for value in (number - 1, number + 1, 1) if 0 < value <= most] if number else []


def toggled(field: str) -> Field:
    return field, lambda configuration: [not configuration[field]] if isinstance(configuration.get(field), bool) else []


def values(name: str, **labels: Any) -> Fill:
    def fill(subject: Subject, side: str) -> Labelled:
        return ((label.replace("_", " "), {name: value}) for label, value in labels.items())

    return fill


def attention_scales(subject: Subject, side: str) -> Labelled:
    size = subject.configurations[subject.announced[side]].get("head_dim")
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
_PROMPTS = {
    "first": "without the first {} ids, or without attention to them",
    "last": "without the last {} ids",
    "keep": "only the last {} ids",
}


def prompts(subject: Subject, side: str) -> Labelled:
    """Yield prompts with one more first id, and without some first or last ids; the search fits their number."""
    for token in subject.first_ids:
        yield f"id {token} before the first one", {"prompt": ("before", token)}
    numbers = {
        "first": [subject.common_prompt, *_PROMPT_IDS],
        "last": [each for each in _PROMPT_IDS if each <= _LAST_IDS],
        "keep": _PROMPT_IDS,
    }
    for kind, tried in numbers.items():
        least = subject.longest if kind == "keep" else subject.shortest_prompt
        for number in dict.fromkeys(each for each in tried if 0 < each < least):
            yield prompt_of(kind, number)


def prompt_of(kind: str, number: int) -> tuple[str, dict[str, Any]]:
    """Return the label and the values of a prompt without some ids."""
    return _PROMPTS[kind].format(number), {"prompt": (kind, number)}


LONGEST_ROW = 8
_PACKED = {
    f"{size} rollouts in one row, {how}": {"packed": (size, resets)}
    for size in (2, 4, LONGEST_ROW)
    for resets, how in ((False, "positions not reset"), (True, "positions reset"))
}


def packed(subject: Subject, side: str) -> Labelled:
    """Yield numbers of rollouts in one row, with and without positions that start again."""
    return iter(_PACKED.items())
