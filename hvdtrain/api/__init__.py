"""What notebooks and scripts use: a run is started (start.py), its files are read (run.py)."""
