"""One measured process: `python -m hvdtrain.bench.worker KIND STEPS ROUNDS [--key value ...]`.

It prints one JSON line that begins with MARK; of several ranks, only rank 0 prints it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config import Settings, parse
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.bench.app import AppLoop

WARM_UP_STEPS = 3
IDENTICAL_AFTER = 20  # steps
IDLE_SECONDS = 2.0
COPY_EVERY = 5  # steps
COPY_SECONDS = 60.0


def main(argv: Sequence[str]) -> int:
    try:
        return _measure(*argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _measure(kind: str, steps: str, rounds: str, *flags: str) -> int:
    if kind == "memory-hvdtrain":
        result = _memory_of_run(flags)
    else:
        with tempfile.TemporaryDirectory() as directory:
            result = KINDS[kind](parse(flags), int(steps), int(rounds), Path(directory))
    if result:
        sys.stdout.write(json.dumps({"measured": kind, **result}) + "\n")
        sys.stdout.flush()
    return 0


def _overhead(settings: Settings, steps: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Measure the seconds per step of both loops, in alternating blocks of steps."""
    import torch

    from hvdtrain.bench.app import AppLoop
    from hvdtrain.bench.plain import PlainLoop
    from hvdtrain.process.data import build_data

    settings.config.train.duration = IDENTICAL_AFTER + rounds * steps
    task, datasets = build_data(settings)
    app = AppLoop(settings, directory, (task, datasets))
    plain = PlainLoop(task, datasets.train, settings.config, app.device)
    loops: dict[str, AppLoop | PlainLoop] = {"hvdtrain": app, "plain": plain}
    for loop in loops.values():
        loop.run(IDENTICAL_AFTER)
    weights = plain.model.state_dict()
    identical = all(torch.equal(weights[n], w) for n, w in app.model.state_dict().items())
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds):
        for name in sorted(loops, reverse=turn % 2 == 1):  # alternate the order
            seconds[name].append(loops[name].run(steps) / steps)
    start = time.process_time()
    time.sleep(IDLE_SECONDS)
    idle = (time.process_time() - start) / IDLE_SECONDS
    return {"seconds": seconds, "bit_identical": identical, "idle_share": idle}


def _rate_of_hvdtrain(settings: Settings, steps: int, _: int, directory: Path) -> dict[str, Any]:
    from hvdtrain.bench.app import AppLoop

    # The run never ends, because the work at its end is not part of a step.
    settings.config.train.duration = WARM_UP_STEPS + steps + 1
    app = AppLoop(settings, directory)
    app.run(WARM_UP_STEPS)
    rate = settings.config.batch.global_size * steps / app.run(steps)
    return {"samples_per_second": rate} if app.rank == 0 else {}


def _rate_of_plain(
    settings: Settings, steps: int, rounds: int, directory: Path, exchange: bool
) -> dict[str, Any]:
    """Measure the plain PyTorch loop; without exchange each rank trains on its own."""
    import torch.distributed as dist

    from hvdtrain.bench.plain import PlainLoop, join_ranks
    from hvdtrain.parallel.world import leave
    from hvdtrain.process.data import build_task

    device = join_ranks(settings.config.runtime.device)
    rank, size = dist.get_rank(), dist.get_world_size()
    settings.config.train.duration = WARM_UP_STEPS + steps
    task = build_task(settings)
    data = task.datasets().train
    loop = PlainLoop(task, data, settings.config, device, rank, size, exchange)
    loop.run(WARM_UP_STEPS)
    dist.barrier()
    seconds: list[float] = [0.0] * size
    dist.all_gather_object(seconds, loop.run(steps))
    # DistributedDataParallel must not hold the last reference to the connections: it would close
    # them with the GIL held, and wait for one of their threads that needs the GIL.
    del loop
    gc.collect()
    leave()
    rate = settings.config.batch.global_size * steps / max(seconds)
    return {"samples_per_second": rate} if rank == 0 else {}


