"""Training for PyTorch on clusters that run Horovod and MPI."""

__version__ = "0.1.0"
