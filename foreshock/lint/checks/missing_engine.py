"""Tokens that the engine did not score: log μ is 0, or a constant, and log π is not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshock.lint.checks.declared import Declared
from foreshock.lint.checks.missing_trainer import NEARLY_ALL, place_in_response
from foreshock.lint.checks.pairs import NO_PAIRS, Pairs, if_copied, if_shifted
from foreshock.lint.checks.ratio import CLEARLY
from foreshock.lint.counting import LARGEST_D, Bools, Counting, Counts, Example, Piece, largest
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_number, format_percent

# The examples of this name are the values found in place of log μ: 0 and constants such as −3.
_VALUES = "values of no_mu"
_LEAST_TOKENS = 4
# So many tokens with one log μ are no chance.
_LEAST_EQUAL = 100
# Mean log π is above this at tokens that μ is certain of, and below it at tokens that the engine did not score.
_CERTAIN_LOG_PI = -0.2
# Tokens that truncation or a low temperature makes certain have a mean log π above this.
_UNSAMPLED_LOG_PI = -1.6

_OF_ONE_VALUE = (
    "Look whether the engine has loaded any weights (log μ of equal logits is −ln of the number of ids), and what "
    "fills the column."
)


@dataclass
class NoMu(Counts):
    """Tokens with log μ exactly 0 and log π clearly below, or with log μ a constant and log π clearly different."""

    tokens: int = 0
    first: int = 0  # at the first token of a response, at the last, in a run of them up to the end
    last: int = 0
    trailing: int = 0
    beside: int = 0  # next to another one
    log_pi: float = 0.0  # Σ log π
    k3: float = 0.0
    minus_least: float = largest()  # of all log μ
    most: float = largest()

    def add_piece(self, piece: Piece, counting: Counting) -> None:
        """Count the tokens of a piece, also by position in the response."""
        pairs, constants = piece.pairs, counting.constants["rollout"]
        rollout, d = pairs.rollout, pairs.d
        if rollout is None or d is None:
            return
        least, most = pairs.bounds.get("rollout", (np.inf, -np.inf))
        self.minus_least, self.most = max(self.minus_least, -least), max(self.most, most)
        below = d < np.float32(-CLEARLY)
        if constants.size or (below & (rollout == 0)).any():
            self._add(pairs, below | ((d > np.float32(CLEARLY)) & (rollout != 0)), counting)

    def _add(self, piece: Piece, differs: Bools, counting: Counting) -> None:
        assert piece.rollout is not None
        assert piece.trainer is not None
        zeros = np.flatnonzero(np.isin(piece.rollout, [0.0, *counting.constants["rollout"]]))
        rows = np.searchsorted(piece.offsets, zeros, side="right") - 1
        ends = piece.offsets[rows + 1]
        zeros_after = np.searchsorted(zeros, ends) - 1 - np.arange(zeros.size)
        # A response with log μ = 0 everywhere has no such run: greedy sampling logged as processed gives that too.
        lengths = np.diff(piece.offsets)
        trailing = (zeros_after == ends - 1 - zeros) & (np.bincount(rows, minlength=lengths.size) < lengths)[rows]
        missing = differs[zeros]
        places = zeros[missing]
        log_mu = piece.rollout[places].astype(np.float64)
        log_pi = np.maximum(piece.trainer[places].astype(np.float64), -LARGEST_D)
        self.tokens += places.size
        self.first += int((missing & (zeros == piece.offsets[rows])).sum())
        self.last += int((missing & (zeros == ends - 1)).sum())
        self.trailing += int((missing & trailing).sum())
        self.beside += int((np.isin(places + 1, places) | np.isin(places - 1, places)).sum())
        self.log_pi += float(log_pi.sum())
        self.k3 += float((np.expm1(log_pi - log_mu) - (log_pi - log_mu)).sum())
        for value in np.unique(log_mu).tolist():
            counting.add_example(_VALUES, Example(format_number(value + 0.0)))
        for index in places[:3].tolist():
            place, of_mu = piece.place(index), format_number(float(piece.rollout[index]) + 0.0)
            token_id = counting.batch.response_token_ids[place]
            text = f"id {token_id}, log μ {of_mu}, log π {piece.trainer[index]:.3g}"
            counting.add_token("tokens_without_engine", place, text)


def _check(judging: Judging) -> Outcome:
    """Check for tokens that the engine did not score: padding, ends, or a prompt's last token."""
    found, pairs = judging[NoMu], judging[Pairs]
    if not pairs.tokens:
        return NotChecked(NO_PAIRS)
    k3 = pairs.k3 / pairs.tokens
    if pairs.tokens >= _LEAST_EQUAL and found.most == -found.minus_least != 0.0 and k3 > judging.healthy_k3:
        value = format_number(found.most)
        seen = (
            f"log μ is {value} at each of {pairs.tokens:,} tokens, and log π is not: the engine's logits are all "
            "equal, or the column holds another value."
        )
        title = f"log μ is {value} at every token"
        return Finding("critical", seen, {"log_mu": found.most}, title=title, remedy=_OF_ONE_VALUE)
    if found.tokens < _LEAST_TOKENS or found.log_pi > _CERTAIN_LOG_PI * found.tokens:
        return Clean()
    place = place_in_response(judging, found.first, found.last, found.tokens)
    if found.trailing >= NEARLY_ALL * found.tokens and found.last < NEARLY_ALL * found.tokens:
        place = ", in runs up to the end of their response: padding, or log-probs that the engine did not return"
    all_of = found.tokens >= NEARLY_ALL * pairs.tokens
    unlikely = found.log_pi <= _UNSAMPLED_LOG_PI * found.tokens
    # A declared temperature excludes that all tokens were certain.
    uncertain = (unlikely or (all_of and judging[Declared].plain > 0)) and not judging[Declared].greedy
    if not place and uncertain and all_of:
        place = f", {format_percent(found.tokens, pairs.tokens)} of all: the engine returned no log-probs"
    elif not place and uncertain and found.beside >= NEARLY_ALL * found.tokens:
        place = ", in runs: tokens that the model did not sample, such as tool output"
    values = [each.sample_id for each in judging.evidence.where(_VALUES)] or ["0"]
    if not place and values == ["0"]:
        if not uncertain:
            return Clean()
        place = ", here and there: the engine returned no log-probs for them, as with accepted draft tokens"
    rest = pairs.tokens - found.tokens
    without = format_number((pairs.k3 - found.k3) / rest) if rest else "not known"
    seen = (
        f"{found.tokens:,} tokens have log μ = {' or '.join(values)} exactly, and a mean log π of "
        f"{format_number(found.log_pi / found.tokens)}{place}. Without them k3 is {without}."
    )
    numbers = {"no_mu": found.tokens, "no_mu_first": found.first, "no_mu_last": found.last}
    numbers["no_mu_trailing"] = found.trailing
    if values == ["0"] and found.first >= NEARLY_ALL * found.tokens:
        # A token that the engine may not choose has a log-prob of 0, too.
        return Finding("critical", seen, numbers, title=_OF_FIRST, remedy=f"{_FORCED} {WITHOUT_ENGINE.remedy}")
    return Finding("critical", seen, numbers)


_OF_FIRST = "log μ is 0 at the first token of responses: the engine did not score it, or forced it"
_FORCED = "If the engine forces it (a template's tag, a grammar), set the response mask to 0 there."


WITHOUT_ENGINE = Check(
    "tokens_without_engine",
    "the engine has no log-prob for tokens that the trainer scored",
    "ρ of these tokens is as small as they are unlikely: mean ρ falls below 1 and k3 is large, as if μ had been "
    "truncated.",
    "Let the engine return a log-prob for every token that it samples, the end of sequence too; set the response "
    "mask to 0 for padding, tool output and prompt tokens.",
    _check,
    unless=lambda judging: if_copied(judging) or if_shifted(judging),
)
