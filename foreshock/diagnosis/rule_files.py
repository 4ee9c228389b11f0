"""Rules as TOML: a file that changes a run's rules from some step on, and rules written as such a file.

    version = 1
    effective_from_step = 0

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
length surge from the step on, and `loop` has the gains of the control loop; fields that they do not set have their
defaults.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Final, TypeVar, get_args

from foreshock.diagnosis.border import RULE as REFUSED_RULE
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE
from foreshock.diagnosis.rule import Cause, Direction, Effect, ThresholdRule
from foreshock.diagnosis.statistics import Pooling
from foreshock.diagnosis.surge_state import RULES as SURGE_RULES
from foreshock.errors import ConfigurationError, did_you_mean
from foreshock.learning_rate.loop import DEFAULT_LOOP, LoopSettings
from foreshock.learning_rate.schedule import ScheduleSettings
from foreshock.severity import Severity

FORMAT_VERSION = 1
MOST_RULES = 64
"""Largest number of rules of a run; evaluating so many takes 0.6 ms a step."""

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
_TEXTS = ("key", "why", "what_to_do", "source", "reference")
_NUMBERS = ("absolute", "relative", "ideal")
_WHOLE = ("minimum_duration", "cooldown_steps", "least_tokens")
_SWITCHES = ("lag_zero_only", "corroborates_surge", "follows_learning")
_FIELDS = (*_TEXTS, *_NUMBERS, *_WHOLE, *_SWITCHES, *_LITERALS)
_DETECTORS = frozenset({*SURGE_RULES.values(), FALL_RULE, COLLAPSE_RULE, REFUSED_RULE, "detection_stopped"})
_OWN_SOURCE = "a rule of this run"

Settings = TypeVar("Settings", ScheduleSettings, LoopSettings)


class InvalidRules(ConfigurationError):
    """A file of rules that is no TOML, names an unknown field, or makes a rule that is not possible."""


@dataclass(frozen=True, slots=True)
class RuleChanges:
    """The tables of a file: rule → field → value (None: disabled). They hold from `effective_from_step` on."""

    effective_from_step: int
    tables: Mapping[str, Mapping[str, Any] | None]
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
            raise InvalidRules(f"a run may have at most {MOST_RULES} rules, got {len(kept)}")
        return kept


def parse_rules(text: str) -> RuleChanges:
    """Return what a file changes. Raises InvalidRules; `applied_to` checks the rules that result."""
    if len(text) > LARGEST_TEXT:
        raise InvalidRules(f"a file of rules may have at most {LARGEST_TEXT} characters, got {len(text)}")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRules(f"not valid TOML: {error}") from error
    unknown = sorted(content.keys() - {"version", "effective_from_step", "rules", "schedule", "loop"})
    if unknown:
        raise InvalidRules(
            f"unknown field {unknown[0]!r}; expected version, effective_from_step and tables [rules.NAME], "
            "[schedule] and [loop]"
        )
    if not _is_whole(content.get("version")) or content["version"] != FORMAT_VERSION:
        raise InvalidRules(f"version must be {FORMAT_VERSION}, got {content.get('version')!r}")
    first = content.get("effective_from_step", 0)
    if not _is_whole(first) or not 0 <= first < 2**53:
        raise InvalidRules(f"effective_from_step must be a whole number >= 0, got {first!r}")
    tables = content.get("rules", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidRules("rules must be tables: [rules.NAME]")
    checked = {name: _checked(name, table) for name, table in sorted(tables.items())}
    schedule = _settings(content.get("schedule", {}), "schedule", DEFAULT_SCHEDULE)
    return RuleChanges(first, checked, schedule, _settings(content.get("loop", {}), "loop", DEFAULT_LOOP))


def changes_to_toml(changes: RuleChanges) -> str:
    """Return changes as the file that `parse_rules` reads."""
    tables = {name: {"enabled": False} if table is None else table for name, table in changes.tables.items()}
    return _file(changes.effective_from_step, tables, changes.schedule, changes.loop)


def to_toml(
    rules: Iterable[ThresholdRule],
    effective_from_step: int = 0,
    schedule: ScheduleSettings = DEFAULT_SCHEDULE,
    loop: LoopSettings = DEFAULT_LOOP,
) -> str:
    """Return the rules, the schedule and the loop as a file, without the fields that have their default."""
    tables: dict[str, dict[str, Any]] = {}
    for rule in rules:
        values = {field: getattr(rule, field.name) for field in fields(rule) if field.name != "name"}
        tables[rule.name] = {
            field.name: value
            for field, value in values.items()
            if value is not None and (field.default is MISSING or value != field.default or field.name == "cause")
        }
    return _file(effective_from_step, tables, schedule, loop)


def _file(
    effective_from_step: int, tables: Mapping[str, Mapping[str, Any]], schedule: ScheduleSettings, loop: LoopSettings
) -> str:
    """Return a file with these tables of rules and the constants that differ from their defaults."""
    lines = [f"version = {FORMAT_VERSION}", f"effective_from_step = {effective_from_step}"]
    headed = {f"rules.{name if name.isidentifier() else _toml(name)}": table for name, table in tables.items()}
    for of, settings, usual in (("schedule", asdict(schedule), DEFAULT_SCHEDULE), ("loop", asdict(loop), DEFAULT_LOOP)):
        if own := {name: value for name, value in settings.items() if value != getattr(usual, name)}:
            headed[of] = own
    for heading, table in headed.items():
        lines += ["", f"[{heading}]", *(f"{field} = {_toml(value)}" for field, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: str | float | bool) -> str:
    # JSON's strings, booleans and numbers are TOML's; a float keeps its point or exponent.
    return json.dumps(value, ensure_ascii=False)


def _checked(name: str, table: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if name in _DETECTORS:
        raise InvalidRules(
            f"{name} is a detector, not a rule with a threshold: it cannot be changed by a file of rules"
        )
    if (
        not 0 < len(name) <= 100
        or not name.isascii()
        or any(not (letter.isalnum() or letter in "_-.") for letter in name)
    ):
        raise InvalidRules(f"the name of a rule must be letters, digits, '_', '-' and '.', got {name!r}")
    values = dict(table)
    enabled = values.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise InvalidRules(f"enabled of rule {name} must be true or false, got {enabled!r}")
    for field, value in values.items():
        if field not in _FIELDS:
            raise InvalidRules(
                f"rule {name} has the unknown field {field!r}{did_you_mean(field, _FIELDS)}; "
                f"fields: {', '.join(_FIELDS)}"
            )
        values[field] = _value(name, field, value)
    return values if enabled else None


def _value(name: str, field: str, value: Any) -> Any:
    if field in _LITERALS:
        if value not in _LITERALS[field]:
            raise InvalidRules(f"{field} of rule {name} must be one of {', '.join(_LITERALS[field])}, got {value!r}")
        return value
    if field in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InvalidRules(f"{field} of rule {name} must be a finite number, got {value!r}")
        return float(value)
    if field in _WHOLE:
        if not _is_whole(value) or not 0 <= value <= 1_000_000:
            raise InvalidRules(f"{field} of rule {name} must be a whole number from 0 to 1,000,000, got {value!r}")
        return value
    wanted = bool if field in _SWITCHES else str
    if not isinstance(value, wanted) or (isinstance(value, str) and not 0 < len(value) <= 1000):
        expected = "true or false" if wanted is bool else "a text of 1 to 1,000 characters"
        raise InvalidRules(f"{field} of rule {name} must be {expected}, got {value!r}")
    if field in ("key", "reference") and not all(str(value).removesuffix("@baseline").partition(":")[::2]):
        raise InvalidRules(f"{field} of rule {name} must be comparison:measure or scalars:name, got {value!r}")
    return value


def _settings(table: Any, of: str, usual: Settings) -> Settings:
    """Return the constants of the schedule or of the loop with those that the file's table sets."""
    names = [each.name for each in fields(usual)]
    if not isinstance(table, dict):
        raise InvalidRules(f"{of} must be a table: [{of}]")
    for name, value in table.items():
        if name not in names:
            raise InvalidRules(
                f"the {of} has the unknown field {name!r}{did_you_mean(name, names)}; fields: {', '.join(names)}"
            )
        if isinstance(getattr(usual, name), bool):
            if not isinstance(value, bool):
                raise InvalidRules(f"{name} of the {of} must be true or false, got {value!r}")
        elif isinstance(getattr(usual, name), int):
            if not _is_whole(value) or not 1 <= value <= 1_000_000:
                raise InvalidRules(f"{name} of the {of} must be a whole number from 1 to 1,000,000, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InvalidRules(f"{name} of the {of} must be a finite number, got {value!r}")
    if table.get("multiplier", 1.0) > LARGEST_MULTIPLIER:
        raise InvalidRules(f"multiplier of the {of} must be at most {LARGEST_MULTIPLIER:,}")
    try:
        return replace(usual, **table)
    except ValueError as error:
        raise InvalidRules(f"{of}: {error}") from error


def _changed(rule: ThresholdRule, table: Mapping[str, Any] | None) -> ThresholdRule | None:
    if table is None:
        return None
    return _made({field.name: getattr(rule, field.name) for field in fields(rule)} | dict(table))


def _added(name: str, table: Mapping[str, Any] | None, known: Mapping[str, ThresholdRule]) -> ThresholdRule:
    if table is None:
        raise InvalidRules(f"there is no rule {name} to disable{did_you_mean(name, known)}")
    missing = [field for field in ("key", "severity", "why", "what_to_do") if field not in table]
    if missing:
        raise InvalidRules(
            f"{name} is no known rule{did_you_mean(name, known)}; a new one needs {', '.join(missing)} too"
        )
    return _made({"name": name, "source": _OWN_SOURCE, "cause": "data", **table})


def _made(values: Mapping[str, Any]) -> ThresholdRule:
    try:
        return ThresholdRule(**values)
    except ValueError as error:
        raise InvalidRules(str(error)) from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
