"""Settings every test shares: the Hypothesis profile of the CI sample."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # `from helpers import ...`, `from strategies import ...`

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, database=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")
