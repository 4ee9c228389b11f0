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

Compute every measure of a step from your own tensors, or look up one of the {number} measures in the tables.

μ is the sampling policy, π the trained policy. Per token `d = log π − log μ` and `ρ = exp(d)`. A comparison is written
`target/behaviour`, π/μ. Expectations are over tokens or sequences drawn from μ. Which numbers are healthy:
[read the numbers](reading-the-numbers.md). This page is generated from
`foreshock/measures/registry.py` by `python -m scripts.measures_page`.
"""

FRAMEWORKS = """\
## Measure a step in any framework

All measures of a step from padded tensors and a mask, without a service:

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

The base install suffices. With `.[fast]`, call `foreshock.measures.passes.compiled.prepare()` once per process.

| argument | shape and meaning |
| --- | --- |
| `responses`, `response_mask` | [N, L] token ids, and 1 for tokens that the model sampled |
| `rollout_log_probs`, `trainer_log_probs` | [N, L] log μ as logged by the engine, and log π |
| `group_ids` | [N] the prompt of each rollout; without it each rollout is a cluster |
| `entropy` | [N, L] of μ, in nats |
| `advantage`, `reward` | [N, L] or [N]; [N] |
| `turn`, `weights_version` | [N, L] or [N]; lag also needs `attributes=BatchAttributes(trainer_weights_version=…)` |
| `response_padding_mask` | [N, L] 1 for tokens; needed if tool output begins or ends a response |
| `prompt_token_ids`, `prompt_padding_mask` | [N, P] for the length of prompts |

Arrays are numpy or torch, on any device, padded left or right. `RolloutBatch.from_lists` takes lists per row,
`from_arrays` jagged tensors with offsets. verl has these names, but for `old_log_probs`. TRL: `completion_ids`,
`completion_mask`, `sampling_per_token_logps`, `old_per_token_logps`. NeMo-RL: `input_ids`,
`token_mask * sample_mask[:, None]`, `generation_logprobs`, `prev_logprobs`.

**Ranks.** Measurements of data-parallel ranks fold, in the order of ranks, into that of all rollouts:

```python
import torch.distributed as dist
from foreshock.measures import fold

of_ranks = [None] * dist.get_world_size()
dist.all_gather_object(of_ranks, measurement)
of_step = fold(of_ranks)
```

A group id must mean the same prompt on every rank. Without pickle, use `to_bytes` and `from_bytes` of
`measurement.step`, `comparison.statistics` and `comparison.summaries`.
"""

READING = """\
## How to read a row

**Direction.** KL(μ‖π) and χ²(μ‖π) are large if π gives little mass to what μ samples; χ²(π‖μ), ESS and clip fractions
react if π gives much mass to what μ seldom samples. A mismatch in one direction hardly shows in the measures of the
other. Raw tails do not show the direction either: use `tail_asymmetry`.

