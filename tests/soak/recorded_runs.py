"""`make recorded-runs`: record every bit of tiny runs, and compare after a change of the code.

    python -m tests.soak.recorded_runs record FILE [NAME...]
    python -m tests.soak.recorded_runs compare FILE [NAME...]

NAME selects the cases whose names contain it. A case is one run, started once or more often. The
record holds each line of metrics.jsonl without measured values, how each generation of ranks
started, and the state and a hash of each tensor in the last checkpoint. Values are compared as
text; floats are written with all their digits, so equal text means equal bits.

Bits depend on the CPU and on torch: record and compare on one machine. Every case gives bitwise
identical results in each run of the same code, also on a busy machine: gradients are summed in
fixed buckets, each rank has one thread, and a rank is killed in a fixed micro-batch.
`batch.deal speed` has no case, because it follows measured speeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open

from hvdtrain.launch.commands import elastic_horovodrun
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig
from tests.support import datasets, runs, warm
from tests.support.job import Finished

# The values of one case as text, by place ("step 3") and name ("loss").
Record = dict[str, dict[str, str]]

LIMIT_S = 120.0
SHOWN_PLACES, SHOWN_NAMES = 3, 4
# Keys of metrics.jsonl that are measured.
MEASURED = ("time", "mfu")
MEASURED_ENDINGS = ("_seconds", "_per_second")

# --- the table of cases ---

COMMON = (
    "--telemetry.port 0 --train.duration 6 --eval.every 3 --eval.batches 2 --checkpoint.every 100"
)
# Four micro-batches per step: 2 ranks have 2 each, 3 ranks have 2, 1 and 1.
BATCH = "--batch.global_size 8 --batch.micro_size 2 --schedule.warmup_steps 2 --optim.lr 0.01"
GPT = (
    f"{COMMON} {BATCH} --model.layers 2 --model.width 32 --model.heads 4 --model.context 32"
    f" --model.dropout 0.1 --data.train {runs.CORPUS}"
)
FOUR_LAYERS = f"{GPT} --model.layers 4"
IMAGE = (
    f"{COMMON} --task image --image.mixup 0.2 --image.label_smoothing 0.1 --batch.global_size 24"
    " --batch.micro_size 4"
)
RAGGED = f"{COMMON} --task tests.support.ragged:Ragged"
TABULAR = (
    f"{COMMON} {' '.join(datasets.KEYS)} --data.train {{data}}/sales.parquet"
    " --batch.global_size 48 --batch.micro_size 8 --optim.lr 0.01"
)
BATCHNORM = f"{COMMON} {BATCH} --task tests.support.unusual:RowMajor"
KILLED = f"{GPT} --task tests.soak.recorded_runs:Killed"

EXACT = "--exchange.name exact --runtime.threads 1"
EXCHANGES = {
    "dense": "",
    "float16 wire": "--exchange.wire float16",
    "bfloat16 wire": "--exchange.wire bfloat16",
    "top-k": "--exchange.compression topk --exchange.ratio 0.1",
    "powersgd": "--exchange.compression powersgd --exchange.rank 2 --exchange.start_step 2",
    "local sgd": "--exchange.sync_every 3",
    "diloco": "--exchange.sync_every 3 --exchange.outer nesterov",
    "exact": EXACT,
}
PRECISIONS = ("float32", "bf16", "fp16", "bf16-params")
AXES = {
    "tensor": "--parallel.tensor 2",
    "shard": "--parallel.shard.degree 2",
    "pipeline": "--parallel.pipeline 2",
    "context": "--parallel.context 2 --model.dropout 0",
    "zero": "--parallel.shard.stage 1 --parallel.shard.copies 1",
}
PAIRS = {
    "tensor, pipeline": f"{AXES['tensor']} {AXES['pipeline']}",
    "shard, pipeline": f"{AXES['shard']} {AXES['pipeline']}",
    "context, shard": f"{AXES['context']} {AXES['shard']}",
    "tensor, context": f"{AXES['tensor']} {AXES['context']}",
}


@dataclass(frozen=True)
class Start:
    """One start of a run, which must end with exit code 0.

    Args:
        launcher: "" (no launcher), or "gloo:N", "mpirun:N" or "elastic:N" for N ranks.
        flags: command line of the run; {data} is the directory of the cases' data.
        kill: "process:micro-batch" in which an elastic run loses a rank, see `Killed`.
    """

    launcher: str
    flags: str
    kill: str = ""


def _cases() -> dict[str, list[Start]]:
    found: dict[str, list[Start]] = {}

    def add(name: str, flags: str, *launchers: str) -> None:
        for launcher in launchers:
            found[f"{name} on {launcher or '1 rank'}"] = [Start(launcher, flags)]

    for name, flags in EXCHANGES.items():
        add(f"exchange {name}", f"{GPT} {flags}", "gloo:2", "mpirun:2", "gloo:4")
    add("exchange dense", GPT, "", "gloo:3", "mpirun:3", "mpirun:4")
    add("exchange exact", f"{GPT} {EXACT}", "", "mpirun:3", "mpirun:4")
    add("exchange top-k", f"{GPT} {EXCHANGES['top-k']}", "mpirun:3")
    add("exchange powersgd", f"{GPT} {EXCHANGES['powersgd']}", "mpirun:3")
    add("exchange diloco", f"{GPT} {EXCHANGES['diloco']}", "mpirun:3")
    add("exchange adasum", f"{GPT} --exchange.reduce adasum", "mpirun:2", "mpirun:4")
    add("exchange hierarchical", f"{GPT} --exchange.hierarchical true", "gloo:4")

    for precision in PRECISIONS:
        add(f"precision {precision}", f"{GPT} --precision.name {precision}", "", "gloo:2")
    add("precision fp16, float16 wire", f"{GPT} --precision.name fp16 --exchange.wire float16",
        "mpirun:2")  # fmt: skip

    for axis, flags in AXES.items():
        add(f"axis {axis}", f"{GPT} {flags}", "gloo:2", "mpirun:2", "gloo:4")
    for axis in ("tensor", "shard", "pipeline", "context"):
        add(f"axis {axis}, bf16", f"{GPT} {AXES[axis]} --precision.name bf16", "mpirun:2")
    for schedule in ("gpipe", "interleaved1f1b", "zero-bubble"):
        flags = f"--parallel.pipeline 2 --parallel.schedule {schedule}"
        add(f"axis pipeline, {schedule}", f"{FOUR_LAYERS} {flags}", "gloo:2")
    add("axis shard, gathered once",
        f"{GPT} --parallel.shard.degree 2 --parallel.shard.stage 2", "gloo:2")  # fmt: skip
    add("axis zero, exact", f"{GPT} --parallel.shard.stage 1 {EXACT}", "mpirun:3")
    for pair, flags in PAIRS.items():
        add(f"axes {pair}", f"{GPT} {flags}", "gloo:4")
    add("axes tensor, pipeline", f"{GPT} {PAIRS['tensor, pipeline']}", "mpirun:4")

    for optimizer in ("sgd", "adam", "lion", "muon", "adafactor", "adamw8bit"):
        add(f"optimizer {optimizer}", f"{GPT} --optim.name {optimizer}", "gloo:2")
    add("optimizer ema", f"{GPT} --optim.ema_decay 0.5", "gloo:2")
    add("checkpointed activations", f"{GPT} --memory.checkpoint_activations blocks", "gloo:2")
    add("interleaved micro-batches", f"{GPT} --batch.interleave 2", "gloo:2")
    add("batch per rank", f"{GPT} --batch.per_rank_size 4", "gloo:2")

    add("batchnorm", BATCHNORM, "", "gloo:2", "mpirun:3", "gloo:4")
    add("batchnorm, exact", f"{BATCHNORM} {EXACT}", "gloo:3")
    add("batchnorm, images", IMAGE, "mpirun:3")
    add("batchnorm, images, synchronized",
        f"{IMAGE} --image.sync_batchnorm true --batch.micro_size 12", "mpirun:2")  # fmt: skip
    add("bucketed lengths", RAGGED, "", "gloo:2", "mpirun:3")
    add("bucketed lengths, data workers", f"{RAGGED} --loader.workers 2", "gloo:2")
    add("data workers", f"{GPT} --loader.workers 2", "gloo:2", "mpirun:2")
    add("data workers, images", f"{IMAGE} --loader.workers 2", "gloo:2")
    add("tabular", TABULAR, "gloo:2")
    add("tabular, pretraining", f"{TABULAR} --tabular.objective pretraining", "mpirun:2")
    add("skipped step", f"{COMMON} {BATCH} {EXACT} --train.duration 32"
        " --task tests.support.unusual:WeightedAndPoisoned", "mpirun:3")  # fmt: skip

    # Process 2 has one micro-batch per step: it dies in step 4, which the survivors repeat.
    for name, flags in (("dense", ""), ("exact", EXACT), ("top-k", EXCHANGES["top-k"]),
                        ("zero", "--parallel.shard.stage 1")):  # fmt: skip
        found[f"kill {name} on elastic:3"] = [Start("elastic:3", f"{KILLED} {flags}", "2:4")]
    for axis in ("shard", "pipeline"):  # a whole replica is lost
        found[f"kill {axis} on elastic:4"] = [Start("elastic:4", f"{KILLED} {AXES[axis]}", "3:4")]

    def resume(name: str, *starts: tuple[str, str]) -> None:
        """Add a run of several starts, each (launcher, flags) and three steps."""
        found[f"resume {name}"] = [
            Start(launcher, f"{flags} --train.duration {3 * number} --schedule.name constant")
            for number, (launcher, flags) in enumerate(starts, 1)
        ]

    resume("dense", ("gloo:2", GPT), ("mpirun:3", GPT), ("", GPT))
    resume("exact", ("mpirun:3", f"{GPT} {EXACT}"), ("gloo:2", f"{GPT} {EXACT}"))
    zero = f"{GPT} --parallel.shard.stage 1"
    resume("zero", ("mpirun:3", zero), ("gloo:2", zero), ("", GPT))
    resume("layouts",
           ("gloo:2", f"{GPT} {AXES['tensor']}"),
           ("mpirun:4", f"{GPT} {PAIRS['shard, pipeline']}"),
           ("gloo:2", f"{GPT} {AXES['context']}"),
           ("mpirun:2", GPT))  # fmt: skip
    resume("batchnorm", ("gloo:2", BATCHNORM), ("mpirun:3", BATCHNORM))
    resume("bucketed lengths", ("gloo:2", RAGGED), ("mpirun:3", RAGGED))
    resume("powersgd", *[("gloo:2", f"{GPT} {EXCHANGES['powersgd']}")] * 2)
    resume("diloco", *[("mpirun:2", f"{GPT} {EXCHANGES['diloco']}")] * 2)
    resume("fp16", *[("gloo:2", f"{GPT} --precision.name fp16")] * 2)
    return found


class Killed(LanguageModel):
    """Language model that loses one process in a fixed training micro-batch.

    HVDTRAIN_TEST_KILL=process:call: the process that the launcher started with this number sends
    itself SIGKILL in that training micro-batch. HVDTRAIN_TEST_HOSTS: path of the host file, from
    which it removes its slot first. Otherwise a new process would join, at a step that depends on
    time.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        own = psutil.Process().environ()  # as it was at the start
        process, call = own["HVDTRAIN_TEST_KILL"].split(":")
        self._last = int(call) if process == own.get("HOROVOD_RANK") else 0
        self._calls = 0

    def loss(self, model: Any, batch: Any) -> Any:
        self._calls += model.training
        if model.training and self._calls == self._last:
            hosts = Path(os.environ["HVDTRAIN_TEST_HOSTS"])
            host, slots = hosts.read_text().split(":")
            new = hosts.with_suffix(".new")
            new.write_text(f"{host}:{int(slots) - 1}\n")
            new.rename(hosts)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


