"""What lies in RUN: the folder, its files, and whose it is. Nothing here imports torch."""
