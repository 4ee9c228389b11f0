"""The fixed parts of docs/closed-loop.md."""

from __future__ import annotations

from typing import Final

OPENING: Final = """
<!-- Written by python -m examples.closed_loop.analyse from examples/closed_loop/results. Do not edit. -->

# The closed loop: does acting on the advice help?

A trainer that follows Foreshock's advice lowers its learning rate when a rule with that effect fires. This page asks
whether that keeps tiny, real runs from a collapse that the mismatch causes, and whether anything else does: less
learning rate at any time, a decay at a time that was not chosen by the signals, or the usual corrections of the loss.

**{progress}** Every statement below is about the seeds that every arm has.

```
nice -n 19 make closed-loop                   # make the runs that are missing; end it at any time, call it again
python -m examples.closed_loop --only {example} --results again
python -m examples.closed_loop.analyse        # write this page again
make bench-closed-loop                        # this page's table, and one run made again and compared
```

## How

The policy, the task and the doses of mismatch are those of [the benchmark of collapses](collapses.md). A setting is a
dose and a learning rate η₀; the settings were chosen there, on the tuning part: the run of seed 0 collapsed, and the
run without mismatch did not. The seeds here were used for nothing else. All 150 steps of a run are made, also after a
collapse. Arms:

{arms}

`advice` runs the service's own detectors, all default rules for a dense model, in the same process; a decision holds
from the next step on. `sham` and `matched` are made from the advice arm's scales: the first has the same decay at
another seed's time, the second the same Σ η without any time. If the advice was silent, they are the constant arm.

- *Collapse*: as everywhere here, the trailing-5 median reward below half of the best for ten observations.
- *Collapse of mismatch*: the constant arm collapsed, and its twin, the same seed without mismatch, did not.
- *Saved*: no collapse, and the mean reward of the last fifth of the steps is at least 0.9 of that of the best safe
  arm: of the arms with the fewest collapses the one with the highest reward in the last fifth; the twin is left out.
- Intervals are exact for counts (Clopper and Pearson) and by bootstrap over seeds for differences (95 %). They are not
  corrected for the number of arms.
"""

CLOSING: Final = """
## What this cannot tell

- Ten seeds tell a collapse rate of 0 from one of one half, and not from one of 0.2.
- A policy of 0.34 M parameters, 64 responses a step and learning rates a hundred times those of large runs: that an
  arm helps here does not say that it helps there. [What tiny models cannot tell](collapses.md) holds here too.
- The mismatch of these settings is lag: the sampler's weights are old. A mismatch of numerics did not collapse any
  run of the tuning part whose twin survived, so nothing is known here about decay against it.
- The rule that acts here, `effective_sample_size_fall`, was set on the tuning part of the benchmark of collapses, on
  runs with other seeds and the same doses.
"""
