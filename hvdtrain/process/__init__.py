"""One training process from its assembly through its generations to its exit code."""
