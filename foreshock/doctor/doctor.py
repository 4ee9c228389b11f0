"""Find the variant that reproduces what each side logged, and what differs between the two."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from foreshock.api.doctor import DoctorReport, Finding, NotTried, RuledOut, SideReport
from foreshock.diagnosis.wording import number, plural
from foreshock.doctor.attempts import Attempts
from foreshock.doctor.catalogue import CATALOGUE, SAMPLING
from foreshock.doctor.changes import BudgetSpentError, CannotTryError, Change, Experimenter, hashable
from foreshock.doctor.evidence import Compared, share_range
from foreshock.doctor.fills import differing_fields
from foreshock.doctor.findings import SIDE_WORDS
from foreshock.doctor.sampling import Sampling
from foreshock.doctor.search import explain
from foreshock.doctor.trials import Budget, Trial
from foreshock.rollouts import RolloutBatch

_ROWS = {cause.name: cause for cause in CATALOGUE}


def examine(
    batch: RolloutBatch,
    experimenter: Experimenter,
    budget: Budget | None = None,
    log: Callable[[str], None] = lambda line: None,
    *,
    in_float32: bool = False,
) -> DoctorReport:
    """Explain the logged log-probs of `batch`, each side separately, by experiments within `budget`.

    `in_float32`: both sides are known to have computed in float32, so that bfloat16's rounding explains nothing.
    Raises CannotTryError if neither side was logged, or if the announced weights cannot be replayed at all or within
    the budget.
    """
    if batch.rollout_log_probs is None and batch.trainer_log_probs is None:
        raise CannotTryError("the rollouts have neither rollout_log_probs nor trainer_log_probs: nothing to explain")
    budget = budget or Budget()
    experimenter.check = budget.check
    logged = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs}
    copied = _bypass(batch)

    def attempts_of(side: str, values: NDArray[np.float32]) -> Attempts:
        log(f"replaying the announced weights of {SIDE_WORDS[side]}")
        compared, declared = Compared.of(batch, values), _declared(batch, side)
        return Attempts(side, compared, experimenter, declared, budget, log, in_float32=in_float32)

    sides = {side: values for side, values in logged.items() if values is not None}
    first = sides if copied is None else {"rollout": sides["rollout"]}
    searches, unsearched = _explain(first, attempts_of, log)
    if copied is not None and "rollout" in searches and not searches["rollout"].is_copy():
        copied = None  # any two passes agree, as for a collapsed policy
        of_trainer, left = _explain({"trainer": sides["trainer"]}, attempts_of, log)
        searches, unsearched = searches | of_trainer, unsearched + left
    if not searches:
        raise CannotTryError(
            f"the budget of {budget.seconds:.0f} s was spent on the first replays of the announced weights: "
            "give more time or fewer rollouts"
        )
    findings = [_unexamined(side, batch) for side in unsearched]
    for search in searches.values():
        findings += _findings(search, batch)
    if copied is not None:
        findings.append(copied)
    if len(searches) == 2:
        findings += _between(searches, experimenter, batch, findings)
    if "rollout" in searches:
        findings += _drawn(searches["rollout"], batch)
    if not findings:
        findings = [_rounding(searches, batch)]
    order = {"cause": 0, "unknown": 1, "expected": 2}
    not_tried, spent = [*experimenter.subject.unusable.items()], str(BudgetSpentError())
    for side, search in searches.items():
        not_tried += [
            *search.floors.refused.items(),
            *((f"{each} [{side}]", why) for each, why in search.not_tried.items()),
        ]
    not_tried = list(dict.fromkeys([*not_tried, *((f"everything [{side}]", spent) for side in unsearched)]))
    following = next((variant for variant, why in not_tried if why == spent), None)
    return DoctorReport(
        rollouts=batch.num_rollouts,
        tokens=batch.num_tokens,
        findings=tuple(sorted(findings, key=lambda each: order[each.kind])),
        sides=tuple(_on_side(search) for search in searches.values()),
        ruled_out=_tried(searches),
        not_tried=tuple(NotTried(*pair) for pair in not_tried),
        replays=int(np.ceil(budget.replays)),
        seconds=budget.spent,
        ended=f"the budget is spent; with more, the next would be {following}"
        if following
        else "the search is complete",
    )


def _explain(
    logged: Mapping[str, NDArray[np.float32]],
    attempts_of: Callable[[str, NDArray[np.float32]], Attempts],
    log: Callable[[str], None],
) -> tuple[dict[str, Attempts], list[str]]:
    """Return the explained sides, and those whose announced weights the budget was too small for.

    The side that is farther from its announced weights comes first: the budget may end before the other.
    """
    begun: dict[str, Attempts] = {}
    unsearched: list[str] = []
    for side, values in logged.items():
        try:
            begun[side] = attempts_of(side, values)
        except BudgetSpentError:
            unsearched.append(side)
    for side in sorted(begun, key=lambda each: -begun[each].distance):
        log(f"explaining {SIDE_WORDS[side]}")
        try:
            begun[side].found = explain(begun[side])
        except BudgetSpentError as error:
            begun[side].not_tried["everything"] = str(error)
    return begun, unsearched


def _tried(searches: dict[str, Attempts]) -> tuple[RuledOut, ...]:
    """Return the single variants tried on sides without a named one, those that explain most first."""
    tried = {
        f"{_words(trial)} [{side}]": search.share(trial)[0]
        for side, search in searches.items()
        if search.found is search.base
        for trial in search.trials
        if len(trial.variants) == 1
    }
    tried |= {
        f"{variants[0].cause.replace('_', ' ')} {variants[0].label}".strip() + f" [{side}]": share
        for side, search in searches.items()
        if search.found is search.base
        for variants, (share, _) in search.screened.items()
        if np.isfinite(share)
    }
    return tuple(RuledOut(*pair) for pair in sorted(tried.items(), key=lambda each: -each[1]))


def _declared(batch: RolloutBatch, side: str) -> tuple[Sampling, ...]:
    """Return the distributions that a side's log-probs may have by the declarations, the likeliest first.

    Trainers divide their logits by the temperature, whatever the engine logs, and never truncate.
    """
    names = ("temperature", "top_p", "top_k", "min_p")
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    values = {name: _per_token(batch, name, neutral[name]) for name in names}
    plain, tempered = Sampling(), Sampling(temperature=values["temperature"])
    if np.all(values["temperature"] == 1.0):
        tempered = plain
    if side == "trainer":
        return (tempered,) if tempered is plain else (tempered, plain)
    mode = batch.attributes.logprobs_mode
    whole = plain
    for name in names:
        if np.any(values[name] != neutral[name]):
            whole = whole.having(name, values[name])
    if mode == "raw_logprobs" or whole is plain:
        return (plain,)
    return (whole,) if mode == "processed_logprobs" else (plain, whole)


def _per_token(batch: RolloutBatch, name: str, neutral: float) -> NDArray[np.float64]:
    attribute, column = getattr(batch.attributes, name), getattr(batch, name)
    default = neutral if attribute is None else attribute
    values = np.full(batch.num_rollouts, default, np.float64)
    if column is not None:
        values = np.where(np.isnan(np.asarray(column, np.float64)), values, column)
    if name in ("temperature", "top_k"):  # greedy sampling, and −1 for all tokens
        values = np.where(values <= 0, neutral, values)
    values = np.repeat(values, batch.response_lengths)
    return values.astype(np.int64) if name == "top_k" else values


def _bypass(batch: RolloutBatch) -> Finding | None:
    mine, theirs = batch.rollout_log_probs, batch.trainer_log_probs
    if mine is None or theirs is None or not np.array_equal(mine, theirs, equal_nan=True):
        return None
    kind: Literal["expected", "cause"] = "expected" if batch.attributes.trainer_policy == "bypass" else "cause"
    says = "the trainer's log-probs are bit for bit the engine's: they are a copy, and trainer/rollout measures nothing"
    verl = "algorithm.rollout_correction.bypass_mode=False"
    fixes = {"verl": verl, "any": "recompute old log-probs in the trainer"}
    return Finding(kind, "trainer", "bypass", "", says, batch.num_tokens, batch.num_rollouts, fixes=fixes)


def _findings(search: Attempts, batch: RolloutBatch) -> list[Finding]:
    found = search.found
    if not search.is_explained:
        is_tried = search.trials or search.screened
        return [_unknown(search, batch) if is_tried else _unexamined(search.side, batch)]
    if found is search.base:
        return []
    tokens = found.rows[search.compared.rows]
    names = tuple(batch.sample_ids[row] for row in np.flatnonzero(found.rows)[:5])
    part = "" if found.rows.all() else f", in {plural(int(found.rows.sum()), 'rollout')} of {batch.num_rollouts:,}"
    if found.rows.all() and found.data:
        touched = np.abs(search.base.halves - found.halves) > search.floors.rounding
        tokens = tokens & touched
    share, result = search.share(found), []
    for cause, value, label, fixes in _named(search):
        row = _ROWS.get(cause, SAMPLING)
        lag = _is_declared_lag(search, batch) if cause == "other_weights" else False
        says = f"{SIDE_WORDS[search.side]} {row.says.format(label=label)}{part}"
        if lag:
            says += ", as their weights_version declares: a lag, not a fault"
        kind: Literal["expected", "cause"] = "expected" if lag else "cause"
        size = int(tokens.sum()), int(found.rows.sum())
        before, after = search.naming.mean(search.base), search.naming.mean(found)
        others = tuple(dict.fromkeys(_words(each) for each in search.alternatives()))
        more: dict[str, Any] = {"before": before, "after": after, "exact": search.naming.is_exact(found)}
        more |= {"alternatives": others, "fixes": fixes, "confirm": row.confirm}
        result.append(Finding(kind, search.side, cause, value, says, *size, names, *share, **more))
    return result


def _named(search: Attempts) -> list[tuple[str, str, str, Mapping[str, str]]]:
    """Return the cause, value, words and fixes of each finding: sampling parameters fitted together are one."""
    found, widths = search.found, search.uncertainties()
    named: list[tuple[str, str, str, Mapping[str, str]]] = []
    together: list[tuple[str, str, str, Mapping[str, str]]] = []
    for variant, value in zip(found.variants, found.values, strict=True):
        label = f"{value} ± {widths[variant.fit]:.1g}" if variant.fit in widths else value
        if variant.fit in ("presence", "frequency") and (width := widths.get("presence + frequency")):
            label = f"{value} ± {width:.1g} (the sum of presence and frequency, which these tokens cannot tell apart)"
        label += {
            "repetition_of_response": " over the ids of the response only",
            "softcap_product": " by l · tanh(l / c)",
        }.get(variant.fit, "")
        each = (variant.cause, value, label, _ROWS[variant.cause].fixes)
        (together if variant.fit else named).append(each)
    if len(together) < 2:
        return named + together
    words = [f"{cause.replace('_', ' ')} {label}" for cause, _, label, _ in together]
    fixes: dict[str, str] = {}
    for framework, fix in (item for _, _, _, of_row in together for item in of_row.items()):
        fixes[framework] = f"{fixes[framework]}; {fix}" if framework in fixes else fix
    values = [f"{cause.replace('_', ' ')} {value}" for cause, value, _, _ in together]
    return [*named, (SAMPLING.name, ", ".join(values), ", ".join(words), fixes)]


def _is_declared_lag(search: Attempts, batch: RolloutBatch) -> bool:
    """Whether the concerned rollouts are exactly those that declare another version than the announced one."""
    versions = batch.weights_version
    subject = search.subject
    announced = subject.versions.get(subject.announced[search.side])
    if versions is None or announced is None:
        return False
    declared = np.zeros(batch.num_rollouts, dtype=np.bool_)
    declared[search.compared.rows[versions != announced]] = True
    held = subject.versions.get(search.found.change.get("weights"))
    concerned = versions[search.found.rows[search.compared.rows]]
    return bool(np.array_equal(declared, search.found.rows) and held in concerned)


def _unexamined(side: str, batch: RolloutBatch) -> Finding:
    says = f"{SIDE_WORDS[side]} were not examined: the budget was spent before"
    confirm = "give more time or fewer rollouts"
    return Finding("unknown", side, "unknown", "", says, batch.num_tokens, batch.num_rollouts, confirm=confirm)


def _unknown(search: Attempts, batch: RolloutBatch) -> Finding:
    compared, halves = search.compared, search.base.halves
    beyond = np.nan_to_num(compared.by_rollout(halves)) > search.floors.rounding
    tried = [trial.variants for trial in search.trials] + list(search.screened)
    families = ", ".join(dict.fromkeys(_ROWS[variants[0].cause].family for variants in tried))
    best = max((each for each in search.trials), key=lambda each: search.share(each)[0], default=None)
    nearest = (
        f"; the nearest, {_words(best)}, explains {100 * search.share(best)[0]:.0f} % and is not named" if best else ""
    )
    says = (
        f"{SIDE_WORDS[search.side]} are reproduced by no variant that was tried ({families}){nearest}. "
        f"{_where(compared, halves)}"
    )
    size, left = (int(compared.usable.sum()), int(beyond.sum())), search.naming.mean(search.base)
    names = tuple(batch.sample_ids[row] for row in np.argsort(-np.nan_to_num(compared.by_rollout(halves)))[:5])
    confirm = "give other checkpoints, or compare hidden states layer by layer"
    return Finding("unknown", search.side, "unknown", "", says, *size, names, before=left, after=left, confirm=confirm)


def _where(compared: Compared, halves: NDArray[np.float64]) -> str:
    """Return where most of the difference is: at an id, at the first or last tokens, in some rollouts, or nowhere."""
    total = max(float(halves.sum()), 1e-300)
    by_id = np.bincount(compared.ids, halves)
    top, frequency = int(by_id.argmax()), float((compared.ids == by_id.argmax()).mean())
    length = np.diff(compared.batch.response_offsets)[compared.rows]
    places = {
        f"at the id {top}": (by_id[top] / total, frequency),
        "at the first five tokens": _share_at(compared.position < 5, halves),
        "at the last five tokens": _share_at(length - compared.position <= 5, halves),
    }
    by_rollout = np.sort(np.bincount(compared.rows, halves))[::-1]
    tenth = max(1, by_rollout.size // 10)
    places["in a tenth of the rollouts"] = (float(by_rollout[:tenth].sum()) / total, 0.1)
    place, (share, size) = max(places.items(), key=lambda each: each[1][0] - each[1][1])
    if share < 0.5 or share < 2 * size:
        return "The difference is spread over ids, positions and rollouts."
    return f"{100 * share:.0f} % of the difference is {place}, which are {100 * size:.0f} % of the whole."


def _share_at(tokens: NDArray[np.bool_], halves: NDArray[np.float64]) -> tuple[float, float]:
    return float(halves[tokens].sum() / max(halves.sum(), 1e-300)), float(tokens.mean())


def _between(
    searches: dict[str, Attempts], experimenter: Experimenter, batch: RolloutBatch, so_far: list[Finding]
) -> list[Finding]:
    """Return what differs between two sides that are each reproduced: temperature, configuration, announced weights."""
    engine, trainer = searches["rollout"], searches["trainer"]
    if not (engine.is_explained and trainer.is_explained):
        return []
    found = []
    mine, theirs = (float(np.mean(each.found.sampling.temperature)) for each in (engine, trainer))
    if mine != theirs and not any(each.cause in ("temperature", SAMPLING.name) for each in so_far):
        found.append(_temperatures(batch, mine, theirs))
    names = [str(search.found.change.get("weights")) for search in (engine, trainer)]
    compared, subject = trainer.compared, experimenter.subject
    if names[0] == names[1] or subject.announced["rollout"] == subject.announced["trainer"]:
        return found  # the same weights, or a cause of one side: no lag between the sides
    base = trainer.found.change.plus(Change.of(weights=names[0]))
    sampling = trainer.found.sampling

    def halves(change: Change) -> NDArray[np.float64]:
        return compared.halves(sampling.log_probs(experimenter.logits(change), compared))

    try:
        before = halves(base)
    except BudgetSpentError:
        return found
    for field in differing_fields(subject, *names):
        value = subject.configurations[names[1]].get(field)
        try:
            after = halves(base.plus(Change.of(config=(field, hashable(value)))))
        except CannotTryError:
            continue
        share = share_range(before, after, compared)
        if share[1] > trainer.floors.precision_shares[0]:
            ours = subject.configurations[names[0]].get(field)
            says = f"the configurations of both sides differ: {field} is {ours} in {names[0]} and {value} in {names[1]}"
            row, size = _ROWS["configuration"], (batch.num_tokens, batch.num_rollouts, ())
            left: dict[str, Any] = {"before": float(before.mean()), "after": float(after.mean()), "fixes": row.fixes}
            value = f"{field} = {value}"
            found.append(Finding("cause", "both", row.name, value, says, *size, *share, **left, confirm=row.confirm))
    if not found and share_range(before, trainer.found.halves, compared)[1] > trainer.floors.precision_shares[0]:
        says = (
            f"the sides were given other weights, {names[0]} and {names[1]}, and each side is reproduced by its own: "
            "the difference is the lag between them"
        )
        found.append(Finding("expected", "both", "lag", names[0], says, batch.num_tokens, batch.num_rollouts))
    return found


def _drawn(search: Attempts, batch: RolloutBatch) -> list[Finding]:
    """Return the truncation that the tokens show and their raw log-probs do not have, if there is one."""
    found = search.drawn()
    if found is None:
        return []
    name, value, expected = found[0], f"{found[1]:.4g}", found[2]
    row, tokens = _ROWS[name], int(search.compared.usable.sum())
    says = (
        f"{SIDE_WORDS['rollout']} are raw: they are those of the announced weights, but the tokens were drawn with "
        f"about {name.replace('_', '-')} {value}. None of {plural(tokens, 'token')} is beyond it, where {expected:.0f} "
        "would be expected. Ratios to these log-probs look right and are not"
    )
    fixes = {**row.fixes, "any": "log the log-probs of the distribution that samples (processed_logprobs)"}
    more: dict[str, Any] = {"fixes": fixes, "confirm": row.confirm}
    return [Finding("cause", "rollout", name, value, says, tokens, batch.num_rollouts, **more)]


def _temperatures(batch: RolloutBatch, mine: float, theirs: float) -> Finding:
    row = _ROWS["temperature"]
    side, says = "both", f"μ is logged before the temperature (raw), π at temperature {number(theirs)}"
    if mine != 1.0:
        says = f"π is at temperature {number(theirs)}, and μ at {number(mine)}: the trainer does not apply it"
        side = "trainer"
    return Finding("cause", side, row.name, number(theirs), says, batch.num_tokens, batch.num_rollouts, fixes=row.fixes)


def _rounding(searches: dict[str, Attempts], batch: RolloutBatch) -> Finding:
    if batch.rollout_log_probs is not None and batch.trainer_log_probs is not None:
        d = Compared.of(batch, batch.rollout_log_probs)
        size = f"E[d²]/2 of trainer/rollout is {number(d.gap(batch.trainer_log_probs.astype(np.float64)))}"
    else:
        size = "one side was logged"
    replays = ", ".join(f"{side} by {search.base.change.get('precision')}" for side, search in searches.items())
    says = f"every side is reproduced by its announced weights to within ordinary rounding ({replays}); {size}"
    return Finding("expected", "both", "rounding", "", says, batch.num_tokens, batch.num_rollouts)


def _words(trial: Trial) -> str:
    named = zip(trial.variants, trial.values, strict=True)
    words = " and ".join(f"{variant.cause.replace('_', ' ')} {value}".strip() for variant, value in named)
    return words if trial.rows.all() else f"{words} in some rollouts"


def _on_side(search: Attempts) -> SideReport:
    precision, before, after = str(search.found.change.get("precision")), search.base, search.found
    noise = search.floors.rounding  # which it never exceeds, if the budget was spent before it was measured
    with contextlib.suppress(BudgetSpentError):
        noise = search.naming.noise_of(after)[0]
    sizes = search.naming.mean(before), search.naming.mean(after), noise, search.floors.rounding
    return SideReport(search.side, precision, *sizes)
