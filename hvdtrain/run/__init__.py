"""The life of one training process: assembled, through its generations, to its exit code."""
