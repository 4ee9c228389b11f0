"""Changes that a trainer announces within a run: values before a change are no baseline for values after it."""

from typing import Literal, get_args

ChangeKind = Literal["length_cap", "curriculum", "data_mixture", "other"]

CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
