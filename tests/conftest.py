"""Settings of all tests: property tests use new examples locally and the same examples in CI.

With FORESHOCK_INSTRUCTION_SET (see CONTRIBUTING.md) all tests run as on a CPU that has no more than that.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from probes.engines.environment import hold_this_process

# Before any test imports torch.
hold_this_process()

# No deadlines: the result must not depend on the load. In CI a property test that fails must fail again.
settings.register_profile("development", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "development")