**Aggregation; source.** If the column has none, it is the token mean, a sum over model-generated tokens, before any
filtering, divided by their number; and Foreshock. A mean over sequences of means over a sequence (`k3_kl_seq_mean`,
verl's `log_ppl_diff`) is biased, because length is a stopping time.

**Missing log-probs.** A token whose log-prob on one side is NaN, ±inf or a placeholder is counted and left out of token
means, and its rollout of all measures of turns and sequences (`incomplete_rollouts`).

**Arithmetic.** Everything is float64, and k3 is `expm1(d) − d`, near d = 0 its series. Shards fold in sorted order, so
that any order of arrival gives the same bits; another split into shards agrees to about 1e-15.

**Empty (NaN; `null` in JSON)** means not estimable, never 0: no token was measured; fewer than two prompt groups for an
interval, fewer than five for a bootstrap; `ess_seq` if 2·KL·T > ln N; `pareto_k` with fewer than five values in the
tail; entropies or advantages that were not logged.
"""

INTERVALS = """\
Intervals are clustered by prompt group (`group_id`): for m = ΣS/ΣT the residuals are e_g = S_g − m·T_g.

| columns | kind | computed from |
| --- | --- | --- |
| `…_low`, `…_high` | Student's t, G − 1 degrees of freedom | mergeable sums: always available |
| `…_bootstrap_low`, `…_bootstrap_high` | bootstrap-t, 999 resamples; upper end at least Cox's | one row per rollout |

Both are a **range over the prompts**, not a 95 % interval: they miss what is too rare to be among the prompts of the
batch. In `make bench-coverage`, with batches of 8, 32 and 128 prompts, the mean of the population is in the range in 94
to 98 % of the batches, but in 16, 43 and 91 % if one prompt in 50 has ten times the |d|.

- Use the bootstrap-t for k3 and χ² if available: it is better for few groups, uneven prompts or heavy tails.
- If `pareto_k` is above 0.3, both are too short for k3 and χ². Read mean and lower end as lower bounds; pool steps, or
  use [exact divergences](inside-a-probe.md#exact-divergences). A low value in one batch is no proof.
- If d also reaches 1, χ² and ESS are properties of the sample from k = 0.5 on, any importance-weighted mean from 0.7.
- An upper end of many times the mean means that one or two groups dominate it: pool steps.

`effective_groups` is (Σ S)²/Σ S², S = Σ k3 of a prompt group. The ends:
"""

CONDITIONAL = """\
`comparison.statistics.condition_table("position")` has tokens, Σ|d|, Σd, Σk3, Σ|π − μ| and the largest |d| by a
condition; the first and last buckets take all values beyond. `.token_id_table()` keeps the 512 ids that may have the
largest Σk3, with a bound for all others.
"""

TRAPS = """\
## Traps

- **Raw log-probs hide truncation and temperature.** Sampled with top-p 0.9, a logged *processed* μ gives a mean ρ of
  0.902; a *raw* μ, vLLM's default, gives 1.0000. Only `surprisal_z` detects it, and it needs entropies.
- **Clamped metrics cannot fire.** ESS of weights clamped to [½, 2] cannot fall below 0.64. Nothing is clamped here.
- **Sequence weights are useless at ordinary mismatch.** ESS of sequences is about exp(−2·KL·T): `ess_seq_predicted`.
- **Geo-RS depends on length.** The logarithm of the geometric ratio has mean −KL and standard deviation √(2·KL/T).
- **Differences of probabilities hide rare tokens**: log-probs of −5 against −15 differ by 0.0067.
- **Halve a noise floor before subtracting it.** An engine scored twice has k3 = σ², of which σ²/2 is in
  trainer/rollout.
- **k3 of links does not add**; the shares E[d_link·d]/E[d²] do.
- **Staleness is not numerics**: compare at equal lag.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, the text before its table, and a predicate for its measures.

    If `is_listed`, the text says what the measures are, and only their columns follow.
    """

    title: str
    text: str
    holds: Callable[[Measure], bool]
    is_listed: bool = False


def named(*names: str) -> Callable[[Measure], bool]:
    """Return a predicate: the measure's name is in `names`, or begins with a name in `names` that ends in `*`."""
    starts = tuple(name[:-1] for name in names if name.endswith("*"))
    return lambda measure: measure.name in names or measure.name.startswith(starts)


# A measure is listed in the first section that holds it.
SECTIONS: tuple[Section, ...] = (
    Section("Of the step", "Over all rollouts of a step.", lambda measure: measure.kind == "step"),
    Section(
        "Divergences and ratios",
        "Estimators by token.",
        named("kl", "k2_kl", "k3_kl", "chi2_token", "reverse_chi2_token", "tv_token", "verl_chi2_token", "mean_ratio",
              "token_mult_prob_error"),
    ),
    Section(
        "Intervals",
        INTERVALS,
        lambda measure: measure.name.endswith(("_low", "_high", "effective_groups")),
        is_listed=True,
    ),
    Section(
        "Size of d",
        "Quantiles come from a fixed logarithmic histogram and are accurate to about 1 %; below 2^−27 = 7.5e-9 they "
        "are reported as 0, above 128 as 128. Extremes are exact.",
        named("mean_abs_d", "rms_d", "p50_abs_d", "p90_abs_d", "p99_abs_d", "p999_abs_d", "max_abs_d", "min_d", "max_d",
              "zero_fraction", "low_probability_abs_d"),
    ),
    Section(
        "Shapes of the tails",
        "Scale-free: for small d they are about the shape of d's own tail.",
        named("pareto_k*"),
    ),
    Section(
        "Tails",
        "Token means, cut on d itself, the same on every machine. `tail_2` is R3's F(2): 1{max(ρ, 1/ρ) > 2}, "
        "dangerous above 0.1. `tail_below_3`: 1{d < −3}, π ≪ μ. `tail_above_3`: 1{d > 3}, π ≫ μ. `tail_asymmetry_3`: "
        "1{d < −3} − ρ·1{d > 3}, above 0 if π gives little mass to what μ samples.",
        named("tail*"),
        is_listed=True,
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
        "Of sequences",
        "Over whole responses, each token of which has two finite log-probs. verl's measures keep verl's names: "
        "`training` is π, `rollout` is μ. A mean over sequences of means over a sequence is biased, see above.",
        lambda measure: measure.kind == "sequence",
    ),
    Section(
        "By lag",
        "k3 and number of the tokens at a lag: numerics alone at lag 0; what is above it at other lags is staleness. "
        "Empty, or 0, if weights versions were not logged, or at a lag without tokens.",
        lambda measure: measure.page_group == "By lag",
        is_listed=True,
    ),
    Section("Counts", "Integers.", lambda measure: measure.column_type == "integer"),
    Section("Other measures", "Of tokens.", lambda measure: True),
)  # fmt: skip

HEAD = ("column", "per token, sequence or rollout", "direction", "aggregation; source")
USUAL = ("token mean", "Foreshock")
"""The aggregation and the source that rows leave out."""


def sections() -> list[tuple[Section, list[Measure]]]:
    """Return the measures of the registry by section; empty sections are left out."""
    found: dict[str, list[Measure]] = {section.title: [] for section in SECTIONS}
    for measure in MEASURES:
        found[next(section.title for section in SECTIONS if section.holds(measure))].append(measure)
    ordered = [*SECTIONS[1:], SECTIONS[0]]
    return [(section, found[section.title]) for section in ordered if found[section.title]]


def measure_row(measure: Measure) -> str:
    """Return a measure's row of its table, without the unit 1 and the usual aggregation and source."""
    formula = measure.formula if measure.unit == "1" else f"{measure.formula}, in {measure.unit}"
    unusual = [each for each in (measure.aggregation, measure.source) if each not in USUAL]
    return row(f"`{measure.column}`", formula, measure.direction, "; ".join(unusual))


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


def page() -> str:
    """Return the contents of docs/measures.md."""
    found = sections()
    lines = [INTRODUCTION.format(number=len(MEASURES)), FRAMEWORKS, READING]
    for section, measures in found:
        lines += [f"## {section.title}", "", section.text.rstrip("\n"), ""]
        if section.is_listed:
            lines += [", ".join(f"`{measure.column}`" for measure in measures) + ".", ""]
        else:
            lines += table(HEAD, map(measure_row, measures))
    head = ("condition", "meaning", "unit", "buckets", "edges")
    conditions = table(head, map(condition_row, CONDITIONS.values()))
    lines += ["## By condition", "", CONDITIONAL, *conditions, TRAPS]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(write_or_check("measures_page", {PAGE: page()}))
