"""The notary's judgement: which step's weights an engine holds, which of its tensors are wrong, and how.

`judge` is pure. It reads what the trainer announced at some steps and what one engine reported after a weight sync.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from foreshock.notary.pieces import MODULUS, Piece, Tensors, Whole, factor_of, whole_of

How = Literal["step", "missing", "dtype", "replicas", "swapped", "variant", "unknown"]

HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"

CANARY_RATIO = 3.0
"""A canary shows weights of another step if its log-probs are this many times nearer to them (root mean square).
An engine and its trainer differ by numerics, at any step; two updates differ by more."""

_LEAST_CANARY_TOKENS = 8

_MOST_SWAPPED = 4096
"""Most pieces of a tensor whose pairs are all tried, in 40 ms. Tensors have fewer ranks than that."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A tensor that is not what the trainer announced.

    Attributes:
        name: of the tensor in the checkpoint.
        how: "step": it is that of step `step`; "missing": some ranks did not report it; "dtype":
            `detail` has both; "replicas": copies that should be equal differ, `detail` has the ranks that are off;
            "swapped": `detail` has the parts that changed places; "variant": `detail` is the announced variant;
            "unknown": never announced.
        since: the first step at which the engine held it, as far as it is known.
    """

    name: str
    how: How
    step: int | None = None
    detail: str = ""
    digest: str = ""
    since: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The weights that one engine holds after the sync of `step`: those of step `held`, except the tensors `wrong`.

    `held` None: most of it was never announced, or cannot be compared. `compared` of `tensors` were compared.
    `canary`: the root mean square difference of the log-probs of a canary prompt from the trainer's, in nats; None
    without one.
    """

    step: int
    held: int | None
    compared: int = 0
    tensors: int = 0
    wrong: tuple[Wrong, ...] = ()
    canary: float | None = None

    @property
    def is_right(self) -> bool:
        """True if the engine holds the weights of `step` and no compared tensor is wrong."""
        return self.held == self.step and not self.wrong


@dataclass(frozen=True)
class Holding:
    """What the trainer announces or an engine reports: tensors, log-probs of a canary prompt [T] (nats), or both."""

    tensors: Tensors = field(default_factory=dict)
    canary: Sequence[float] = ()

    @cached_property
    def wholes(self) -> dict[str, Whole | None]:
        """Each tensor that the pieces make up; see `whole_of`."""
        return {name: whole_of(pieces) for name, pieces in self.tensors.items()}


def judge(
    step: int,
    announced: Mapping[int, Holding],
    held: Holding,
    before: Verdict | None = None,
    variants: Mapping[str, Tensors] | None = None,
) -> Verdict | None:
    """Return what an engine holds after the sync of `step`; None if nothing can be compared.

    Args:
        step: the trainer's newest step; `announced` has it, and earlier ones as far as they are kept.
        held: what the engine reported.
        before: the engine's verdict after the previous sync.
        variants: other weights that the trainer announced at `step`, by description, such as "without the adapter".
    """
    wholes = {known: dict(each.wholes) for known, each in announced.items()}
    pieces = held.tensors
    if HEAD in pieces:
        # A head that was not announced is tied to the embeddings, of which an engine may keep a second copy.
        for each in wholes.values():
            embeddings = [name for name in each if name.endswith(EMBEDDINGS)]
            if len(embeddings) == 1:
                each.setdefault(HEAD, each[embeddings[0]])
    tensors, names = len(wholes[step]), [name for name in wholes[step] if name in pieces]
    distances = {known: distance(each.canary, held.canary) for known, each in announced.items()}
    canary = {known: value for known, value in distances.items() if value is not None}
    if not names:
        return _by_canary(step, canary) if step in canary else None
    found = {name: whole_of(pieces[name]) for name in names}
    best = _nearest(step, wholes, found)
    earlier = {each.name: each for each in before.wrong} if before is not None else {}
    for what, variant in (variants or {}).items():
        others = Holding(variant).wholes
        off = [name for name in names if wholes[step][name] != found[name]]
        if off and all(found[name] is not None and others.get(name) == found[name] for name in off):
            wrong = tuple(Wrong(name, "variant", detail=what, since=step) for name in off)
            return Verdict(step, step, len(names), tensors, wrong, canary.get(step))
    wrong = tuple(
        _wrong(step, name, pieces[name], wholes, earlier.get(name))
        for name in names
        if found[name] is None or wholes[best].get(name) != found[name]
    )
    is_known = 2 * sum(each.how in ("unknown", "dtype") for each in wrong) < len(names)
    return Verdict(step, best if is_known else None, len(names), tensors, wrong, canary.get(step))


