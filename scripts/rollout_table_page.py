"""Write docs/rollout-table.md from the schema: `python -m scripts.rollout_table_page`; `--check` fails if stale."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from foreshock.rollouts.schema import ROLLOUT_COLUMNS, ColumnSpec
from scripts.generated import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rollout-table.md"

INTRODUCTION = """\
# The rollout table

To log rollouts, pass a mapping of these columns:

```python
client.log_rollouts(
    step,
    {
        "prompt_token_ids": [[1, 2, 3], [1, 2, 3]],
        "response_token_ids": [[7, 8], [9]],
        "rollout_log_probs": [[-0.5, -1.25], [-0.75]],
        "trainer_log_probs": [[-0.5, -1.5], [-0.75]],
        "group_id": ["prompt-0", "prompt-0"],
        "reward": [1.0, 0.0],
    },
)
```

The same columns make a Parquet file that the service accepts: one row per rollout, one list per column of tokens. Names
in brackets are those of `RolloutBatch`. Without `sample_id` the client makes one from the step.

"""

LEGEND = """
**Level.** *Rollout*: one value per rollout. *Prompt token*, *response token*: a list with one value per token; the
lists of one rollout have equal lengths. A padded batch may give one value per rollout for {repeatable}.

**Valid values.** Another value is refused with its row and column. Log-probs that are not finite, and placeholders such
as −9999, are accepted and counted apart, unless more than half of a column is above 0.13 or nearly all of it above 0. A
null is NaN in a column of floats per rollout, and an error in a list.

This page is generated from `foreshock/rollouts/schema.py` by `python -m scripts.rollout_table_page`.
"""


def page() -> str:
    """Return the text of the page."""
    head = "| column | type | level | valid values | description |\n| --- | --- | --- | --- | --- |\n"
    return (
        INTRODUCTION
        + head
        + "".join(f"{line(column)}\n" for column in ROLLOUT_COLUMNS)
        + LEGEND.format(repeatable=", ".join(f"`{column.name}`" for column in ROLLOUT_COLUMNS if column.repeatable))
    )


def line(column: ColumnSpec) -> str:
    """Return the row of a column."""
    name = f"`{column.name}`" + (f" (`{column.field}`)" if column.field != column.name else "")
    required = ", required" if column.required else ""
    return f"| {name} | {column.value_type}{required} | {column.level} | {_valid(column)} | {column.description} |"


def _valid(column: ColumnSpec) -> str:
    if column.valid is None:
        return "any"
    bounds = []
    if column.valid.minimum > -math.inf:
        bounds.append(f"at least {column.valid.minimum:g}")
    if column.valid.maximum < math.inf:
        bounds.append(f"at most {column.valid.maximum:g}")
    return ", ".join(bounds)


if __name__ == "__main__":
    sys.exit(write_or_check("rollout_table_page", {PAGE: page()}))
