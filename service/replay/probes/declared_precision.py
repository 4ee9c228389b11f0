"""The precision that a run declares for its trainer: a probe's default for `torch.trainer`.

A trainer declares it in its fingerprint: `master_dtype` with `autocast` (left out: no autocast), or `dtype` "float32"
alone. `dtype` "bfloat16" alone leaves open whether weights or only activations have it, and declares nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from foreshock.fingerprint import Fingerprint
from foreshock.scorers import TRAINER_REPLAY

_TRAINER = TRAINER_REPLAY
_MASTER_DTYPES = ("bfloat16", "float16", "float32")
_AUTOCAST = ("bfloat16", "float16")
_PRECISION = frozenset({"autocast", "master_dtype", "head_dtype"})


def with_declared_precision(
    options: Mapping[str, Mapping[str, Any]],
    scorers: Collection[str],
    trainer: Fingerprint | None,
    *,
    complete: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the options of a probe, with the trainer's declared precision for `torch.trainer` if that is requested.

    Options that name any precision are left unchanged; with `complete` those that they do not name are added.
    """
    found = {scorer: dict(chosen) for scorer, chosen in options.items()}
    asked = found.get(_TRAINER, {})
    declared = declared_precision(trainer)
    if _TRAINER in scorers and declared and (complete or not _PRECISION & set(asked)):
        found[_TRAINER] = {**declared, **asked}
    return found


def precision_in_words(declared: Mapping[str, str | None]) -> str | None:
    """Return a declared precision, such as "bfloat16 autocast over float32 weights"; None if none is declared."""
    master, autocast, head = (declared.get(name) for name in ("master_dtype", "autocast", "head_dtype"))
    if master is None:
        return None
    words = master if autocast is None else f"{autocast} autocast over {master} weights"
    return words if head in (None, master) else f"{words}, head in {head}"


def declared_precision(trainer: Fingerprint | None) -> dict[str, str | None]:
    """Return the options of `torch.trainer` that a trainer's fingerprint declares; empty if it declares none."""
    if trainer is None:
        return {}
    master = trainer.master_dtype or ("float32" if trainer.dtype == "float32" and not trainer.autocast else None)
    if master not in _MASTER_DTYPES:
        return {}
    found: dict[str, str | None] = {
        "master_dtype": master,
        "autocast": trainer.autocast if trainer.autocast in _AUTOCAST else None,
    }
    return found | ({"head_dtype": trainer.head_dtype} if trainer.head_dtype in _MASTER_DTYPES else {})
