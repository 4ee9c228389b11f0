"""Speed and memory of the scorers: `make bench-probes`. `speed` and `memory` have a part each."""

import os

# Threads that wait for others sleep: by default they spin, which counts as CPU time. OpenMP reads the variable when it
# is loaded, so it is set before torch is imported here, and the engines' processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
