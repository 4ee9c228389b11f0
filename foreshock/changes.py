"""Changes that a trainer announces within a run, after which earlier values are no baseline of later ones."""

from typing import Literal, get_args

ChangeKind = Literal["length_cap", "curriculum", "data_mixture", "other"]

CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
