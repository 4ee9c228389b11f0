"""The fixed parts of docs/closed-loop.md."""

from __future__ import annotations

from typing import Final

OPENING: Final = """
<!-- Written by python -m examples.closed_loop.analyse from examples/closed_loop/results. Do not edit. -->

# The closed loop: does acting on the advice help?

Tiny, real runs multiply their learning rate by the scale of [the control loop](early-warning.md#the-control-loop). Does
that keep them from a collapse, does it leave healthy runs alone, and does anything else do as well: less learning rate
at any time, a decay at another time, or a correction of the loss?

**{progress}**

```
nice -n 19 make closed-loop                   # make the runs that are missing; end it at any time, call it again
python -m examples.closed_loop --only {example} --results again
python -m examples.closed_loop.analyse        # write this page again
make bench-closed-loop                        # this page's tables, and one run made again and compared
```

## How

Policy, task and doses of mismatch are those of [the benchmark of collapses](collapses.md). A setting is a dose and a
learning rate η₀. `lag8` and `lag4` were chosen there, on the tuning part; `none` at 3e-4 is too high a rate without any
mismatch; `shift` lags by 8 steps from step 61 to step 105 only. The loop's gains were chosen on other seeds and fixed
at commit {law}, before the first run on these seeds, {first} and up. All 150 steps of a run are made, also after a
collapse. Arms:

{arms}

`advice` runs the service's own detectors and decisions; a decision holds from the next step on. Its trainer logs
`update_k3` and `planned_last_step`. `sham` has the decay of another seed at that seed's time, `matched` the same Σ η
without any time.

- *Collapse*: the median of the newest five rewards is below half of the best for ten observations.
- *Collapse of mismatch*: the constant arm collapsed, and its twin, the same seed without mismatch, did not.
- *Best safe arm*: the one with the fewest collapses, of several the one with the highest reward in the last fifth of
  the steps; the twin is left out.
- Intervals (95 %) are by bootstrap over seeds, and not corrected for the number of arms.
"""

CLOSING: Final = """
## Limits

- In `lag8` no rate makes tokens that lag by eight steps good data, so a correction beside it helps; the advice names it
  (`favours`: `correction`, [how it tells](early-warning.md#rate-correction-or-cause)).
- The policy has 0.34 M parameters, a step 64 responses, and learning rates are a hundred times those of large runs:
  that an arm helps here does not say that it helps there.
- The mismatch of these settings is lag. A mismatch of numerics collapsed no run of the tuning part whose twin
  survived, and the loop does not count it as driven.
- The loop sees an update after it was made. At a learning rate that is far too high, the first updates of an optimizer
  without moments do their damage before the scale has fallen.
- The advice is told the planned end here. Without it the loop holds the same noise to the end; an earlier form without
  it lost to the cosine in `lag8` and `lag2`.
"""
