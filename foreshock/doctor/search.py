"""The search: which variants are tried for a side, in which order, and when it stops. `naming` judges them.

1. The announced weights are replayed in three precisions, float32 on half of the rollouts: **ordinary rounding**. The
   best one in other batches gives the **noise**. A side within the noise is reproduced: the search ends.
2. Single variants, by family: data and sampling need no further replay, and several sampling parameters are fitted
   together if one of them explains a part; then weights, the forward pass, and parts. Each is judged for all rollouts,
   and for the rollouts that it fits better than the undisturbed replay. A variant that needs a replay is screened
   first, on the worst rollout and then on a tenth of the tokens in the rollouts that differ most: all tokens are
   replayed only if it explains more of that than chance does.
3. Pairs: every variant on top of the ones that explained most.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from foreshock.doctor.attempts import Attempts
from foreshock.doctor.catalogue import FAMILIES, FREE, Variant, variants_of
from foreshock.doctor.changes import BudgetSpentError, CannotTryError, Change
from foreshock.doctor.data import ROUNDED
from foreshock.doctor.fills import prompt_of
from foreshock.doctor.fits import selected
from foreshock.doctor.floors import ONE_OF_TWO_ROUNDINGS
from foreshock.doctor.naming import NAMED_SHARE
from foreshock.doctor.pairs import further, pair
from foreshock.doctor.trials import Trial, mixtures

_CHEAP = (*FREE, "weights")
_LITTLE_NOISE = 2.0
"""Multiple of the noise of other batches, as engines add their own. A smaller difference has cheap causes or none."""
_PART = 0.2
"""The least share that one sampling parameter explains, so that several together may be the cause."""


def explain(attempts: Attempts) -> Trial:
    """Return the trial that explains a side; the base if none does or none is needed."""
    naming, base = attempts.naming, attempts.base
    if naming.is_exact(base):
        _leave_forward(attempts, "the side is reproduced as exactly as other batches")
        return base
    if little := _little(attempts):
        _leave_forward(attempts, f"what is left is {little}")
    found = _single(attempts, _CHEAP if little else FAMILIES) or attempts.best()
    if found is None and naming.mean(base) > attempts.floors.rounding:
        found = _in_another_precision(attempts) or pair(attempts)
    found = found or _while_decoding(attempts)
    if found is None:
        return base
    return further(attempts, found) if found.rows.all() else found


def _single(attempts: Attempts, families: Sequence[str]) -> Trial | None:
    """Return the first single cause after which no other need be tried; None if all families were tried."""
    naming = attempts.naming
    for family in families:
        for causes in _by_cause(variants_of(family, attempts.subject, attempts.side)):
            tried = itertools.chain(causes, _nearer(attempts, causes))
            for trial in (each for variant in tried for each in attempts.of(attempts.base, (variant,))):
                attempts.trials.append(trial)
                if trial.data[-1:] and trial.data[-1] in ROUNDED:
                    attempts.refined(trial)
                if naming.is_exact(trial) and naming.names(trial):
                    return attempts.whole_of(attempts.with_fewer_biases(trial))
            if family not in FREE and any(naming.is_clear(each) for each in attempts.trials):
                break
        if family == "sampling":
            _try_together(attempts)
        if family == "weights":
            of_folders = [attempts.base, *(each for each in attempts.trials if each.has_other_weights)]
            attempts.trials += mixtures(of_folders, attempts.compared)
        found = attempts.best()
        if found is not None and (naming.is_exact(found) or naming.is_clear(found)):
            return found
    return None


def _nearer(attempts: Attempts, causes: list[Variant]) -> Iterator[Variant]:
    """Yield prompts whose number of ids is between that which explains most and the next ones that were tried."""
    numbers = {each.change.get("prompt", ("before", 0)): each for each in causes}
    numbers = {each: variant for each, variant in numbers.items() if each[0] != "before"}
    if not numbers:
        return

    def share(variant: Variant) -> float:
        whole = [attempts.share(each)[0] for each in attempts.trials if each.variants == (variant,)]
        return max(whole, default=max(attempts.screened.get((variant,), (-1.0,))))

    best = max(numbers, key=lambda each: share(numbers[each]))
    kind, number = best
    step = max([each[1] for each in numbers if each[0] == kind and each[1] < number], default=0)
    step = (number - step) // 2
    while step and share(numbers[best]) > 0:
        for each in ((kind, number - step), (kind, number + step)):
            label, values = prompt_of(*each)
            if each not in numbers and each[1] > 0:
                numbers[each] = replace(numbers[best], label=label, change=Change.of(**values))
                yield numbers[each]
                best = max(best, each, key=lambda one: share(numbers[one]))
        step, number = (step, best[1]) if best[1] != number else (step // 2, number)


def _try_together(attempts: Attempts) -> None:
    """Try several sampling parameters together, if one alone explains a part."""
    naming = attempts.naming
    singles = {each.fit: each for each in variants_of("sampling", attempts.subject, attempts.side)}
    tried = [each for each in attempts.trials if each.variants[0].fit and each.rows.all()]
    nearest = min(tried, key=lambda each: each.gap, default=attempts.base)
    is_beyond = naming.is_beyond(0) or naming.is_beyond(1)
    if not is_beyond or nearest.gap > (1 - _PART) * attempts.base.gap:
        return
    with contextlib.suppress(BudgetSpentError):
        names = selected(attempts.replays.fitting(attempts.base, attempts.whole), attempts.base.sampling)
        if len(names) > 1:
            attempts.trials += attempts.of(attempts.base, tuple(singles[each] for each in names))


def _in_another_precision(attempts: Attempts) -> Trial | None:
    """Return what explains most, if it may be named in another precision, which the fault has hidden."""
    naming = attempts.naming
    wholes = [each for each in attempts.trials if each.change != attempts.base.change and each.rows.all()]
    nearest = min(wholes, key=lambda each: each.gap, default=attempts.base)
    if nearest.gap > ONE_OF_TWO_ROUNDINGS * attempts.base.gap:
        return None
    named = [each for each in attempts.refined(nearest) if naming.names(each)]
    return min(named, key=lambda each: each.gap, default=None)


def _while_decoding(attempts: Attempts) -> Trial | None:
    """Return the cause of sampling that explains most, if it may be named in a decode, whose rounding has hidden it.

    It must be exact there, and explain nine tenths of what the decode alone leaves, more than any other such cause.
    """
    naming, base, families = attempts.naming, attempts.base, variants_of("sampling", attempts.subject, attempts.side)
    wholes = [each for each in attempts.trials if each.sampling is not base.sampling and each.rows.all()]
    nearest = min(wholes, key=lambda each: each.gap, default=base)
    if attempts.side != "rollout" or nearest.gap > ONE_OF_TWO_ROUNDINGS * base.gap:
        return None
    try:
        decoded = base.change.plus(Change.of(composition="decode"))
        start = attempts.replays.plain(decoded, base.sampling, attempts.whole)
    except CannotTryError as error:
        attempts.not_tried["decoding token by token"] = str(error)
        return None
    if naming.is_exact(start):
        return None
    tried = [trial for each in families for trial in attempts.of(start, (each,)) if trial.rows.all()]
    found = min(tried, key=lambda each: each.gap, default=start)
    is_cause = attempts.share(found, start)[1] >= NAMED_SHARE and naming.needs_both(found, start, tried)
    return found if is_cause and naming.is_exact(found) and naming.names(found) else None


def _little(attempts: Attempts) -> str:
    """Return what explains a small difference without a cause; "" if nothing does."""
    naming = attempts.naming
    if naming.is_below(attempts.base, naming.noise_of(attempts.base), _LITTLE_NOISE):
        return "hardly more than the noise of other batches"
    may_decode = attempts.side == "rollout" and naming.mean(attempts.base) <= attempts.floors.rounding
    if may_decode and naming.is_below(attempts.base, attempts.floors.decoding()):
        return "no more than what decoding token by token differs by"
    return ""


def _leave_forward(attempts: Attempts, why: str) -> None:
    """Report that the forward pass is not searched, with the fields in which known configurations differ."""
    fields = [each for each in variants_of("forward", attempts.subject, attempts.side) if each.cause == "configuration"]
    for name in ("forward", *(f"configuration: {each.label}" for each in fields)):
        attempts.not_tried[name] = why


def _by_cause(variants: Iterable[Variant]) -> Iterator[list[Variant]]:
    """Yield the variants of each cause."""
    for _, found in itertools.groupby(variants, key=lambda each: each.cause):
        yield list(found)
