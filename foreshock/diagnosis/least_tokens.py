"""The number of tokens that a step needs before a rule judges it.

A mean over few tokens is beyond a threshold by chance. The numbers are the least of 30, 100, 300 and 1,000 tokens at
which fewer than 1 in 100 healthy steps are beyond the rule's threshold: steps of so many tokens were drawn from the
steps 1 to 80 of the healthy recorded run (110,401 tokens). With 30 tokens k3 is beyond a tenth of its range (5 times
its mean) in 2.0 % of the steps, with 100 in 0.8 %; the others with 30 in at most 0.3 %. Steps 81 to 160 are locked:
`tests/foreshock/diagnosis/test_least_tokens.py` reads them, and all pass.

For entropy, 100 is our choice: the recorded run logs none, and −log μ in its place passed on the tuning steps (0.0 % at
a fifth of its mean) and failed on the locked ones (15 %, at a mean of 0.04). Those for surprisal and advantages are
choices too.
"""

from typing import Final

LEAST_TOKENS: Final = {
    "k3_kl": 100,
    "k3_kl_per_entropy": 100,
    "chi2_token": 100,
    "reverse_chi2_token": 100,
    "low_probability_abs_d": 30,
    "mean_abs_d": 30,
    "tail_2": 30,
    "tail_asymmetry_ln2": 30,
    "ess_token": 30,
    "mean_ratio": 30,
    "training_ppl": 30,
    "surprisal_z": 100,
    "advantage_d_cov": 100,
    "advantage_skew": 100,
    "entropy_mean": 100,
}
"""Measure → tokens. Rules on measures that are not a mean over tokens (lengths, truncation, lag, counts) need none."""
