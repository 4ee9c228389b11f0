"""Count the words of the documents, and the commands that they show: `make bench-docs`.

`make test-all` runs the commands of the task pages and of the tour (tests/test_task_pages.py), and parses those of
every page with the arguments of the commands (tests/test_docs.py).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.bars import Line, report
from tests.paths import DOCS, REPOSITORY
from tests.test_docs import DOCUMENTS, commands_of

BAR_WORDS, BAR_WORDS_OF_README = 35_000, 700
TASK_PAGES = ("is-my-set-up-right", "my-run-collapsed", "watch-a-run", "let-it-act", "run-it-for-a-team")


def main() -> int:
    """Count; return 1 if a bar is not reached."""
    of_tasks = {name: (DOCS / f"{name}.md").read_text() for name in TASK_PAGES}
    blocks = sum(len(re.findall(r"```bash\n", text)) for text in of_tasks.values())
    commands = [command for document in DOCUMENTS for command in commands_of(document)]
    return report(
        [
            Line("words", "words of docs", sum(map(_words, DOCS.rglob("*.md"))), BAR_WORDS),
            Line("readme_words", "… of the README", _words(REPOSITORY / "README.md"), BAR_WORDS_OF_README),
            Line("task_blocks", "blocks of commands on the five task pages, each run by a test", blocks),
            Line("commands", "foreshock commands in all documents, each parsed by a test", len(commands)),
        ]
    )


def _words(document: Path) -> int:
    return len(document.read_text().split())


if __name__ == "__main__":
    sys.exit(main())
