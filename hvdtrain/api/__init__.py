"""Python API for notebooks and scripts: start a run (start.py) and read its files (run.py)."""
