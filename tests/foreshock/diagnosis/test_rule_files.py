"""Files of rules: what they change, and what is refused, with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.detectors import WarningConfiguration
from foreshock.diagnosis.rule_files import InvalidRules, parse_rules, read_rules
from foreshock.learning_rate.control_loop import DEFAULT_LOOP
from tests.foreshock.diagnosis.curves import closed_steps, watch

HEAD = "version = 1\n"
OWN = '[rules.own]\nkey = "scalars:x"\nabsolute = 1\nseverity = "info"\nwhy = "w"\nwhat_to_do = "d"\n'


def test_file_changes_adds_and_disables_rules() -> None:
    text = HEAD + "[rules.mismatch_rise]\nrelative = 3\n[rules.entropy_fall]\nenabled = false\n" + OWN
    rules = {rule.name: rule for rule in parse_rules(text).applied_to(default_rules())}
    before = {rule.name: rule for rule in default_rules()}
    assert rules["mismatch_rise"].relative == 3.0
    assert rules.keys() == (before.keys() - {"entropy_fall"}) | {"own"}
    assert [name for name in before if name in rules and rules[name] != before[name]] == ["mismatch_rise"]
    assert rules["own"].source == "the file of rules"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 2", "version must be 1, got 2"),
        ("version = 1\nversion = 2", "not valid TOML"),
        ("version = true", "version must be 1"),
        (HEAD + "rule = 1", "unknown field 'rule'"),
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
        (HEAD + "[rules.stale_run]\nenabled = false", "is about the delivery of rollouts"),
        (HEAD + "[rules.mismatch_rise]\nrelativ = 3.0", "did you mean 'relative'"),
        (HEAD + "[rules.mismatch_ris]\nrelative = 3.0", "did you mean 'mismatch_rise'"),
        (HEAD + "[rules.mismatch_warning]\neffect = 'halve'", "an absolute crossing alone never moves"),
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


FAULTS = {
    "[rules.mismatch_rise\n": (1, "not valid TOML"),
    '[rules.mismatch_rise]\nrelative = 3.0\nwhy = """\nnot closed\n': (5, "not valid TOML"),
    "version = 1\nrule = 1\n": (2, "unknown field 'rule'; expected tables [rules.NAME], [schedule] and [loop]"),
    "# a comment\n\n[rules.mismatch_ris]\nrelative = 3.0\n": (3, "mismatch_ris is no known rule, did you mean"),
    '[rules.mismatch_rise]\nwhy = """\na\nb"""\nrelativ = 3.0\n': (5, "unknown field 'relativ'"),
    "[rules.mismatch_rise]\r\n\r\nrelative = '3'\r\n": (3, "must be a finite number, got '3'"),
    "rules.mismatch_rise.minimum_duration = 3\nrules.mismatch_rise.least_tokens = -1\n": (2, "from 0 to 1,000,000"),
    "[rules.mismatch_rise]\n# below 1\nrelative = 0.5\n": (1, "must be above 1, got 0.5"),
    "[schedule]\nfloor = 0.2\n\nmultiplier = 1e9\n": (4, "at most 1,000"),
    "[rules]\n[loop]\ngian = 1.0\n": (3, "the loop has the unknown field 'gian'"),
}


def test_error_has_file_line_and_what_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    for text, (line, message) in FAULTS.items():
        file.write_bytes(text.encode())
        with pytest.raises(InvalidRules, match=re.escape(message)) as raised:
            read_rules(file)
        assert str(raised.value).startswith(f"{file}, line {line}: "), text


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, content, reason in ((tmp_path / "none", None, "No such file"), (tmp_path / "odd", b"\xff", "not UTF-8")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InvalidRules, match=f"cannot read the file of rules {path}: .*{reason}"):
            read_rules(path)


def test_configuration_has_the_rules_the_schedule_and_the_loop_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(OWN + "[schedule]\nmultiplier = 2.5\nminimum_period = 60\n[loop]\ngain = 0.5\n")
    changes = read_rules(file)
    configuration = WarningConfiguration.for_model("moe", changes)
    assert "scalars:x" in configuration.keys
    assert configuration.digest() != WarningConfiguration.for_model("moe").digest()
    # Set points that the file leaves alone are those of the kind of model.
    assert configuration.loop.gain == 0.5
    assert configuration.loop.set_point == WarningConfiguration.for_model("moe").loop.set_point
    assert configuration.loop.set_point != DEFAULT_LOOP.set_point
    file.write_text("[loop]\nset_point = 1e-2\n")
    assert WarningConfiguration.for_model("moe", read_rules(file)).loop.set_point == 1e-2
    lengths = [500.0 * (1.0 + 0.02 * (index % 3)) for index in range(110)] + [1600.0] * 20
    _, events = watch(closed_steps({"rollout:response_length_mean": lengths, "scalars:x": [2.0] * 130}), configuration)
    surge = next(event for event in events if event.rule == "length_surge")
    assert (surge.evidence["surge_step"], surge.evidence["decay_period"]) == (111, 277)
    assert [event.step for event in events if event.rule == "own"] == [5]
