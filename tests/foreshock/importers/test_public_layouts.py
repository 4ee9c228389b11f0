"""Files in public layouts: read with every column, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.connect.files import FILES, outcome


@pytest.mark.parametrize("name", FILES)
def test_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    found, sentence = outcome(FILES[name], tmp_path)
    assert found == ("read" if FILES[name].columns else "refused"), sentence
