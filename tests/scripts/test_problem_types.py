"""Every problem type is on its page, unique, well formed and what an answer says."""

import re

import pytest

from foreshock.errors import PROBLEM_TYPE_PREFIX
from foreshock_service.platform.problem import ProblemError
from scripts.documentation.problem_types import page


def test_types_are_unique_and_lower_case_words() -> None:
    types = re.findall(r"^\| `(.*?)` \| \d{3} \| (.+) \|$", page(), re.MULTILINE)
    names = [name for name, _ in types]
    assert len(names) == len(set(names)) > 50
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) and meaning for name, meaning in types)


def test_error_without_a_type_of_its_own_is_refused() -> None:
    with pytest.raises(TypeError, match="problem_type"):
        type("Nameless", (ProblemError,), {}, status=404)


def test_renaming_a_class_does_not_change_what_is_sent() -> None:
    other = type("AnyName", (ProblemError,), {}, status=404, problem_type="run-not-found")
    document = other("no run").document()
    assert (document.type, document.title) == (PROBLEM_TYPE_PREFIX + "run-not-found", "Run not found")
