"""The schema of the tables of rollouts and scores: every column is declared here, once.

One row is one rollout. A column has a level:

- "rollout": one value per rollout;
- "prompt token": a list with one value per prompt token;
- "response token": a list with one value per response token;
- "rollout or response token": either (only `advantage`).

The Parquet codec, the padded, JSON and captured forms of a batch, validation and `docs/rollout-table.md` derive from
ROLLOUT_COLUMNS. A new column is a line here and a field of `RolloutBatch` (`batch.py`).

A written file has the exact Arrow type of `ColumnSpec.arrow_type()`. A file to be read may also have a type that holds
the same values: `large_list` or `fixed_size_list` for a list; `large_string`, `string_view` or a dictionary of strings
for a string; any integer type whose values are in range for an integer; float16 or float64 (rounded to float32) for a
float.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

ATTRIBUTES_KEY = b"foreshock.batch"
FINGERPRINT_KEY = b"foreshock.fingerprint"

# A log-softmax in float32 may exceed 0 by this much for a certain token.
LOG_PROB_ROUNDING = 1e-4
# A bfloat16 logit between 32 and 64 is rounded by up to 1/8 (between 16 and 32: 1/16), and so is its log-prob.
LARGEST_LOG_PROB = 0.13
# No token with such a probability is ever sampled: smaller values are placeholders, such as -9999 for -inf.
LEAST_LOG_PROB = -100.0

Level = Literal["rollout", "prompt token", "response token", "rollout or response token"]
Side = Literal["prompt", "response"]
ValueType = Literal["string", "uint8", "int16", "int32", "int64", "uint64", "float32"]


@dataclass(frozen=True, slots=True)
class ValidRange:
    """The valid values of a column, both ends included. `rule` completes the error of an invalid one: "-1 {rule}".

    NaN passes, and so does +inf in a column of floats: measures count such values separately.
    """

    rule: str
    minimum: float = -math.inf
    maximum: float = math.inf

    def invalid(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return True for each value out of range."""
        wrong = np.zeros(values.shape, np.bool_) if self.minimum == -math.inf else values < self.minimum
        if self.maximum < math.inf:
            above = values > self.maximum
            wrong |= above & (values < np.inf) if values.dtype.kind == "f" else above
        return wrong


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of a table.

    `field` is the attribute of `RolloutBatch` that holds the column; by default the name. `null_value` replaces a null
    in an integer column of level "rollout", unless the batch attribute of the same name has a value; a null float is
    NaN. `repeatable`: a padded batch may give one value per rollout, which is repeated for its tokens.
    """

    name: str
    value_type: ValueType
    level: Level
    description: str
    field: str = ""
    required: bool = False
    valid: ValidRange | None = None
    null_value: int | None = None
    repeatable: bool = False

    def __post_init__(self) -> None:
        if not self.field:
            object.__setattr__(self, "field", self.name)

    @property
    def is_string(self) -> bool:
        """True for a column of strings, which `RolloutBatch` holds as a list."""
        return self.value_type == "string"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the values; object for strings."""
        return np.dtype(object) if self.is_string else np.dtype(self.value_type)

    @property
    def side(self) -> Side | None:
        """The offsets that cut a list of this column: "prompt", "response", or None if it is never a list."""
        if self.level == "rollout":
            return None
        return "prompt" if self.level == "prompt token" else "response"

    def arrow_type(self, *, per_token: bool | None = None) -> pa.DataType:
        """Return the Arrow type as written; `per_token` decides for the level "rollout or response token"."""
        values = getattr(pa, self.value_type)()
        is_list = self.level != "rollout" if per_token is None else per_token
        return pa.list_(pa.field("element", values)) if is_list else values

    def arrow_types(self) -> tuple[pa.DataType, ...]:
        """Return every Arrow type as written: two for the level "rollout or response token", else one."""
        if self.level == "rollout or response token":
            return self.arrow_type(per_token=False), self.arrow_type(per_token=True)
        return (self.arrow_type(),)

    def type_name(self) -> str:
        """Return the Arrow type as text, such as `list<float32>`."""
        if self.level == "rollout":
            return self.value_type
        if self.level == "rollout or response token":
            return f"{self.value_type} or list<{self.value_type}>"
        return f"list<{self.value_type}>"


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Upper limits of one shard, all inclusive. A larger body is a LimitExceededError (HTTP 413): send more shards."""

    max_body_bytes: int = 256 << 20
    max_rollouts: int = 65_536
    max_tokens: int = 64_000_000  # response tokens; the same limit holds for prompt tokens
    max_uncompressed_bytes: int = 2 << 30  # of all decoded columns together, also of a gzipped JSON file
    max_response_tokens: int = 1_048_576  # of one rollout
    max_prompt_tokens: int = 1_048_576  # of one rollout
    max_row_groups: int = 65_536
    max_footer_bytes: int = 16 << 20
    max_identifier_bytes: int = 1_024  # of one string, such as a sample id
    max_metadata_bytes: int = 1 << 20  # of one Parquet key–value pair


LOG_PROBS = ValidRange(
    "is above 0: log natural-log probabilities, not probabilities or logits", maximum=LOG_PROB_ROUNDING
)


def are_log_probs(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return True for values that can be log-probs of sampled tokens; False for NaN, ±inf and placeholders.

    Measures leave the others out and count them separately.
    """
    return np.asarray((values >= LEAST_LOG_PROB) & (values <= LARGEST_LOG_PROB))


