"""The file of rules: TOML that changes the default rules for all runs.

    [rules.mismatch_rise]
    relative = 3.0

    [rules.entropy_fall]
    enabled = false

    [rules.kl_high]
    key = "scalars:kl"
    absolute = 0.5
    severity = "warning"
    why = "The KL to the reference model is above 0.5."
    what_to_do = "Read some responses."

    [schedule]
    multiplier = 1.8
    minimum_period = 45

    [loop]
    set_point = 6e-3
    raises = false

A table of `rules` names a rule: it changes the fields of a known rule, or adds a new one. `schedule` is that of a
length surge, and `loop` has the gains of the control loop; fields that they do not set have their defaults.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from foreshock.diagnosis.border import RULE as REFUSED_RULE
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE
from foreshock.diagnosis.rule import DELIVERY_RULES, Cause, Direction, Effect, ThresholdRule
from foreshock.diagnosis.statistics import Pooling
from foreshock.diagnosis.surge_state import RULES as SURGE_RULES
from foreshock.errors import ConfigurationError, did_you_mean
from foreshock.learning_rate.control_loop import DEFAULT_LOOP, LoopSettings
from foreshock.learning_rate.length_decay import ScheduleSettings
from foreshock.model_kind import MODEL_KINDS
from foreshock.parsing import parse_toml
from foreshock.severity import Severity

FORMAT_VERSION = 1
MOST_RULES = 64
"""Largest number of rules; to evaluate them takes 0.6 ms a step."""

LARGEST_TEXT = 64 * 1024
"""Characters of a file."""

DEFAULT_SCHEDULE: Final = ScheduleSettings()

LARGEST_MULTIPLIER = 1_000
"""Largest multiplier of a schedule; a longer period would never end."""

_LITERALS: Final[Mapping[str, tuple[str, ...]]] = {
    "severity": get_args(Severity),
    "cause": get_args(Cause),
    "direction": get_args(Direction),
    "pooled": get_args(Pooling),
    "effect": get_args(Effect),
}
_KINDS: Final[Mapping[str, type]] = {
    **dict.fromkeys(("key", "why", "what_to_do", "source", "reference"), str),
    **dict.fromkeys(("absolute", "relative", "ideal"), float),
    **dict.fromkeys(("minimum_duration", "cooldown_steps", "least_tokens", "least_groups"), int),
    **dict.fromkeys(("lag_zero_only", "corroborates_surge", "follows_learning"), bool),
}
_FIELDS = (*_KINDS, *_LITERALS)
_DETECTORS = frozenset({*SURGE_RULES.values(), FALL_RULE, COLLAPSE_RULE, REFUSED_RULE, "detection_stopped"})
_OWN_SOURCE = "the file of rules"
_LINE = re.compile(r"at line (\d+)")

Settings = TypeVar("Settings", ScheduleSettings, LoopSettings)


class InvalidRules(ConfigurationError):
    """A file of rules that cannot be read, is not TOML, names an unknown field, or makes an invalid rule.

    `place` is the path of the keys of what is wrong, such as ``("rules", "mismatch_rise", "relative")``.
    """

    def __init__(self, message: str, *place: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True, slots=True, eq=False)
class RuleChanges:
    """What a file changes: rule → field → value (None: disabled), the schedule and the loop."""

    tables: Mapping[str, Mapping[str, Any] | None] = dataclasses.field(default_factory=dict)
    schedule: ScheduleSettings = DEFAULT_SCHEDULE
    loop: LoopSettings = DEFAULT_LOOP

    def applied_to(self, rules: Iterable[ThresholdRule]) -> tuple[ThresholdRule, ...]:
        """Return the rules with the changes, new ones last. Raises InvalidRules."""
        known = {rule.name: rule for rule in rules}
        found = [_changed(rule, self.tables[name]) if name in self.tables else rule for name, rule in known.items()] + [
            _added(name, table, known) for name, table in self.tables.items() if name not in known
        ]
        kept = tuple(rule for rule in found if rule is not None)
        if len(kept) > MOST_RULES:
            raise InvalidRules(f"there may be at most {MOST_RULES} rules, got {len(kept)}", "rules")
        return kept


NO_CHANGES: Final = RuleChanges()


def read_rules(path: Path) -> RuleChanges:
    """Return what a file changes, checked against the default rules of every kind of model.

    Raises InvalidRules with the file, the line and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRules(f"cannot read the file of rules {path}: {reason}") from error
    try:
        changes = parse_rules(text)
        for model_kind in (None, *MODEL_KINDS):
            changes.applied_to(default_rules(model_kind))
    except InvalidRules as error:
        if not error.place:
            found = _LINE.search(str(error.__cause__))
            line = int(found[1]) if found is not None else text.count("\n") + 1
        else:
            line = _line_of(text, error.place)
        raise InvalidRules(f"{path}, line {line}: {error}", *error.place) from error
    return changes


def _line_of(text: str, place: Sequence[str]) -> int:
    """Return the line at which the file sets the value at `place`."""
    lines, start = text.split("\n"), 1
    for end in range(1, len(lines) + 1):
        try:
            content: Any = parse_toml("\n".join(lines[:end]))
        except ValueError:
            # The value goes on in the next line.
            continue
        for key in place:
            content = content.get(key) if isinstance(content, dict) else None
        if content is not None:
            return start
        start = end + 1
    return 1