def _checkpoint(settings: Settings, steps: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Measure blocks of steps with and without a save at the start, and the restore.

    The save goes below run.root, so to the disk that a run would use.
    """
    from hvdtrain.bench.app import AppLoop
    from hvdtrain.checkpoint.manager import CheckpointManager
    from hvdtrain.checkpoint.writer import CheckpointWriter

    settings.config.train.duration = WARM_UP_STEPS + (2 * rounds + 1) * 2 * steps
    app = AppLoop(settings, directory)
    app.run(WARM_UP_STEPS)
    root = Path(settings.config.run.root)
    root.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"saving": [], "not_saving": [], "stall": [], "write": []}
    with tempfile.TemporaryDirectory(dir=root) as disk:
        manager = CheckpointManager(Path(disk), keep=1)
        writer = CheckpointWriter(manager, saved=0)
        writer.prepare(app.capture())
        writer.wait()
        for _ in range(rounds):
            begin = time.perf_counter()
            writer.start(app.capture(), before=lambda: None)
            result["saving"].append(time.perf_counter() - begin + app.run(steps))
            writer.wait()
            result["not_saving"].append(app.run(steps))
            result["stall"].append(writer.stall_seconds)
            result["write"].append(writer.seconds)
        if writer.failures:
            raise UserError(f"run.root: no checkpoint could be saved below {root}: {writer.error}")
        result |= _reading(manager.finished()[-1], rounds)
    return result | _copying(app, steps, rounds)


def _copying(app: AppLoop, steps: int, rounds: int) -> dict[str, Any]:
    """Measure blocks of steps with and without copies in memory every COPY_EVERY steps.

    The copies are sent to another receiver in this process, so it does the work of a rank that
    sends its shard and keeps another one.
    """
    from hvdtrain.parallel.copies import MemoryCopies
    from hvdtrain.parallel.spanned import HeldShard

    copies, receiver = MemoryCopies(b"bench"), MemoryCopies(b"bench")
    address, claim = "127.0.0.1", "bench"
    port = receiver.begin(claim, 0, address)
    copies.begin(claim, 0, address)
    copies.send_to([(address, port)])
    result: dict[str, Any] = {"copying": [], "not_copying": [], "copy_stall": [], "copy": []}
    number, complete = 0, None
    blocks = [*range(0, steps, COPY_EVERY)]
    for turn in range(-1, rounds):  # the first touch of memory is slow
        seconds, stalled, taken = app.run(steps), copies.stall_seconds, 0
        begin = time.perf_counter()
        for start in blocks:
            if not copies.unverified:
                number, complete = number + 1, number or None
                parts = app.capture().parts.items()
                tensors = {f"{part}/{n}": t for part, of in parts for n, t in of.items()}
                shard = HeldShard(0, {"step": number}, number, tensors)
                copies.take(shard, seconds / steps, complete)
                taken += 1
            app.run(min(COPY_EVERY, steps - start))
        took, stalled = time.perf_counter() - begin, copies.stall_seconds - stalled
        copies.wait(COPY_SECONDS)
        if copies.unverified:
            raise UserError("a copy in memory was not verified in time")
        if turn >= 0:
            result["not_copying"].append(seconds)
            result["copying"].append(took)
            result["copy_stall"].append(stalled / taken)
            result["copy"].append(copies.seconds)
    return result


def _reading(checkpoint: Path, rounds: int) -> dict[str, Any]:
    """Seconds to restore a checkpoint and to read its files, both without the page cache."""
    import torch

    from hvdtrain.checkpoint.format import read

    def restore() -> object:
        return read(checkpoint)

    def read_files() -> object:
        contents = [torch.empty(path.stat().st_size, dtype=torch.uint8) for path in files]
        for path, content in zip(files, contents, strict=True):
            with open(path, "rb", buffering=0) as file:
                data, done = content.numpy().data, 0
                while block := file.readinto(data[done : done + (8 << 20)]):
                    done += block
        return contents

    files = list(checkpoint.iterdir())
    seconds: dict[str, list[float]] = {"restore": [], "read": []}
    for turn in range(-1, rounds):  # the first touch of memory is slow for either
        for name, work in (("read", read_files), ("restore", restore)):
            for path in files:
                _evict_from_page_cache(path)
            begin = time.perf_counter()
            kept = work()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
            del kept
    return {"bytes": sum(path.stat().st_size for path in files), **seconds}


def _evict_from_page_cache(path: Path) -> None:
    """Evict a file that is on the disk from the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _memory_of_plain(settings: Settings, steps: int, _: int, directory: Path) -> dict[str, Any]:
    import torch

    from hvdtrain.bench.plain import PlainLoop
    from hvdtrain.process.data import build_task
    from hvdtrain.runtime.memory import resident_peak

    settings.config.train.duration = steps
    task = build_task(settings)
    gpu = settings.config.runtime.device == "auto" and torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")  # as a run chooses it
    PlainLoop(task, task.datasets().train, settings.config, device).run(steps)
    return {"peak_bytes": resident_peak()}


def _memory_of_run(flags: Sequence[str]) -> dict[str, Any]:
    """Run a whole training with the given flags, including checkpoints and evaluation."""
    from hvdtrain.runtime.memory import resident_peak
    from hvdtrain.train import main as train

    if train(flags) != 0:
        raise SystemExit("the run failed")
    return {"peak_bytes": resident_peak()}


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "overhead": _overhead,
    "rate-hvdtrain": _rate_of_hvdtrain,
    "rate-ddp": partial(_rate_of_plain, exchange=True),
    "rate-apart": partial(_rate_of_plain, exchange=False),
    "checkpoint": _checkpoint,
    "memory-plain": _memory_of_plain,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
