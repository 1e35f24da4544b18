"""Model FLOPs utilisation of each step."""

from __future__ import annotations

from hvdtrain.engine.flops import ModelFlops
from hvdtrain.engine.loop import Loop, StepRecord


class TellMfu:
    """Adds "mfu" to the record: of this step, over all ranks, as if all had this rank's device."""

    def __init__(self, flops: ModelFlops) -> None:
        self._flops = flops

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        ranks = loop.topology.world_size
        seconds = record["step_seconds"]
        record["mfu"] = self._flops.utilisation(loop.batch.global_size, seconds, ranks)

    def close(self) -> None:
        pass