def _nearest(step: int, announced: Mapping[int, Mapping[str, Whole | None]], found: Mapping[str, Whole | None]) -> int:
    """Return the step to which most tensors belong; `step` if no step has half of them.

    Ties go to `step`, then to the newest step: a tensor that never changes belongs to every step.
    """
    right = {known: sum(tensors.get(name) == found[name] for name in found) for known, tensors in announced.items()}
    best = max(right, key=lambda known: (right[known], known == step, known))
    return best if 2 * right[best] >= len(found) else step


def distance(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the root mean square difference of two lists of log-probs, in nats; None if they cannot be compared."""
    if len(first) != len(second) or len(first) < _LEAST_CANARY_TOKENS:
        return None
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(first, second, strict=True)) / len(first))


def _by_canary(step: int, canary: Mapping[int, float]) -> Verdict:
    nearest = min(canary, key=lambda each: (canary[each], -each))
    is_other = canary[step] > CANARY_RATIO * canary[nearest]
    return Verdict(step, nearest if is_other else step, canary=canary[step])


def _wrong(
    step: int,
    name: str,
    pieces: Sequence[Piece],
    announced: Mapping[int, Mapping[str, Whole | None]],
    before: Wrong | None,
) -> Wrong:
    """Return how a wrong tensor differs from the announced one."""
    expected, held = announced[step][name], whole_of(pieces)
    dtypes = {piece.dtype for piece in pieces}
    if expected is None:
        return Wrong(name, "missing", detail="of the announcement", since=step)
    if dtypes != {expected.dtype}:
        return Wrong(name, "dtype", detail=f"{', '.join(sorted(dtypes))} instead of {expected.dtype}", since=step)
    if len({(piece.row, piece.column, piece.digest) for piece in pieces}) > len({piece[4:6] for piece in pieces}):
        return Wrong(name, "replicas", detail=_ranks_off(step, name, pieces, announced), since=step)
    if held is None or held[2:] != expected[2:]:
        return Wrong(name, "missing", since=step)
    digest = f"{held.digest:016x}"
    since = before.since if before is not None and before.digest == digest else step
    of_step = max((known for known, tensors in announced.items() if tensors.get(name) == held), default=None)
    if of_step is not None:
        return Wrong(name, "step", of_step, digest=digest, since=since)
    if swapped := _swapped(pieces, held.digest, expected.digest):
        return Wrong(name, "swapped", detail=swapped, digest=digest, since=step)
    if before is not None and before.digest == digest:
        # The announcement of these weights is no longer kept, or there was none.
        return before
    return Wrong(name, "unknown", digest=digest, since=step)


def _ranks_off(
    step: int, name: str, pieces: Sequence[Piece], announced: Mapping[int, Mapping[str, Whole | None]]
) -> str:
    """Return which ranks hold the copy of which other step; every rank should hold the same whole tensor."""
    found = []
    for piece in pieces:
        whole = Whole(*piece[:4])
        if whole != announced[step][name]:
            of_step = max((known for known, tensors in announced.items() if tensors.get(name) == whole), default=None)
            found.append(f"a copy on rank {piece.rank} is {'unknown' if of_step is None else f'of step {of_step}'}")
    return " and ".join(found)


def _swapped(pieces: Sequence[Piece], held: int, expected: int) -> str:
    """Return the ranks whose parts changed places, if moving them back gives the expected digest; else no text.

    If the pieces i and j change places, Σ dᵢfᵢ grows by (dᵢ − dⱼ)(fⱼ − fᵢ), modulo 2⁶⁴ as numpy computes.
    """
    placed = list({(piece.row, piece.column): piece for piece in pieces}.values())
    if len(placed) > _MOST_SWAPPED:
        return ""
    digests = np.array([piece.digest % MODULUS for piece in placed], dtype=np.uint64)
    factors = np.array([factor_of((piece.row, piece.column)) for piece in placed], dtype=np.uint64)
    wanted = np.uint64((expected - held) % MODULUS)
    for first in range(len(placed) - 1):
        after = slice(first + 1, None)
        grows = (digests[first] - digests[after]) * (factors[after] - factors[first])
        found = np.flatnonzero(grows == wanted)
        if found.size:
            second = placed[first + 1 + int(found[0])]
            return "ranks {} and {}".format(*sorted((placed[first].rank, second.rank)))
    return ""
