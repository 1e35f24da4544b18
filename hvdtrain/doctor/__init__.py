"""`hvdtrain doctor`: what would fail on these hosts, or why a run failed, and what mends it."""
