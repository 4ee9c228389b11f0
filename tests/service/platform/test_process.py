"""A process of the service does not import what it does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import PYTHONPATH

_ARRAYS = """
import sys
import pyarrow as pa
from foreshock_service.platform.process import spare_pandas

spare_pandas()
assert pa.array([1.0, None]).null_count == 1
assert "pandas" not in sys.modules, "an array imported pandas"
import pandas
assert pandas.IS_HERE
"""


def test_arrays_are_made_without_pandas_and_it_can_be_imported_afterwards(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("IS_HERE = True\n")
    subprocess.run(
        [sys.executable, "-c", _ARRAYS], env={"PYTHONPATH": f"{tmp_path}:{PYTHONPATH}"}, cwd=tmp_path, check=True
    )
