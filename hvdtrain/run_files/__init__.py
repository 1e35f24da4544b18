"""The run directory: paths, files and ownership. Nothing here imports torch."""
