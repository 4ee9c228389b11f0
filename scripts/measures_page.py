"""Write docs/measures.md from the registry: `python -m scripts.measures_page`; `--check` checks that it is current.

The tables come from foreshock/measures/registry.py and conditions.py; the text between them is here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from foreshock.measures.registry import MEASURES, Measure
from foreshock.measures.statistics.conditions import CONDITIONS, Condition
from scripts.generated import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measures.md"

INTRODUCTION = """\
# Measures

Compute every measure of a step from your own tensors, or look up a measure in the [tables](#contents).

μ is the sampling policy, π the trained policy. Per token `d = log π − log μ` and `ρ = exp(d)`. A comparison is written
`target/behaviour`, π/μ. Expectations are over tokens or sequences drawn from μ. For the meaning of the numbers in a
run, and their healthy ranges, see [read the numbers](reading-the-numbers.md). This page is generated from
`foreshock/measures/registry.py` by `python -m scripts.measures_page`.
"""

FRAMEWORKS = """\
## Measure a step in any framework

A trainer has padded tensors and a mask. This computes all measures of a step from them, without a service:

```python
from foreshock.measures import measure_step
from foreshock.rollouts import RolloutBatch

rollouts = RolloutBatch.from_padded(
    responses,
    response_mask,
    rollout_log_probs=rollout_log_probs,
    trainer_log_probs=old_log_probs,
    group_ids=prompt_ids,
)
measurement = measure_step(rollouts)
metrics = measurement.step.measures() | measurement.comparisons["trainer/rollout"].measures()
```

`pip install .` in a clone needs numpy and pyarrow, no torch. With `.[fast]`, call
`foreshock.measures.passes.compiled.prepare()` once per process: the same lines then run as machine code.

| argument | shape and meaning |
| --- | --- |
| `responses`, `response_mask` | [N, L] token ids, and 1 for tokens that the model sampled; prompts may precede them |
| `rollout_log_probs`, `trainer_log_probs` | [N, L] log μ as logged by the engine, and log π |
| `group_ids` | [N] the prompt of each rollout, strings or integers; without it each rollout is a cluster |
| `entropy` | [N, L] of μ, in nats |
| `advantage`, `reward` | [N, L] or [N]; [N] |
| `turn`, `weights_version` | [N, L] or [N]; lag also needs `attributes=BatchAttributes(trainer_weights_version=…)` |
| `response_padding_mask` | [N, L] 1 for tokens; needed if tool output begins or ends a response, or padding is inside |
| `prompt_token_ids`, `prompt_padding_mask` | [N, P] for the length of prompts |

Arrays are numpy or torch: on any device, in bfloat16, part of a graph, padded left or right. Padding is never read. A
row whose mask is 0 everywhere is a rollout without tokens. A log-prob above 0, a wrong shape or an invalid mask
raises `InvalidRolloutsError` with its row and column. `RolloutBatch.from_lists` takes lists per row; `from_arrays`
takes jagged tensors with their offsets. The names of the columns in other frameworks:

| | token ids, mask | log μ | log π |
| --- | --- | --- | --- |
| verl | `responses`, `response_mask` | `rollout_log_probs` | `old_log_probs` |
| TRL | `completion_ids`, `completion_mask` | `sampling_per_token_logps` | `old_per_token_logps` |
| NeMo-RL | `input_ids`, `token_mask * sample_mask[:, None]` | `generation_logprobs` | `prev_logprobs` |

**Ranks.** Measurements of data-parallel ranks fold, in any order, into the measurement of all rollouts. Ranks exchange
sums, about 100 kB, and one row per rollout; no tokens:

```python
import torch.distributed as dist
from foreshock.measures import fold

of_ranks = [None] * dist.get_world_size()
dist.all_gather_object(of_ranks, measurement)
of_step = fold(of_ranks)
```

A group id must mean the same prompt on every rank. If objects cannot be sent, use `to_bytes` and `from_bytes` of
`measurement.step`, `comparison.statistics` and `comparison.summaries`, which work without pickle; `fold` also takes
these statistics, and `RolloutSummaries.concat` the rows. Either way, of the sums by token id only the 512 ids with the
largest Σk3 are sent.

The same objects give the tables by condition (`comparison.statistics.condition_table("position")`) and by token id
(`.token_id_table()`), the effect of corrections (`foreshock.corrections.evaluate_usual(comparison.statistics,
comparison.summaries)`), and the lint of the columns (`foreshock.lint.lint_batch(rollouts)`).
"""

READING = """\
## How to read a row

**Direction.** KL(μ‖π) and χ²(μ‖π) are large if π gives little mass to what μ samples; χ²(π‖μ), ESS and clip fractions
react if π gives much mass to what μ seldom samples. A mismatch in one direction hardly shows in the measures of the
other: at d = −10 a token adds 9 to Σ k3, at d = +10 it adds 22 015. Raw tails do not show the direction either:
symmetric noise sampled from μ already gives P(d < −τ)/P(d > τ) ≈ e^τ. Use `tail_asymmetry`.

**Aggregation.** A token mean is a sum over tokens divided by the number of tokens, over model-generated tokens,
before any filtering by reward. A mean of per-sequence means carries `_seq_mean` and is biased, because length is a
stopping time: if μ stops with probability 0.05 and π with 0.06, the KL is 9.4e-4 and the token mean of ρ is 1.000,
but the sequence mean of ρ is 1.023 and the log-perplexity difference has the wrong sign.

**Arithmetic.** Everything is float64, sums are compensated, and k3 is `expm1(d) − d`; near d = 0 it is its series,
because even in float64 that difference loses a digit for every factor of ten of |d| below 1. In float32,
`exp(d) − d − 1` is off by a factor of two for k3 below about 1e-7, and a tenth to a fifth of its values are negative.
Counts are integers, the same for any merge order of shards.

**Empty (NaN; `null` in JSON)** means not estimable, never 0: no token was measured; fewer than two prompt groups
for an interval, fewer than five for a bootstrap; `ess_seq` if 2·KL·T > ln N, because a sample of N cannot show
less than 1/N; `pareto_k` with fewer than five values in the tail; a measure whose entropies or advantages were not
logged. NaN and infinite log-probs are counted separately and excluded from every mean.
"""

INTERVALS = """\
Tokens of a rollout are dependent, and so are rollouts of one prompt. Intervals are clustered by prompt group
(`group_id`; a rollout without one is a cluster by itself): for m = ΣS/ΣT the residuals are e_g = S_g − m·T_g. On real
runs the standard error of k3 is 1.05 times that of independent tokens by sequence, and 1.3 to 1.8 times by group.

| columns | kind | computed from |
| --- | --- | --- |
| `…_low`, `…_high` | Student's t, G − 1 degrees of freedom; a range | mergeable sums: always available |
| `…_bootstrap_low`, `…_bootstrap_high` | bootstrap-t, 999 resamples; upper end at least Cox's | one row per rollout |

**None is called a 95 % interval.** They resample the prompts of the batch, so the pages, the report and the API call
each a *range over the prompts*: what is too rare to be among them is not in it. `make bench-coverage` shows how often
the mean of the population is in it, over 400 batches of 8, 32 and 128 prompts: 94 to 95 % where prompts are alike, 96
to 97 % where |d| grows over the response, 96 to 98 % where 3 % of the rollouts are offset, but 16, 43 and 91 % where
one prompt in 50 has ten times the |d|. Of ten more populations (prompts, rollouts or lengths that spread by 1.6 to 2.7,
rare tokens, last tokens, two rollouts a prompt) eight are covered by 90 to 99 %, long responses over which |d| grows by
87 to 91 %, and a d with the tails of Student's t of 3 degrees by 82 to 87 %. No number of the batch tells which case it
is: k̂ is low in just the batches
that lack the heavy prompt.

k3, χ² and TV are never negative, and neither are the ends of their intervals: a lower end of 0 says only
that these data give no lower bound. Two scores that differ at any token have a k3 above 0.

**Few or uneven groups.** If prompts differ, 8 of them often miss the large ones, and no resampling shows that. The
upper end is therefore at least that of Cox's method, from the spread of the logarithms of the group means.
`effective_groups` is reported and is no criterion: batches that look even by chance are those without the large groups.

**Which one to use.** Both were compared with the exact values of a tiny policy. Over 2,000 batches of 128 prompts × 8
rollouts at three levels of mismatch, for k3, χ² and TV, the plain bootstrap-t covers 93.7 to 95.5 %, Student's t 93.8
to 95.2 %. They differ if few tokens, prompts or groups dominate the mean:

- TV is bounded by 1: either interval covers it 92 to 97 % for any tails.
- k3 and χ²: use the bootstrap-t if available. It is nowhere worse beyond sampling error, and better for few groups,
  uneven prompts or heavy tails: for k3 by up to ten points. Student's t then misses on one side only: the true value
  is above its upper end.
- If `pareto_k` is above 0.3, both are too short for k3 and χ², and both are too low. Below, the bootstrap-t
  covered k3 92.9 to 96.7 % on every policy that was tried, and χ² the same on all but one (86 %). Above, it covered
  k3 85 to 96 % (Student's t 75 to 96 %), and χ² 20 to 90 % (Student's t 13 to 88 %). The error of χ² needs the fourth
  moment of ρ, so k < ¼, and so does that of k3 for small d. Read the mean and the lower end as lower bounds there;
  pool steps, or use exact divergences.
- If d also reaches 1 (`max_d`), the variance of ρ becomes infinite at k = 0.5: χ² and ESS are then properties of the
  sample, and from 0.7 so is any importance-weighted mean. If ρ stays near 1, a large `pareto_k` describes the tail of
  d alone and does not affect these.
- An upper end of many times the mean, common in runs of 8 prompts a step, is no error: with one or two groups that
  dominate the mean, so few groups cannot bound it. Pool steps.
- `pareto_k` describes only the tail in the batch. A low value in a single batch is no proof: use the highest of
  neighbouring steps.
"""

CONDITIONAL = """\
A comparison also has tables by condition: tokens, Σ|d|, Σd, Σk3, Σ|π − μ| and the largest |d|. Edges are fixed, so
that tables of any two batches merge. A bucket includes its lower edge and excludes its upper edge; the first and last
buckets also take all values beyond. By token id the sums are exact in memory; a stored part keeps the 512 ids that
may have the largest Σk3, with a bound for all others.
"""

TRAPS = """\
## Traps

- **Raw log-probs hide truncation and temperature.** Sampled with top-p 0.9, a logged *processed* μ gives a mean ρ of
  0.902; a logged *raw* μ, vLLM's default, gives 1.0000, and every ratio looks perfect. Only `surprisal_z` detects it,
  and it needs entropies. Record the mode.
- **Clamped metrics cannot fire.** ESS and the standard deviation of weights clamped to [½, 2] are bounded by 0.64 and
  0.75: alarms at 0.3 and 1 cannot fire. Nothing is clamped here, verl's measures included.
- **Sequence weights carry no information at ordinary mismatch.** ESS of sequences is about exp(−2·KL·T): a KL of
  6.4e-4 at 8,192 tokens gives 3e-5. `ess_seq_predicted` gives this value when `ess_seq` is empty.
- **Geo-RS is not length-invariant.** The logarithm of the geometric ratio has the mean −KL and the standard deviation
  √(2·KL/T): bounds of ±0.1 % act as a threshold on KL ≈ 1e-3, stricter for long responses.
- **Differences of probabilities hide rare tokens**: log-probs of −5 against −15 differ by 0.0067.
- **Half of k3 can come from a thousandth of the tokens.** Use the bootstrap interval and `pareto_k`.
- **k3 falls with entropy during a healthy run.** `k3_kl_per_entropy` is far steadier; watch both.
- **Noise floors are halved before they are subtracted.** An engine scored twice has k3 = σ², of which σ²/2 is in
  trainer/rollout; the difference is never clamped at 0.
- **k3 of links does not add**, and except for the first link it is no KL under μ. The shares E[d_link·d]/E[d²] add to
  1.
- **A pad id that the model itself sampled** and that the trainer's mask drops, a shift by one token, and a wrong mode
  are the usual false mismatches. A difference of exactly 0 everywhere means that π was copied from μ. `foreshock
  selfcheck` checks for them.
- **A mask rate is no health metric.** It can fall while the mismatch grows.
- **Staleness is not numerics.** Compare at equal lag. Dropout in the trainer alone gives a KL of 0.30 at a rate of
  0.1.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, the text before its table, and a predicate for its measures."""

    title: str
    text: str
    holds: Callable[[Measure], bool]


def named(*names: str) -> Callable[[Measure], bool]:
    """Return a predicate: the measure's name is in `names`, or begins with a name in `names` that ends in `*`."""
    starts = tuple(name[:-1] for name in names if name.endswith("*"))
    return lambda measure: measure.name in names or measure.name.startswith(starts)


_WITH_SEQUENCE_MEAN = {measure.name.removesuffix("_seq_mean") for measure in MEASURES if "_seq_mean" in measure.name}

# A measure is listed in the first section that holds it.
SECTIONS: tuple[Section, ...] = (
    Section("Of the step", "Over all rollouts of a step.", lambda measure: measure.kind == "step"),
    Section(
        "Divergences and ratios",
        "Estimators by token, averaged over tokens.",
        lambda measure: measure.name in _WITH_SEQUENCE_MEAN,
    ),
    Section(
        "Intervals",
        INTERVALS,
        lambda measure: measure.name.endswith(("_low", "_high", "effective_groups")),
    ),
    Section(
        "Size of d",
        "Quantiles come from a fixed logarithmic histogram and are accurate to about 1 %; below 2^−27 = 7.5e-9 they "
        "are reported as 0, above 128 as 128. Extremes are exact.",
        named("mean_abs_d", "rms_d", "p50_abs_d", "p90_abs_d", "p99_abs_d", "p999_abs_d", "max_abs_d", "min_d", "max_d",
              "zero_fraction", "low_probability_abs_d"),
    ),
    Section(
        "Tails",
        "Tails are cut on d itself, so they are the same on every machine. `F(2) > 0.1` is dangerous. "
        "The generalised Pareto shapes are scale-free: for small d they are about the shape of d's own tail.",
        named("tail*", "pareto_k*"),
    ),
    Section(
        "Weights and bounds",
        "Effective sample sizes are fractions, unclamped, in logarithms.",
        named("ess*", "pinsker_tv_bound"),
    ),
    Section("Differences of probabilities", "They hide rare tokens.", named("rollout_probs*", "rollout_actor_probs*")),
    Section(
        "With entropies",
        "Empty if entropies were not logged. `surprisal_z` is about standard normal if the logged μ is the sampling "
        "distribution; a raw μ reaches 5 after some 200 independent tokens under top-p 0.9, 100 at temperature 0.8, "
        "2,600 at 0.95. It is bounded by ±√G for G groups: an alarm at 5 cannot fire with fewer than 26.",
        named("surprisal_z", "k3_kl_per_entropy"),
    ),
    Section(
        "With advantages",
        "Empty if advantages were not logged. A token's advantage is its own, or that of its rollout.",
        named("advantage*", "bad_update_fraction"),
    ),
    Section(
        "Means of per-sequence means",
        "For comparison with other reports; biased, see above.",
        lambda measure: measure.name.endswith("_seq_mean"),
    ),
    Section(
        "Of sequences",
        "Over whole responses. verl's measures keep verl's names: `training` is π, `rollout` is μ.",
        lambda measure: measure.kind == "sequence",
    ),
    Section(
        "By lag",
        "Empty, or 0, if weights versions were not logged, or at a lag without tokens.",
        lambda measure: measure.page_group == "By lag",
    ),
    Section("Counts", "Integers, the same for any merge order.", lambda measure: measure.column_type == "integer"),
    Section("Other measures", "Of tokens.", lambda measure: True),
)  # fmt: skip

HEAD = ("measure", "per token, sequence or rollout", "unit", "direction", "aggregation", "source", "kind")


def sections() -> list[tuple[Section, list[Measure]]]:
    """Return the measures of the registry by section; empty sections are left out."""
    found: dict[str, list[Measure]] = {section.title: [] for section in SECTIONS}
    for measure in MEASURES:
        found[next(section.title for section in SECTIONS if section.holds(measure))].append(measure)
    ordered = [*SECTIONS[1:], SECTIONS[0]]
    return [(section, found[section.title]) for section in ordered if found[section.title]]


def measure_row(measure: Measure) -> str:
    """Return a measure's row of its table."""
    name = f"`{measure.name}`"
    if measure.column != measure.name:
        name += f", column `{measure.column}`"
    kind = measure.kind if measure.column_type == "float" else f"{measure.kind}, integer"
    return row(name, measure.formula, measure.unit, measure.direction, measure.aggregation, measure.source, kind)


def row(*cells: str) -> str:
    """Return a table row."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(head: tuple[str, ...], lines: Iterable[str]) -> list[str]:
    """Return the lines of a table, followed by a blank line."""
    return [row(*head), "|" + " --- |" * len(head), *lines, ""]


def condition_row(condition: Condition) -> str:
    """Return a condition's row: its meaning, and its buckets."""
    inner = [edge for edge in condition.edges if math.isfinite(edge)]
    span = f"{inner[0]:g} … {inner[-1]:g}"
    return row(f"`{condition.name}`", condition.meaning, condition.unit, str(condition.size), span)


def anchor(title: str) -> str:
    """Return the link target of a heading."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")


def page() -> str:
    """Return the contents of docs/measures.md."""
    found = sections()
    contents = [f"- [{section.title}](#{anchor(section.title)}) ({len(measures)})" for section, measures in found]
    lines = [INTRODUCTION, FRAMEWORKS, READING, "## Contents", "", f"{len(MEASURES)} measures.", "", *contents]
    lines += ["- [By condition](#by-condition)", "- [Traps](#traps)", ""]
    for section, measures in found:
        lines += [f"## {section.title}", "", section.text.rstrip("\n"), "", *table(HEAD, map(measure_row, measures))]
    head = ("condition", "meaning", "unit", "buckets", "edges")
    conditions = table(head, map(condition_row, CONDITIONS.values()))
    lines += ["## By condition", "", CONDITIONAL, *conditions, TRAPS]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(write_or_check("measures_page", {PAGE: page()}))
