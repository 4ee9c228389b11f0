"""Second causes: every variant on top of those that explained most, or of one that may be named alone."""

import contextlib
from collections.abc import Iterator

from foreshock.doctor.attempts import Attempts
from foreshock.doctor.catalogue import FAMILIES, FREE, Variant, variants_of
from foreshock.doctor.changes import BudgetSpentError
from foreshock.doctor.trials import Trial

_STARTS = 4
"""Single variants from which pairs are tried: those that explain most."""


def pair(attempts: Attempts) -> Trial | None:
    """Search a second cause on what the best single ones leave."""
    naming = attempts.naming
    for start in _starts(attempts):
        tried = [trial for family in FAMILIES for trial in _seconds(attempts, family, start)]
        named = [each for each in tried if naming.names(each) and naming.needs_both(each, start, tried)]
        if named:
            attempts.trials += named
            named += attempts.refined(min(named, key=lambda each: each.gap))
            return attempts.whole_of(min(named, key=lambda each: each.gap))
    return None


def further(attempts: Attempts, found: Trial) -> Trial:
    """Search a second cause of what a named one leaves."""
    naming = attempts.naming
    if naming.is_exact(found):
        return found
    families = FREE if naming.is_within_one_rounding(found) else FAMILIES
    tried = [trial for family in families for trial in _seconds(attempts, family, found) if trial.rows.all()]
    best = min(tried, key=lambda each: each.gap, default=found)
    return best if best is not found and naming.needs_both(best, found, tried) else found


def _starts(attempts: Attempts) -> list[Trial]:
    """Return the best trial of each of the causes that explain most, of those tried or screened."""
    wholes = [each for each in attempts.trials if each.gap < 0.95 * attempts.base.gap and each.rows.all()]
    shares: list[tuple[float, tuple[Variant, ...], Trial | None]] = []
    shares += [(1 - each.gap / attempts.base.gap, each.variants, each) for each in wholes]
    shares += [(max(each), variants, None) for variants, each in attempts.screened.items() if max(each) > 0.05]
    best: dict[str, tuple[tuple[Variant, ...], Trial | None]] = {}
    for _, variants, trial in sorted(shares, key=lambda each: -each[0]):
        best.setdefault(variants[0].cause, (variants, trial))
    found = []
    for variants, trial in list(best.values())[:_STARTS]:
        whole = trial
        with contextlib.suppress(BudgetSpentError):
            whole = whole or next(iter(attempts.replays.try_on(attempts.base, variants, attempts.whole)), None)
        found += [whole] if whole is not None and whole.gap < 0.95 * attempts.base.gap else []
    return sorted(found, key=lambda each: each.gap)


def _seconds(attempts: Attempts, family: str, start: Trial) -> Iterator[Trial]:
    causes = {each.cause for each in start.variants}
    known = {name for each in start.variants for name, _ in each.change.values}
    for variant in variants_of(family, attempts.subject, attempts.side):
        if variant.cause in causes or known & set(dict(variant.change.values)):
            continue
        # Fits are made again under the change, and data changes come last.
        plain = attempts.base if variant.change.values and all(each.fit for each in start.variants) else start
        variants = (variant, *start.variants) if plain is attempts.base else (variant,)
        for trial in attempts.of(plain, variants, start):
            yield trial
            if attempts.naming.is_exact(trial):
                return
