"""Write the table of docs/registry.md: `python -m scripts.registry_page`; with `--check` nothing is changed."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from foreshock.certify.certificate import Certificate
from foreshock.certify.registry import engine_of, entries
from foreshock.commands.text import table
from foreshock.diagnosis.wording import number
from foreshock.environment import Environment

DOCUMENT: Final = Path(__file__).resolve().parents[1] / "docs" / "registry.md"
_BLOCK: Final = re.compile(r"(<!-- registry -->\n).*?(<!-- end of registry -->)", re.DOTALL)
_HEADER: Final = ("model", "M", "dtype", "k3", "floor", "equal")


def current_text() -> str:
    """Return the document with the table of today's registry."""
    return _BLOCK.sub(lambda found: f"{found[1]}{registry_table(entries())}\n{found[2]}", DOCUMENT.read_text())


def registry_table(found: Sequence[Certificate]) -> str:
    """Return a block for each engine and hardware, a line for each model and dtype, with the numbers of its newest
    release, the number of releases, and how many of them gave the same numbers."""
    ordered = sorted(found, key=lambda each: (_where(each), _line(each), _release(each)))
    blocks = []
    for where, of_hardware in groupby(ordered, _where):
        rows = [_row(list(of_line)) for _, of_line in groupby(of_hardware, _line)]
        blocks += [f"{where}:", "", "```", *(each.rstrip() for each in table(_HEADER, rows, left=(0, 2))), "```", ""]
    return "\n".join(blocks[:-1])


def _row(found: Sequence[Certificate]) -> list[str]:
    newest = found[-1]
    size, dtype = newest.rows[0].sizes[0], _line(newest)[2]
    equal = max(Counter(map(_numbers, found)).values())
    sizes = [f"{newest.parameters / 1e6:.1f}", dtype, number(size.k3), number(size.floor)]
    return [newest.model, *sizes, f"{equal}/{len(found)}"]


def _numbers(certificate: Certificate) -> tuple[float, ...]:
    """Return k3 of every row, which two releases that compute the same have in common to the last bit."""
    return tuple(size.k3 for row in certificate.rows for size in row.sizes)


def _line(certificate: Certificate) -> tuple[int, str, str]:
    engine = engine_of(certificate)
    return certificate.parameters, certificate.model, str(engine.dtype if engine is not None else None)


def _release(certificate: Certificate) -> str:
    engine = engine_of(certificate)
    return str(engine.engine_version if engine is not None else None)


def _where(certificate: Certificate) -> str:
    engine = engine_of(certificate)
    assert engine is not None
    return f"{engine.engine}, {Environment.of_fingerprint(engine).describe()}"


if __name__ == "__main__":
    from scripts.generated import write_or_check

    sys.exit(write_or_check("registry_page", {DOCUMENT: current_text()}))
