"""Collect the sources of the site: docs/ unchanged, other documents of the repository, and generated pages."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from scripts.documentation import command_lines, problem_types, python_reference

REPOSITORY: Final = Path(__file__).resolve().parents[2]
DOCS: Final = REPOSITORY / "docs"
SOURCES: Final = REPOSITORY / "build" / "site-sources"
DOCUMENTS: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/tiny_rl/README.md": "examples/tiny_rl/README.md",
}
"""Documents outside docs/ -> their place in the site."""
_LINK = re.compile(r"(\]\()([^)#:]+)(#[^)]*)?(\))")


def write_sources(folder: Path) -> None:
    """Write the sources of the site into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder)
    for name, place in DOCUMENTS.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(moved((REPOSITORY / name).read_text(), name, place))
    reference = folder / "reference"
    reference.mkdir()
    (reference / "python.md").write_text(python_reference.page())
    (reference / "commands.md").write_text(command_lines.page())
    (reference / "problems.md").write_text(problem_types.page())


def moved(text: str, name: str, place: str) -> str:
    """Rewrite the links of a document so that they lead to the same documents from its place in the site.

    `name` is its path in the repository, `place` its path in the site. Links to documents that the site does not have
    are left unchanged; the strict build reports them.
    """
    depth = len(Path(place).parts) - 1

    def link(match: re.Match[str]) -> str:
        target = (REPOSITORY / name).parent.joinpath(match[2]).resolve()
        if not target.is_relative_to(REPOSITORY):
            return match[0]
        of_site = DOCUMENTS.get(str(target.relative_to(REPOSITORY)))
        if of_site is None and target.is_relative_to(DOCS):
            of_site = str(target.relative_to(DOCS))
        return match[0] if of_site is None else f"{match[1]}{'../' * depth}{of_site}{match[3] or ''}{match[4]}"

    return _LINK.sub(link, text)
