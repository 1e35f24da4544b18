"""Live view of runs in a browser: `hvdtrain report --serve`."""