# --- running and recording ---


class CaseError(Exception):
    """A start of a case failed or did not end in time."""


def _run(starts: Sequence[Start], data: Path, directory: Path) -> Record:
    """Run a case in an empty directory and return its record.

    Raises:
        CaseError: a start did not end with exit code 0 in time.
    """
    for start in starts:
        flags = start.flags.format(data=data).split()
        flags += ["--run.root", str(directory), "--run.id", "run"]
        try:
            done = _launch(start, flags, directory / "output")
        except AssertionError as error:  # of Job.wait
            raise CaseError(str(error)) from None
        if done.returncode:
            raise CaseError(str(done))
    return dict(_read(directory / "run"))


def _launch(start: Start, flags: Sequence[str], directory: Path) -> Finished:
    launcher, _, ranks = start.launcher.partition(":")
    env = {"HVDTRAIN_TEST_PACE": "0"}
    if launcher != "elastic":
        return runs.run(directory, flags, start.launcher, env, LIMIT_S)
    directory.mkdir(parents=True, exist_ok=True)
    hosts = directory / "hosts"
    hosts.write_text(f"localhost:{ranks}\n")
    env |= {"HVDTRAIN_TEST_KILL": start.kill, "HVDTRAIN_TEST_HOSTS": str(hosts)}
    rank = ["--network-interfaces", "lo", warm.python(int(ranks)), *runs.TRAIN[1:]]
    command = elastic_horovodrun(int(ranks), 1, int(ranks), ["cat", str(hosts)], rank)
    return runs.start(directory, flags, env=env, command=command).wait(LIMIT_S)