def parse_rules(text: str) -> RuleChanges:
    """Return what the text of a file changes. Raises InvalidRules; `applied_to` checks the rules that result."""
    if len(text) > LARGEST_TEXT:
        raise InvalidRules(f"a file of rules may have at most {LARGEST_TEXT} characters, got {len(text)}")
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise InvalidRules(f"not valid TOML: {error}") from error
    unknown = sorted(content.keys() - {"version", "rules", "schedule", "loop"})
    if unknown:
        raise InvalidRules(
            f"unknown field {unknown[0]!r}; expected tables [rules.NAME], [schedule] and [loop]", unknown[0]
        )
    version = content.get("version", FORMAT_VERSION)
    if not _is_whole(version) or version != FORMAT_VERSION:
        raise InvalidRules(f"version must be {FORMAT_VERSION}, got {version!r}", "version")
    tables = content.get("rules", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidRules("rules must be tables: [rules.NAME]", "rules")
    checked = {name: _checked(name, table) for name, table in sorted(tables.items())}
    schedule = _settings(content.get("schedule", {}), "schedule", DEFAULT_SCHEDULE)
    return RuleChanges(checked, schedule, _settings(content.get("loop", {}), "loop", DEFAULT_LOOP))


def _checked(name: str, table: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if name in DELIVERY_RULES:
        raise InvalidRules(f"{name} is about the delivery of rollouts: a file of rules cannot change it", "rules", name)
    if name in _DETECTORS:
        raise InvalidRules(
            f"{name} is a detector, not a rule with a threshold: it cannot be changed by a file of rules",
            "rules",
            name,
        )
    if (
        not 0 < len(name) <= 100
        or not name.isascii()
        or any(not (letter.isalnum() or letter in "_-.") for letter in name)
    ):
        raise InvalidRules(f"the name of a rule must be letters, digits, '_', '-' and '.', got {name!r}", "rules", name)
    values = dict(table)
    enabled = values.pop("enabled", True)
    _check(f"enabled of rule {name}", bool, enabled, 0, "rules", name, "enabled")
    for field, value in values.items():
        if field not in _FIELDS:
            raise InvalidRules(
                f"rule {name} has the unknown field {field!r}{did_you_mean(field, _FIELDS)}; "
                f"fields: {', '.join(_FIELDS)}",
                "rules",
                name,
                field,
            )
        values[field] = _value(name, field, value)
    return values if enabled else None


def _value(name: str, field: str, value: Any) -> Any:
    what, place = f"{field} of rule {name}", ("rules", name, field)
    if field in _LITERALS:
        if value not in _LITERALS[field]:
            raise InvalidRules(f"{what} must be one of {', '.join(_LITERALS[field])}, got {value!r}", *place)
        return value
    _check(what, _KINDS[field], value, 0, *place)
    if field in ("key", "reference") and not all(str(value).removesuffix("@baseline").partition(":")[::2]):
        raise InvalidRules(f"{what} must be comparison:measure or scalars:name, got {value!r}", *place)
    return float(value) if _KINDS[field] is float else value


def _check(what: str, kind: type, value: Any, least: int, *place: str) -> None:
    """Raise InvalidRules unless a value is of its kind; `least` is the smallest whole number."""
    if kind is bool:
        fits, allowed = isinstance(value, bool), "true or false"
    elif kind is int:
        fits, allowed = _is_whole(value) and least <= value <= 1_000_000, f"a whole number from {least} to 1,000,000"
    elif kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits, allowed = is_number and math.isfinite(value), "a finite number"
    else:
        fits, allowed = isinstance(value, str) and 0 < len(value) <= 1000, "a text of 1 to 1,000 characters"
    if not fits:
        raise InvalidRules(f"{what} must be {allowed}, got {value!r}", *place)


def _settings(table: Any, of: str, usual: Settings) -> Settings:
    """Return the constants of the schedule or of the loop with those that the file's table sets."""
    names = [each.name for each in fields(usual)]
    if not isinstance(table, dict):
        raise InvalidRules(f"{of} must be a table: [{of}]", of)
    for name, value in table.items():
        if name not in names:
            raise InvalidRules(
                f"the {of} has the unknown field {name!r}{did_you_mean(name, names)}; fields: {', '.join(names)}",
                of,
                name,
            )
        _check(f"{name} of the {of}", type(getattr(usual, name)), value, 1, of, name)
    if table.get("multiplier", 1.0) > LARGEST_MULTIPLIER:
        raise InvalidRules(f"multiplier of the {of} must be at most {LARGEST_MULTIPLIER:,}", of, "multiplier")
    try:
        return replace(usual, **table)
    except ValueError as error:
        raise InvalidRules(f"{of}: {error}", of) from error


def _changed(rule: ThresholdRule, table: Mapping[str, Any] | None) -> ThresholdRule | None:
    if table is None:
        return None
    return _made({field.name: getattr(rule, field.name) for field in fields(rule)} | dict(table))


def _added(name: str, table: Mapping[str, Any] | None, known: Mapping[str, ThresholdRule]) -> ThresholdRule:
    if table is None:
        raise InvalidRules(f"there is no rule {name} to disable{did_you_mean(name, known)}", "rules", name)
    missing = [field for field in ("key", "severity", "why", "what_to_do") if field not in table]
    if missing:
        raise InvalidRules(
            f"{name} is no known rule{did_you_mean(name, known)}; a new one needs {', '.join(missing)} too",
            "rules",
            name,
        )
    return _made({"name": name, "source": _OWN_SOURCE, "cause": "data", **table})


def _made(values: Mapping[str, Any]) -> ThresholdRule:
    try:
        return ThresholdRule(**values)
    except ValueError as error:
        raise InvalidRules(str(error), "rules", values["name"]) from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
