"""Write the tables of healthy ranges into the documents: `python -m scripts.ranges_tables`; `--check` changes nothing.

A table is between `<!-- ranges: NAME -->` and `<!-- end of ranges -->`; its rows come from `foreshock.healthy_ranges`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from foreshock.healthy_ranges import RANGES, HealthyRange
from foreshock.model_kind import MODEL_KIND_NAMES
from scripts.generated import write_or_check

REPOSITORY: Final = Path(__file__).resolve().parents[1]
_BLOCK: Final = re.compile(r"(<!-- ranges: (\w+) -->\n).*?(<!-- end of ranges -->)", re.DOTALL)


def all_ranges() -> str:
    """Return the table of every range, with its source if it is not the one of the row above."""
    rows, before = [], ""
    for each in RANGES:
        rows.append((_quantity(each), *_thresholds(each), "as above" if each.source == before else each.source))
        before = each.source
    return _table(("quantity, at lag 0", "healthy", "warning", "critical", "source"), rows)


def mismatch_ranges() -> str:
    """Return the table of only k3."""
    rows = [(_quantity(each), *_thresholds(each)) for each in RANGES if each.measure == "k3_kl"]
    return _table(("at lag 0", "healthy", "warning", "critical"), rows)


TABLES: Final[Mapping[str, Callable[[], str]]] = {"all": all_ranges, "mismatch": mismatch_ranges}
DOCUMENTS: Final = (REPOSITORY / "README.md", REPOSITORY / "docs" / "reading-the-numbers.md")


def current_text(document: Path) -> str:
    """Return the document with current tables. Raises KeyError for an unknown table."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", document.read_text())


def _quantity(each: HealthyRange) -> str:
    return each.label if each.model_kind is None else f"{each.label}, {MODEL_KIND_NAMES[each.model_kind]}"


def _thresholds(each: HealthyRange) -> tuple[str, str, str]:
    return each.healthy, each.threshold_text(each.warning), each.threshold_text(each.critical)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(write_or_check("ranges_tables", {document: current_text(document) for document in DOCUMENTS}))
