"""The documents' tables of healthy ranges are written from the one table."""

from pathlib import Path

from foreshock.healthy_ranges import RANGES
from scripts.ranges_tables import DOCUMENTS, TABLES, current_text


def test_the_documents_are_current() -> None:
    stale = [document for document in DOCUMENTS if document.read_text() != current_text(document)]
    assert stale == [], "run python -m scripts.ranges_tables"


def test_every_document_has_a_table() -> None:
    for document in DOCUMENTS:
        assert "<!-- ranges: " in document.read_text(), document.name


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    copy.write_text(DOCUMENTS[0].read_text().replace("> 0.01", "> 0.05"))
    assert copy.read_text() != current_text(copy) == DOCUMENTS[0].read_text()


def test_the_whole_table_has_every_range_and_its_source() -> None:
    table = TABLES["all"]()
    assert len(table.splitlines()) == len(RANGES) + 2
    for each in RANGES:
        assert each.source in table
        assert each.threshold_text(each.critical) in table
