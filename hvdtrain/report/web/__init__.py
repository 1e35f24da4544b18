"""Runs in a browser while they go on: `hvdtrain report --serve`."""