def _read(run: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (place, values by name) of the generations, the steps and the last checkpoint."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "start":
            names = ("cause", "source", "step", "world_size")
            yield f"generation {event['generation']}", {name: repr(event[name]) for name in names}
    for line in runs.metrics(run):
        kept = {
            name: repr(value)
            for name, value in line.items()
            if name not in MEASURED and not name.endswith(MEASURED_ENDINGS)
        }
        yield f"step {line['step']}", kept
    newest = max((run / "checkpoints").glob("step_*"))
    state = json.loads((newest / "state.json").read_text())
    content = {f"state.json {name}": repr(value) for name, value in state.items()}
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  # not a dict
                found = _hash(file.get_tensor(name), places.get(name, ""))
                content[f"{path.name} {name}"] = found
    yield f"checkpoint of step {state['step']}", content


def _hash(tensor: torch.Tensor, place: str) -> str:
    """Return a hash of bits, dtype, shape and, for a shard, its place in the whole tensor."""
    described = f"{tensor.dtype} {list(tensor.shape)} {place}".encode()
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(described + data.tobytes()).hexdigest()[:16]


def _machine() -> dict[str, str]:
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpus if "model name" in line), "")
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"cpu": f"{model or platform.machine()} ({instructions})", "torch": torch.__version__}


