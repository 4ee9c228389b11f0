"""A certificate as text, HTML and JUnit, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from foreshock.api.records import to_json
from foreshock.certify.certificate import read_certificate, write_certificate
from foreshock.certify.text import certificate_html, certificate_lines, junit_xml
from foreshock.commands.text import Paint
from foreshock.errors import ConfigurationError
from tests.foreshock.certify.making import certificate, not_tried, row

FOUND = certificate(
    row("prefill", 0.0),
    row("batch_1", 0.01),
    row("trainer/vllm.decode", 0.1, cause="norm_eps", why=("The ε of the <norms> is another.",)),
    not_tried("lora", "vLLM refuses rank 3"),
)


def test_text_has_a_line_for_each_row_and_says_why() -> None:
    lines = certificate_lines(FOUND, Paint.off())
    text = "\n".join(lines)
    assert "4 conditions: 1 identical, 1 rounding, 1 different, 1 not tried" in text
    for name in ("prefill", "batch_1", "trainer/vllm.decode", "lora"):
        assert f"\n  {name} " in text
    assert "The ε of the <norms> is another." in text
    assert "vLLM refuses rank 3" in text
    assert "beyond the floor" in " ".join(text.split())
    assert max(map(len, lines)) <= 100


def test_html_is_one_file_with_escaped_text() -> None:
    page = certificate_html(FOUND)
    assert page.count("<tr class=") == 4
    assert "&lt;norms&gt;" in page
    assert "http" not in page


def test_junit_has_a_failure_for_what_is_different_or_worse() -> None:
    suite = ElementTree.fromstring(junit_xml(FOUND, ["batch_1"]))
    assert {name: suite.attrib[name] for name in ("tests", "failures", "skipped")} == {
        "tests": "4", "failures": "2", "skipped": "1",
    }  # fmt: skip
    failed = [case.attrib["name"] for case in suite if case.find("failure") is not None]
    assert failed == ["batch_1", "trainer/vllm.decode"]


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_certificate(tmp_path / "cert.json", FOUND)
    assert to_json(read_certificate(tmp_path / "cert.json")) == to_json(FOUND)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "lacks schema"),
        ('{"schema": 1, "rows": []}', "is no certificate"),
        ('{"schema": 2, "rows": []}', "of schema 2; this release reads schema 1"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cert.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_certificate(tmp_path / "cert.json")


def test_file_of_a_newer_release_with_more_fields_is_read(tmp_path: Path) -> None:
    value = to_json(FOUND)
    value["rows"][0]["new"] = 1
    (tmp_path / "cert.json").write_text(json.dumps(value))
    assert read_certificate(tmp_path / "cert.json").rows[0].name == "prefill"


def test_missing_folder_keeps_no_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_certificate(tmp_path / "no" / "cert.json", FOUND)
