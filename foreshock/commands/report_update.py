"""The lines of a measurement of an update."""

from collections.abc import Mapping
from typing import Any

from foreshock.api.records import parse
from foreshock.commands.text import wrap
from foreshock.diagnosis.update_noise import UpdateToNoise


def update_of_answer(answer: Mapping[str, Any], probe: Mapping[str, Any]) -> list[str]:
    """Return what the measurement found."""
    return ["", *wrap(parse(UpdateToNoise, answer).in_words(), "    ", "  → ")]
