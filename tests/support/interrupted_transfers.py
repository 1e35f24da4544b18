"""Tasks for transfers of a run's state to a process that joins."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import horovod.torch as hvd
import psutil
import torch
from torch import Tensor, nn

from hvdtrain.engine.callbacks import stragglers
from hvdtrain.engine.step import ControlSums, ControlVector
from hvdtrain.parallel import agreement
from hvdtrain.parallel.copies import CopyStore
from hvdtrain.runtime.collectives import RankLostError
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig
from tests.support.tasks import Paced


class DyingSource(Paced):
    """Paced; process 0 (launcher's number) is killed in the middle of the first transfer.

    By then the other processes have its model, but nothing of its optimizer.
    """

    def __init__(self) -> None:
        super().__init__()
        if psutil.Process().environ().get("HOROVOD_RANK") == "0":
            _die_while_sending("optimizer.")


class LostAhead(Paced):
    """Paced; a rank dies in an exchange that only one other rank completes, which then dies too.

    HVDTRAIN_TEST_STEP=7, with 3 processes (launcher's numbers): only process 0 completes the
    exchange of step 7, process 1 fails in it and process 2 is killed in it. Process 0 is killed
    while it sends the state of step 7.
    """

    def __init__(self) -> None:
        super().__init__()
        number = psutil.Process().environ().get("HOROVOD_RANK")
        if number == "0":
            _die_while_sending("optimizer.")
        else:
            receive, calls = ControlVector.receive, 0

            def failing(vector: ControlVector) -> ControlSums:
                nonlocal calls
                sums, calls = receive(vector), calls + 1
                if calls == int(os.environ["HVDTRAIN_TEST_STEP"]):
                    if number == "2":
                        time.sleep(0.3)  # the other ranks have it, or have failed
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RankLostError("the exchange did not reach this rank")
                return sums

            ControlVector.receive = failing  # type: ignore[method-assign]


class LateFigures(Paced):
    """Paced; process 0 (launcher's number) is late to send its metrics to the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        if psutil.Process().environ().get("HOROVOD_RANK") == "0":
            begin = stragglers.begin_gather

            def late(row: Tensor, name: str) -> int:
                time.sleep(0.3)
                return begin(row, name)

            stragglers.begin_gather = late


class LargeState(Paced):
    """Paced, with one untrained tensor of HVDTRAIN_TEST_MEGABYTES (million bytes)."""

    def model(self) -> nn.Module:
        model = super().model()
        numbers = int(float(os.environ["HVDTRAIN_TEST_MEGABYTES"]) * 1e6 / 4)
        model.register_buffer("large", torch.arange(numbers, dtype=torch.float32))
        return model


class DyingInStep(Paced):
    """Paced; processes are killed when the ranks of a sharded optimizer agree on a step.

    HVDTRAIN_TEST_DIE=3:before:10,2:after:20: process 3 (launcher's number) before its 10th
    agreement, process 2 after its 20th, when the other ranks have stepped.
    """

    def __init__(self) -> None:
        super().__init__()
        _die_where_ranks_agree()


class DyingReplica(LanguageModel):
    """A language model; like DyingInStep, when ranks that hold shards of a model agree on a step.

    3:stuck:10: process 3 hangs there. 1:late:10: process 1 is not notified that all ranks agree.
    0:transfer:1: process 0 is killed in the first transfer of shards.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        _die_where_ranks_agree()


class DamagedCopies(DyingReplica):
    """DyingReplica; HVDTRAIN_TEST_DAMAGE=12:5,10: after step 12, a bit of each copy in memory of
    steps 5 and 10 changes on all ranks."""

    def callbacks(self) -> list[Any]:
        return [self]

    def on_step(self, record: dict[str, Any]) -> None:
        at, _, steps = os.environ.get("HVDTRAIN_TEST_DAMAGE", "0:0").partition(":")
        if record["step"] != int(at):
            return
        for store in [o for o in gc.get_objects() if isinstance(o, CopyStore)]:
            for (_, step), copy in store._copies.items():
                if str(step) in steps.split(","):
                    copy.content[copy.content.numel() // 2] ^= 1


def _die_where_ranks_agree() -> None:
    own = psutil.Process().environ()  # as it was at the start
    for entry in filter(None, own.get("HVDTRAIN_TEST_DIE", "").split(",")):
        number, place, at = entry.split(":")
        if number == own.get("HOROVOD_RANK"):
            if place == "transfer":
                _die_in_transfer(int(at))
            else:
                _die(place, int(at))


def _die_in_transfer(at: int) -> None:
    from hvdtrain.parallel import spanned

    calls = 0

    def dying(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            time.sleep(0.5)  # the other ranks are in it
            os.kill(os.getpid(), signal.SIGKILL)
        return transfer(*arguments)

    transfer, spanned.transfer_shards = spanned.transfer_shards, dying


def _die_while_sending(name_starts: str) -> None:
    broadcast = hvd.broadcast_async_

    def dying(tensor: Tensor, root: int, name: str, **more: Any) -> int:
        if name.startswith(name_starts):
            time.sleep(0.5)  # what was sent arrives
            os.kill(os.getpid(), signal.SIGKILL)
        return int(broadcast(tensor, root, name=name, **more))

    hvd.broadcast_async_ = dying


def _die(place: str, at: int) -> None:
    agree, calls = agreement.sum_, 0

    def dying(values: Tensor, name: str) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at and place == "stuck":
            threading.Event().wait()
        if calls == at and place == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = agree(values, name)
        if calls == at and place == "late":
            raise RankLostError("the agreement did not reach this rank")
        if calls == at:
            time.sleep(0.5)  # the others receive it, step, and wait for this rank's shard
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    agreement.sum_ = dying