_AT_LEAST_0 = ValidRange("is negative: ids, turns and versions start at 0", minimum=0)
_NOT_NEGATIVE = ValidRange("must not be negative", minimum=0)
_TOP_K = ValidRange("must be at least -1, which means all tokens", minimum=-1)
_MASK = ValidRange("must be 0 or 1", minimum=0, maximum=1)

ROLLOUT_COLUMNS: tuple[ColumnSpec, ...] = (
    ColumnSpec(
        "sample_id", "string", "rollout", "names the rollout; unique in a shard", field="sample_ids", required=True
    ),
    ColumnSpec(
        "group_id", "string", "rollout", "names the prompt that rollouts share; intervals are clustered by it",
        field="group_ids",
    ),
    ColumnSpec("data_source", "string", "rollout", "names the data set of the prompt", field="data_sources"),
    ColumnSpec(
        "engine_id", "string", "rollout", "names the engine, of several replicas, that sampled the rollout",
        field="engine_ids",
    ),
    ColumnSpec(
        "prompt_token_ids", "int32", "prompt token", "the prompt as token ids", required=True, valid=_AT_LEAST_0
    ),
    ColumnSpec(
        "response_token_ids", "int32", "response token", "the response as token ids", required=True, valid=_AT_LEAST_0
    ),
    ColumnSpec(
        "response_mask", "uint8", "response token", "0 for a token that the model did not sample (tool output)",
        valid=_MASK,
    ),
    ColumnSpec(
        "turn", "int16", "response token", "the turn of the conversation, from 0", valid=_AT_LEAST_0, repeatable=True
    ),
    ColumnSpec(
        "rollout_log_probs", "float32", "response token", "log μ as the engine logged it when it sampled",
        valid=LOG_PROBS,
    ),
    ColumnSpec(
        "trainer_log_probs", "float32", "response token", "log π of the same tokens, before the update",
        valid=LOG_PROBS,
    ),
    ColumnSpec("entropy", "float32", "response token", "the entropy of μ at the token, in nats; of π if declared"),
    ColumnSpec(
        "weights_version", "int32", "response token", "the version of the weights that sampled the token",
        valid=_AT_LEAST_0, repeatable=True,
    ),
    ColumnSpec("reward", "float32", "rollout", "the reward of the rollout"),
    ColumnSpec("advantage", "float32", "rollout or response token", "the advantage of the rollout or of each token"),
    ColumnSpec(
        "finish_reason", "string", "rollout", "why the response ended: stop, length, …", field="finish_reasons"
    ),
    ColumnSpec("temperature", "float32", "rollout", "the sampling temperature", valid=_NOT_NEGATIVE),
    ColumnSpec("top_p", "float32", "rollout", "the nucleus that was sampled from", valid=_NOT_NEGATIVE),
    ColumnSpec(
        "top_k", "int32", "rollout", "the number of likeliest tokens that were sampled from; -1: all",
        valid=_TOP_K, null_value=-1,
    ),
    ColumnSpec(
        "min_p", "float32", "rollout", "the least probability relative to the likeliest token", valid=_NOT_NEGATIVE
    ),
)  # fmt: skip

SCORE_COLUMNS: tuple[ColumnSpec, ...] = (
    ColumnSpec(
        "sample_id", "string", "rollout", "names the rollout that was scored", field="sample_ids", required=True
    ),
    ColumnSpec(
        "log_probs", "float32", "response token", "the scorer's log-prob of each response token", required=True,
        valid=LOG_PROBS,
    ),
)  # fmt: skip
