"""`foreshock rules`: show the rules as TOML, and check a file of rules."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshock.errors import ConfigurationError
from foreshock.model_kind import MODEL_KINDS, ModelKind

if TYPE_CHECKING:
    from foreshock.diagnosis.rule import ThresholdRule
    from foreshock.diagnosis.rule_files import RuleChanges


class RulesCommand:
    """`foreshock rules show [FILE]` and `foreshock rules check FILE`."""

    help = "show the alert rules as TOML, or check a file of rules"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        show = actions.add_parser("show", help="print the default rules, or those that a file makes of them")
        show.add_argument("file", nargs="?", type=Path, metavar="FILE", help="TOML file of changes")
        check = actions.add_parser("check", help="say what a file changes, or what is wrong with it")
        check.add_argument("file", type=Path, metavar="FILE", help="TOML file of changes")
        for each in (show, check):
            each.add_argument("--model-kind", choices=MODEL_KINDS, help="whose healthy ranges hold (default: dense)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the rules or the changes. Raises InvalidRules for a file that is not valid."""
        from foreshock.diagnosis.default_rules import default_rules
        from foreshock.diagnosis.rule_files import DEFAULT_SCHEDULE, to_toml
        from foreshock.learning_rate.loop import DEFAULT_LOOP

        model_kind: ModelKind | None = arguments.model_kind
        before = default_rules(model_kind)
        if arguments.file is None:
            print(to_toml(before), end="")
            return 0
        changes, after = _changed(arguments.file, model_kind)
        first = changes.effective_from_step
        if arguments.action == "show":
            print(to_toml(after, first, changes.schedule, changes.loop), end="")
            return 0
        old, new = {rule.name: rule for rule in before}, {rule.name: rule for rule in after}
        lines = [f"{name}: disabled" for name in old if name not in new]
        lines += [f"{name}: added" for name in new if name not in old]
        compared: list[tuple[str, Any, Any]] = [(name, old[name], new[name]) for name in old if name in new]
        compared += [("schedule", DEFAULT_SCHEDULE, changes.schedule), ("loop", DEFAULT_LOOP, changes.loop)]
        for name, default, chosen in compared:
            for each in fields(default):
                usual, value = getattr(default, each.name), getattr(chosen, each.name)
                if value != usual:
                    lines.append(f"{name}: {each.name} {usual!r} → {value!r}")
        print("\n".join([f"{arguments.file} is valid; from step {first} on:", *(lines or ["nothing changes"])]))
        return 0


def _changed(path: Path, model_kind: ModelKind | None) -> tuple[RuleChanges, tuple[ThresholdRule, ...]]:
    from foreshock.diagnosis.default_rules import default_rules
    from foreshock.diagnosis.rule_files import InvalidRules, parse_rules

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    try:
        changes = parse_rules(text)
        return changes, changes.applied_to(default_rules(model_kind))
    except InvalidRules as error:
        raise InvalidRules(f"{path}: {error}") from error


command = RulesCommand()
