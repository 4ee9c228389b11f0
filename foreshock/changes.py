"""Changes that a trainer announces within a run. Baselines begin anew after a change."""

from typing import Literal, get_args

ChangeKind = Literal["length_cap", "curriculum", "data_mixture", "other"]

CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