def _differences(before: Record, after: Record) -> list[str]:
    """Return a line for each of the first places that differ, and one that counts the others."""
    found = []
    for place in dict.fromkeys([*before, *after]):
        old, new = before.get(place, {}), after.get(place, {})
        names = [n for n in dict.fromkeys([*old, *new]) if old.get(n) != new.get(n)]
        if not names:
            continue
        shown = [f"{n} {old.get(n, 'absent')} -> {new.get(n, 'absent')}" for n in names]
        more = f"; {len(names)} of {len(old)} differ" if len(names) > SHOWN_NAMES else ""
        found.append(f"  {place}: {'; '.join(shown[:SHOWN_NAMES])}{more}")
    rest = len(found) - SHOWN_PLACES
    return found[:SHOWN_PLACES] + ([f"  and in {rest} more places"] if rest > 0 else [])


def _select(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    return [name for name in names if not wanted or any(word in name for word in wanted)]


def _run_all(names: Sequence[str]) -> Iterator[tuple[str, Record | str]]:
    """Run these cases; yield (name, record), or (name, message) for a case that failed."""
    cases = _cases()
    with tempfile.TemporaryDirectory(prefix="recorded-") as directory:
        root = Path(directory)
        datasets.write(datasets.sales(), root / "sales.parquet")
        for number, name in enumerate(names):
            began = time.monotonic()
            try:
                found: Record | str = _run(cases[name], root, root / str(number))
            except CaseError as error:
                found = f"  {error}"
            print(f"{time.monotonic() - began:5.1f} s  {name}", flush=True)
            yield name, found


def _record(path: Path, wanted: Sequence[str]) -> int:
    if path.exists():
        print(f"recorded-runs: {path} exists already: delete it first", file=sys.stderr)
        return 2
    found, failed = {}, 0
    for name, record in _run_all(_select(list(_cases()), wanted)):
        if isinstance(record, str):
            failed += 1
            print(f"{name} FAILED", record, sep="\n", flush=True)
        else:
            found[name] = record
    content = {"machine": _machine(), "cases": found}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(found)} cases recorded in {path}" + (f"; {failed} failed" if failed else ""))
    return int(failed > 0 or not found)


def _compare(path: Path, wanted: Sequence[str]) -> int:
    content = json.loads(path.read_text())
    before: Mapping[str, Record] = content["cases"]
    for fact, value in _machine().items():
        if value != (was := content["machine"].get(fact)):
            print(f"warning: {fact} was {was} and is {value}: bits may differ")
    known = _cases()
    if new := len(known.keys() - before.keys()):
        print(f"warning: {new} of {len(known)} cases are not in {path} and are not compared")
    names = _select([*before], wanted)
    lost = [name for name in names if name not in known]
    for name in lost:
        print(f"{name} LOST: it is in {path} but not in the table")
    differ = len(lost)
    for name, record in _run_all([name for name in names if name in known]):
        failed = isinstance(record, str)
        lines = [record] if isinstance(record, str) else _differences(before[name], record)
        if lines:
            differ += 1
            print(f"{name} {'FAILED' if failed else 'DIFFERS'}", *lines, sep="\n", flush=True)
    same = f"{len(names) - differ} of {len(names)} cases are the same"
    print(f"{same}; {differ} differ" if differ else same)
    return int(differ > 0 or not names)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args(argv)
    return (_record if args.action == "record" else _compare)(args.file, args.names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
