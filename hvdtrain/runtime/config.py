"""Configuration of a rank's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdtrain.config_tiers import expert
from hvdtrain.errors import require


@dataclass
class RuntimeConfig:
    """A rank's process.

    Args:
        threads: CPU threads per rank; 0 = OMP_NUM_THREADS if set, or what a script has given
            torch.set_num_threads before the run; otherwise the host's cores
            divided by its ranks
        device: `auto` uses a GPU per rank if torch finds any, else CPUs; `cpu` uses CPUs. Ranks on
            GPUs require a Horovod with operations on GPUs, unless there is only one in a run that
            is not elastic
        standalone: ignore the launcher: each process is an independent run with its own run.id
    """

    threads: int = 0
    device: Literal["auto", "cpu"] = "auto"
    standalone: bool = expert(False)

    def __post_init__(self) -> None:
        require(
            self.threads >= 0,
            f"runtime.threads must be >= 0 (0 = by cores and ranks), not {self.threads}",
        )
