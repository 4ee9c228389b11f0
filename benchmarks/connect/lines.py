"""Part `lines` of `make bench-connect`: the lines that a user adds, counted in the documents' own examples.

A line counts if it belongs to a statement that uses something of Foreshock: an import of it, or a name that comes from
one. A flag is a line of a shell example that begins with `--`; variables before a command are no lines. Beside it
stands what W&B needs for the scalars that the framework already has, after the frameworks' own documentation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework, the document whose first example of a language connects it, the bar, and W&B's code beside it."""

    name: str
    document: str
    language: str
    bar: int
    wandb: str


FRAMEWORKS = (
    Framework("verl", "docs/integrations.md", "", 0, "trainer.logger=[console,wandb]"),
    Framework(
        "slime", "docs/integrations.md", "", 2, "--use-wandb --wandb-project P --wandb-group G --wandb-key K"
    ),
    Framework("TRL", "docs/integrations.md", "python", 3, 'GRPOConfig(report_to="wandb")'),
    Framework(
        "torch loop", "README.md", "python", 8,
        "import wandb\nrun = wandb.init(project='p')\nrun.log({'grad_norm': norm}, step=step)\nrun.finish()",
    ),
)  # fmt: skip


def run() -> dict[str, float]:
    """Print the table; return the lines of each framework."""
    print(f"{'framework':12}{'lines':>7}{'bar':>5}  {'counted in':30}W&B for its scalars")
    found = {}
    for each in FRAMEWORKS:
        lines = count(each)
        found[f"lines_{each.name.replace(' ', '_').lower()}"] = float(lines)
        print(f"{each.name:12}{lines:7}{each.bar:5}  {each.document:30}{_wandb(each)}")
    return found


def reached(found: dict[str, float]) -> bool:
    """Return True if no framework needs more lines than its bar."""
    return all(found[f"lines_{each.name.replace(' ', '_').lower()}"] <= each.bar for each in FRAMEWORKS)


def count(framework: Framework) -> int:
    """Return the lines or flags of Foreshock in the first example of the framework's document."""
    text = (_REPOSITORY / framework.document).read_text()
    example = re.findall(rf"```{framework.language}\n(.*?)```", text, re.DOTALL)[0]
    if framework.language == "python":
        return len(lines_of_foreshock(example))
    return sum(line.strip().startswith("--") for line in example.splitlines())


def lines_of_foreshock(code: str) -> set[int]:
    """Return the numbers of the lines that use Foreshock or what comes from it."""
    names: set[str] = set()
    lines: set[int] = set()
    for statement in _statements(ast.parse(code)):
        head = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
        imported = _imported(statement)
        used = {node.id for child in head for node in ast.walk(child) if isinstance(node, ast.Name)}
        if not imported and not used & names:
            continue
        names |= imported
        if isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        last = max([statement.lineno, *(getattr(child, "end_lineno", 0) or 0 for child in head)])
        lines |= set(range(statement.lineno, last + 1))
    return lines


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        yield from _statements(node)


def _imported(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Import):
        return {(each.asname or each.name).partition(".")[0] for each in statement.names
                if each.name.partition(".")[0] == "foreshock"}  # fmt: skip
    if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] == "foreshock":
        return {each.asname or each.name for each in statement.names}
    return set()


def _wandb(framework: Framework) -> str:
    lines = framework.wandb.splitlines()
    return lines[0] if len(lines) == 1 else f"{len(lines)} lines: {'; '.join(lines)}"
