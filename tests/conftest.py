"""What holds for every test: property tests look anew each time, and the same way each time in CI."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadlines: a test must not judge how busy the machine is. In CI a property test that fails has to fail again.
settings.register_profile("development", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "development")
