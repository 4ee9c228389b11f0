"""One response to most prompts: a collapsed policy, a reward that one text satisfies, or prompts that do not arrive."""

from __future__ import annotations

import numpy as np

from foreshock.lint.checks.duplicates import LEAST_GENERATED, Repeats
from foreshock.lint.checks.values import RolloutValues
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_percent

_LEAST_SHARE, _LEAST_PROMPTS = 0.5, 4


def _check(judging: Judging) -> Outcome:
    """Check if at least half of the rollouts have one response that is not short, to several prompts."""
    hashes = judging[Repeats].hashes
    rollouts = len(hashes.keys)
    if not rollouts:
        within_step = "checked within a step, not across steps"
        return NotChecked(within_step if judging[RolloutValues].logged else "needs rollout_log_probs")
    if np.unique(hashes.prompts).size < _LEAST_PROMPTS:
        return NotChecked(f"needs {_LEAST_PROMPTS} different prompts")
    texts, counts = np.unique(hashes.responses[hashes.responses != 0], return_counts=True)
    count = int(counts.max(initial=0))
    if count < _LEAST_SHARE * rollouts:
        return Clean()
    prompts = int(np.unique(hashes.prompts[hashes.responses == texts[counts.argmax()]]).size)
    if prompts < _LEAST_PROMPTS:
        return Clean()
    seen = (
        f"{count:,} of {rollouts:,} rollouts, of {prompts:,} different prompts, have the same response of at least "
        f"{LEAST_GENERATED} generated tokens."
    )
    numbers = {"rollouts": rollouts, "same": count, "prompts": prompts}
    title = f"{format_percent(count, rollouts)} of the responses are the same text, whatever the prompt"
    return Finding("warning", seen, numbers, title=title)


SAME_RESPONSE = Check(
    "same_response",
    "most responses are the same text, whatever the prompt",
    "The mismatch is that of one text, and the policy no longer answers its prompts.",
    "Read some responses. Look for a reward that one text satisfies (reward hacking), at the entropy bonus and the KL "
    "penalty, and check that the engine receives the prompts.",
    _check,
    explains=False,
)
