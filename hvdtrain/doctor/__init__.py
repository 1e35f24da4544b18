"""`hvdtrain doctor`: find what would fail on these hosts, or why a run failed, and the fix."""
