"""The schema of the rollout table and of the score table: the one place that knows a Parquet column.

One row is one rollout. A column is `shape`:

- "rollout": one value a rollout;
- "prompt": a list with one value per prompt token;
- "response": a list with one value per response token (all such lists of one rollout have equal lengths);
- "rollout or response": either (`advantage`).

What is written is always the exact Arrow type of `ColumnSpec.arrow_type()`. What is read may also be a type that holds
the same values: `large_list` or `fixed_size_list` for a list, `large_string`, `string_view` or a dictionary of strings
for a string, any integer type whose values are in range for an integer, float16 or float64 (rounded to float32) for a
float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

__all__ = ["ATTRIBUTES_KEY", "FINGERPRINT_KEY", "ROLLOUT_COLUMNS", "SCORE_COLUMNS", "ColumnSpec", "column_named"]

ATTRIBUTES_KEY = b"foreshock.batch"
FINGERPRINT_KEY = b"foreshock.fingerprint"

Shape = Literal["rollout", "prompt", "response", "rollout or response"]
ValueType = Literal["string", "uint8", "int16", "int32", "float32"]


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column: its name, the type of its values, its shape, and the field of RolloutBatch that holds it."""

    name: str
    value_type: ValueType
    shape: Shape
    field: str
    meaning: str
    required: bool = False
    log_probs: bool = False

    def arrow_type(self, *, per_token: bool | None = None) -> pa.DataType:
        """The Arrow type as written; `per_token` decides where the shape is "rollout or response"."""
        values = getattr(pa, self.value_type)()
        is_list = self.shape != "rollout" if per_token is None else per_token
        return pa.list_(pa.field("element", values)) if is_list else values

    def type_name(self) -> str:
        """The type in words, as error messages say it."""
        if self.shape == "rollout":
            return self.value_type
        if self.shape == "rollout or response":
            return f"{self.value_type} or list<{self.value_type}>"
        return f"list<{self.value_type}>"


ROLLOUT_COLUMNS: tuple[ColumnSpec, ...] = (
    ColumnSpec("sample_id", "string", "rollout", "sample_ids", "names the rollout, once in a shard", required=True),
    ColumnSpec("group_id", "string", "rollout", "group_ids", "names the prompt that rollouts share"),
    ColumnSpec("data_source", "string", "rollout", "data_sources", "names the data set of the prompt"),
    ColumnSpec("prompt_token_ids", "int32", "prompt", "prompt_token_ids", "the prompt as tokens", required=True),
    ColumnSpec(
        "response_token_ids", "int32", "response", "response_token_ids", "the response as tokens", required=True
    ),
    ColumnSpec("response_mask", "uint8", "response", "response_mask", "0: not sampled by the model (a tool's output)"),
    ColumnSpec("turn", "int16", "response", "turn", "the turn of a conversation that the token belongs to"),
    ColumnSpec(
        "rollout_log_probs", "float32", "response", "rollout_log_probs", "log μ, as the engine logged", log_probs=True
    ),
    ColumnSpec("trainer_log_probs", "float32", "response", "trainer_log_probs", "log π, as logged", log_probs=True),
    ColumnSpec("entropy", "float32", "response", "entropy", "the entropy of μ at the token, in nats"),
    ColumnSpec("weights_version", "int32", "response", "weights_version", "the weights that sampled the token"),
    ColumnSpec("reward", "float32", "rollout", "reward", "the reward of the rollout"),
    ColumnSpec("advantage", "float32", "rollout or response", "advantage", "the advantage of the rollout or token"),
    ColumnSpec("finish_reason", "string", "rollout", "finish_reasons", "why it ended: stop, length, …"),
    ColumnSpec("temperature", "float32", "rollout", "temperature", "the sampling temperature"),
    ColumnSpec("top_p", "float32", "rollout", "top_p", "the nucleus it was sampled from"),
    ColumnSpec("top_k", "int32", "rollout", "top_k", "how many of the likeliest tokens it was sampled from; -1: all"),
    ColumnSpec("min_p", "float32", "rollout", "min_p", "the least relative probability it was sampled from"),
)

SCORE_COLUMNS: tuple[ColumnSpec, ...] = (
    ColumnSpec("sample_id", "string", "rollout", "sample_ids", "names the rollout that was scored", required=True),
    ColumnSpec(
        "log_probs", "float32", "response", "log_probs", "the scorer's log-prob of each token", required=True,
        log_probs=True,
    ),
)  # fmt: skip


def column_named(name: str, columns: tuple[ColumnSpec, ...] = ROLLOUT_COLUMNS) -> ColumnSpec:
    """The column of that name; raises KeyError where the schema has none."""
    for column in columns:
        if column.name == name:
            return column
    raise KeyError(name)
