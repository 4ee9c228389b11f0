"""The parts of docs/collapses.md that do not depend on the results, except for the places in braces of the opening."""

from __future__ import annotations

from typing import Final

OPENING: Final = """
<!-- Written by python -m examples.collapses.analyse from examples/collapses/results. Do not edit. -->

# Collapses of tiny runs: a benchmark

How often, and when, does reinforcement learning collapse at a given training–inference mismatch and learning rate, and
which signals warn before it? Many real, tiny runs (vLLM samples, torch trains) over a grid of doses of mismatch ×
learning rates × seeds.

{progress}

```
nice -n 19 make collapses                     # make the runs that are missing; end it at any time, call it again
nice -n 19 make collapses RUNS=10             # the next ten
python -m examples.collapses.analyse          # write this page again
```

A step takes {command} so far. A run is a Parquet file in `examples/collapses/results`: a row a step, a column a
measure, and settings, versions and fingerprints in the metadata.

## How the runs are made

The policy is the model of `examples/tiny_rl` (Qwen3 architecture, 0.34 M parameters), with the warmed-up weights of
`examples/collapses/start`. RLOO, AdamW, gradient norm clipped at 1, and **no correction of the mismatch**. All mismatch
is in the sampler:

- `none`: the trainer's own forward pass samples, and log μ equals log π bit for bit (checked at every step).
- `bf16`: vLLM in bfloat16 with the trainer's weights; the doses below are on top of it.
- `w8`, `w6`, `w4`: every weight matrix is rounded to nearest, symmetric, with a scale for each row.
- `lag…`: the engine holds the trainer's weights of so many steps ago. `partial`: its output head is never updated.
- `kv-fp8`: vLLM's 8-bit key-value cache (e4m3, scale 1).
"""

CLOSING: Final = """
## What tiny models cannot tell about large ones

- **Which k3 is safe.** Three layers, 16 tokens of vocabulary and 64 responses a step learn under other noise than a
  large model. Compare the order of doses and of signals, not the thresholds.
- **Lengths.** Responses have at most 20 tokens: no rule about lengths can be judged by these runs.
- **Learning rates** are a hundred times those of large runs, and a run is 150 steps: slow harm is not seen.
- **Routing.** There is no mixture of experts, whose routing is the largest known source of mismatch.
- **The doses are not alike.** Lag is a difference of policies, rounding one of numerics; equal k3 need not mean equal
  harm.
- **The reward** is exact arithmetic. A reward that can be gamed collapses in other ways.
"""
