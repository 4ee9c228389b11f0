"""Files of rules: what they change, what is refused, and that printed rules are read back as they were."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from foreshock.commands.rules import command
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.detectors import RulesFromStep, WarningConfiguration
from foreshock.diagnosis.rule_files import InvalidRules, changes_to_toml, parse_rules, to_toml
from foreshock.model_kind import MODEL_KINDS, ModelKind
from tests.foreshock.diagnosis.curves import closed_steps, watch

HEAD = "version = 1\n"
OWN = '[rules.own]\nkey = "scalars:x"\nabsolute = 1\nseverity = "info"\nwhy = "w"\nwhat_to_do = "d"\n'


@pytest.mark.parametrize("model_kind", [None, *MODEL_KINDS])
def test_printed_rules_are_read_back_as_they_were(model_kind: ModelKind | None) -> None:
    rules = default_rules(model_kind)
    changes = parse_rules(to_toml(rules, 7))
    assert changes.effective_from_step == 7
    assert changes.applied_to(rules) == rules
    # Also without the defaults below: the file is complete.
    assert {rule.name: rule for rule in changes.applied_to(())} == {rule.name: rule for rule in rules}


def test_file_changes_adds_and_disables_rules() -> None:
    text = HEAD + "[rules.mismatch_rise]\nrelative = 3\n[rules.entropy_fall]\nenabled = false\n" + OWN
    rules = {rule.name: rule for rule in parse_rules(text).applied_to(default_rules())}
    before = {rule.name: rule for rule in default_rules()}
    assert rules["mismatch_rise"].relative == 3.0
    assert rules.keys() == (before.keys() - {"entropy_fall"}) | {"own"}
    assert [name for name in before if name in rules and rules[name] != before[name]] == ["mismatch_rise"]
    assert rules["own"].source == "a rule of this run"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "version must be 1, got None"),
        ("version = 1\nversion = 2", "not valid TOML"),
        ("version = true", "version must be 1"),
        (HEAD + "rule = 1", "unknown field 'rule'"),
        (HEAD + "effective_from_step = -1", "effective_from_step must be a whole number >= 0, got -1"),
        (HEAD + "effective_from_step = true", "effective_from_step must be a whole number"),
        (HEAD + "rules = 3", "rules must be tables"),
        (HEAD + '[rules."a b"]\n', "the name of a rule must be"),
        (HEAD + "[rules.mismatch_rise]\nrelative = nan", "must be a finite number"),
        (HEAD + "[rules.mismatch_rise]\nrelative = true", "must be a finite number, got True"),
        (HEAD + "[rules.mismatch_rise]\nrelative = 0.5", "must be above 1"),
        (HEAD + "[rules.entropy_fall]\nrelative = 2.0", "must be below 1"),
        (HEAD + "[rules.mismatch_rise]\nseverity = 'bad'", "must be one of info, warning, critical, got 'bad'"),
        (HEAD + "[rules.mismatch_rise]\nminimum_duration = 0", "minimum_duration >= 1"),
        (HEAD + "[rules.mismatch_rise]\nminimum_duration = 1.5", "must be a whole number"),
        (HEAD + "[rules.mismatch_rise]\nwhy = ''", "must be a text of 1 to 1,000 characters"),
        (HEAD + "[rules.mismatch_rise]\nlag_zero_only = 1", "must be true or false"),
        (HEAD + "[rules.mismatch_rise]\nkey = 'k3'", "must be comparison:measure"),
        (HEAD + "[rules.mismatch_rise]\neffect = 'schedule'", "must be one of none, hold, halve"),
        (HEAD + "[rules.mismatch_rise]\nenabled = 1", "enabled of rule mismatch_rise must be true or false"),
        (HEAD + "[rules.reward_fall]\nenabled = false", "is a detector"),
        (HEAD + "[rules.no]\nenabled = false", "there is no rule no to disable"),
        (HEAD + "[rules.own]\nkey = 'scalars:x'", "a new one needs severity, why, what_to_do too"),
        (HEAD + OWN.replace("absolute = 1\n", ""), "has no threshold"),
        (HEAD + "#" * 70_000, "at most 65536 characters"),
        (HEAD + "schedule = 3", "schedule must be a table"),
        (HEAD + "[schedule]\nmultiplyer = 2", r"unknown field 'multiplyer'.*multiplier, factor, floor, minimum_period"),
        (HEAD + "[schedule]\nmultiplier = nan", "multiplier of the schedule must be a finite number, got nan"),
        (HEAD + "[schedule]\nmultiplier = 0", "schedule: multiplier must be above 0, got 0"),
        (HEAD + "[schedule]\nmultiplier = 1e9", "multiplier of the schedule must be at most 1,000"),
        (HEAD + "[schedule]\nfactor = 1", "schedule: factor must satisfy 0 < factor < 1, got 1"),
        (HEAD + "[schedule]\nfloor = -0.1", "schedule: floor must satisfy 0 <= floor <= 1, got -0.1"),
        (HEAD + "[schedule]\nminimum_period = 4.5", "minimum_period of the schedule must be a whole number from 1"),
    ],
)
def test_invalid_file_is_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(InvalidRules, match=message):
        parse_rules(text).applied_to(default_rules())


def test_number_of_rules_is_bounded() -> None:
    text = HEAD + "".join(OWN.replace("rules.own", f"rules.own{number}") for number in range(200))
    with pytest.raises(InvalidRules, match="at most 64 rules, got 2"):
        parse_rules(text).applied_to(default_rules())


def test_rules_hold_from_their_step_on_and_a_removed_one_clears() -> None:
    own = parse_rules(HEAD + OWN).applied_to(())
    changes = (RulesFromStep(10, own), RulesFromStep(30, ()))
    configuration = WarningConfiguration(rules=(), changed_rules=changes)
    assert "scalars:x" in configuration.keys
    _, events = watch(closed_steps({"scalars:x": [2.0] * 40}), configuration)
    assert [(event.change, event.step, event.fired_step) for event in events] == [
        ("fired", 14, 14),
        ("cleared", 30, 14),
    ]
    # The newest change wins where several hold.
    back = WarningConfiguration(rules=(), changed_rules=(*changes, RulesFromStep(20, own)))
    assert back.rules_at(9) == ()
    assert back.rules_at(35) == own


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(words))


def test_command_shows_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "--model-kind", "moe") == 0
    assert parse_rules(capsys.readouterr().out).applied_to(()) != ()
    file = tmp_path / "rules.toml"
    file.write_text(HEAD + "effective_from_step = 5\n[rules.gradient_rise]\nrelative = 5.0\n" + OWN)
    assert run("check", str(file)) == 0
    assert capsys.readouterr().out == (
        f"{file} is valid; from step 5 on:\nown: added\ngradient_rise: relative 3.0 → 5.0\n"
    )
    assert run("show", str(file)) == 0
    assert "[rules.own]" in capsys.readouterr().out
    file.write_text(HEAD + "[schedule]\nmultiplier = 2.5\n")
    assert run("check", str(file)) == 0
    assert capsys.readouterr().out == f"{file} is valid; from step 0 on:\nschedule: multiplier 1.8 → 2.5\n"
    assert run("show", str(file)) == 0
    assert "[schedule]\nmultiplier = 2.5\n" in capsys.readouterr().out
    file.write_text(HEAD + "[rules.gradient_rise]\nrelative = 0\n")
    with pytest.raises(InvalidRules, match=r"rules\.toml: relative of rule gradient_rise must be above 1, got 0"):
        run("check", str(file))


def test_changes_are_printed_as_the_file_that_they_were_read_from() -> None:
    text = (
        "version = 1\neffective_from_step = 7\n[rules.entropy_fall]\nenabled = false\n"
        "[rules.'a.b']\nkey = 'scalars:x'\nabsolute = 1.0\nseverity = 'info'\nwhy = 'say \"so\"'\nwhat_to_do = 'd'\n"
    )
    for schedule in ("", "[schedule]\nmultiplier = 2\nfloor = 0.25\nminimum_period = 60\n"):
        changes = parse_rules(text + schedule)
        assert parse_rules(changes_to_toml(changes)) == changes
        printed = to_toml(default_rules(), 7, changes.schedule)
        assert parse_rules(printed).schedule == changes.schedule
        assert ("[schedule]" in printed) == bool(schedule)


def test_schedule_holds_for_surges_from_its_step_on() -> None:
    file = parse_rules(HEAD + "[schedule]\nmultiplier = 2.5\nminimum_period = 60\n")
    changes = (RulesFromStep(100, (), file.schedule),)
    configuration = WarningConfiguration(rules=(), changed_rules=changes)
    assert configuration.schedule_at(99) == WarningConfiguration().schedule
    assert configuration.schedule_at(100).period(110) == 275
    assert configuration.digest() != WarningConfiguration(rules=(), changed_rules=(RulesFromStep(100, ()),)).digest()
    lengths = [500.0 * (1.0 + 0.02 * (index % 3)) for index in range(110)] + [1600.0] * 20
    _, events = watch(closed_steps({"rollout:response_length_mean": lengths}), configuration)
    surge = next(event for event in events if event.rule == "length_surge")
    assert surge.evidence["surge_step"] == 111
    assert surge.evidence["decay_period"] == 277
