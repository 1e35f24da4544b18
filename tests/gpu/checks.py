"""The checks of `make gpu-check`: check, expected, result, ok.

Part of tests/gpu/check.py, in the environment that it creates. Each check starts hvdtrain's own
commands with a limit; a failure does not prevent other checks. The results so far are in the
results directory after each check, in case the machine is lost.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from hvdtrain.bench.elastic import recovered
from hvdtrain.bench.jobs import ControlledJob
from hvdtrain.bench.jobs import train as endless_training
from hvdtrain.errors import EXIT_USER
from hvdtrain.launch.commands import elastic_horovodrun, horovodrun, mpirun
from hvdtrain.runtime.signals import leave_on_sigterm
from tests.gpu.machine import CURVE, HALF_CURVE, HVDTRAIN, STEPS, Machine, compare, lines

PARAMETERS = 124_000_000  # minimum for gpt-small
PRECISIONS = {
    "tf32": "--precision.tf32 true",
    "bf16": "--precision.name bf16",
    "fp16": "--precision.name fp16",
    "bf16-params": "--precision.name bf16-params",
}
PATTERNS = {
    "block_sparse": "",
    "dilated": "--model.attention.segment_lengths=[64,128] --model.attention.dilation_rates=[1,2]",
}
SPANNING = {"shard": "--parallel.shard.degree 2", "context": "--parallel.context 2"}


@dataclass(frozen=True)
class Check:
    """A row: `look` returns the result or raises; `gpus`: number of GPUs that it needs."""

    name: str
    wanted: str
    look: Callable[[Machine], str]
    gpus: int = 0


@dataclass(frozen=True)
class Row:
    """Result of a check; ok None: it could not run here."""

    check: str
    wanted: str
    seen: str
    ok: bool | None
    seconds: float


def a_gpu(machine: Machine) -> str:
    name, version = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    assert float(product.sum()) == 64**3
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{machine.gpus} x {name} ({version}), torch {torch.__version__}, NCCL {nccl}"


def build(machine: Machine) -> str:
    said = machine.run([*horovodrun(1, [])[:1], "--check-build"], 60)
    wanted = {"PyTorch", "Gloo"} | ({"NCCL"} if machine.gpus else set())
    built = set(re.findall(r"\[X\] (\S+)", said))
    seen = ", ".join(sorted(built))
    assert wanted <= built, seen
    return seen


def all_reduce(machine: Machine) -> str:
    said = machine.run([*HVDTRAIN, "horovod", "check"], 200)
    return ", ".join(line for line in said.splitlines() if line)


def one_rank(machine: Machine) -> str:
    run = machine.train("one", [], 180, "--profile.steps 9:11 --checkpoint.every 100")
    device = json.loads((run / "manifest.json").read_text())["device"]
    assert device == machine.device, f"trained on {device}"
    steps = lines(run / "metrics.jsonl")
    first, last = steps[0]["loss"], steps[-1]["loss"]
    assert last < first - 1, f"the loss went from {first} to {last}"
    step = median(line["step_seconds"] for line in steps)
    return f"the loss went from {first:.4f} to {last:.4f}; a step {1000 * step:.0f} ms"


def timers(machine: Machine) -> str:
    # On a GPU a phase counts when the device has left it, so the first line includes the start.
    told = lines(machine.work / "one" / "ranks.jsonl")[1:]
    wall = sum(line["wall_seconds"][0] for line in told)
    phases = dict.fromkeys(told[0]["phases"], 0.0)
    for line in told:
        for name in phases:
            phases[name] += line["phases"][name][0]
    steps = lines(machine.work / "one" / "metrics.jsonl")
    slack = 3 * max(line["step_seconds"] for line in steps[2:])
    seen = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds)
    seen += f"; together {sum(phases.values()):.2f} of {wall:.2f} s"
    assert abs(sum(phases.values()) - wall) <= slack, seen
    assert 0.5 <= phases["backward"] / phases["forward"] <= 5, seen
    return seen


def memory(machine: Machine) -> str:
    last = lines(machine.work / "one" / "ranks.jsonl")[-1]["device_memory_bytes"][0]
    seen = f"{last / 1e9:.2f} GB"
    # Weights and AdamW's two moments; gradients are temporary.
    assert last >= 12 * PARAMETERS if machine.gpus else last == 0, seen
    return seen


def profile(machine: Machine) -> str:
    said = machine.run([*HVDTRAIN, "profile", "summary", str(machine.work / "one")], 60)
    found = re.search(r"^time +(.+)\nrank 0 on \S+ +(.+)$", said, re.MULTILINE)
    assert found, said
    for words in ("peak device memory", "kernel"):
        assert (words in said) == bool(machine.gpus), f"{words!r}: {said}"
    columns = zip(*(re.split(r" {2,}", line.strip()) for line in found.groups()), strict=True)
    return ", ".join(" ".join(column) for column in columns)


def resume(machine: Machine) -> str:
    run = machine.train("one", [], 120, f"--train.duration {STEPS + 4}")
    steps = [line["step"] for line in lines(run / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 5)), str(steps)
    machine.run([*HVDTRAIN, "ckpt", "verify", str(run)], 60)
    machine.run([*HVDTRAIN, "audit", str(run)], 60)
    return f"steps {steps[0]} to {steps[-1]} once each, checkpoints and audit fine"


def generate(machine: Machine) -> str:
    flags = ["--prompt", "def ", "--length", "40", "--temperature", "0"]
    said = machine.run([*HVDTRAIN, "generate", str(machine.work / "one"), *flags], 60)
    assert "def " in said, said
    return repr(said.strip()[-50:])


def two_ranks(machine: Machine) -> str:
    run = machine.train("two", horovodrun(2, machine.wrapper, hosts=machine.hosts), 180)
    told = lines(run / "ranks.jsonl")[-1]["device_memory_bytes"]
    assert len(told) == 2 and all(bool(n) == bool(machine.gpus) for n in told), str(told)
    return compare(run, machine.work / "one")


def exact(machine: Machine) -> str:
    """Losses of 16-bit attention repeat bitwise, alone and on two ranks."""
    flags = "--precision.name bf16 --exchange.name exact --runtime.threads 1"
    flags += f" --train.duration {STEPS // 2}"
    launchers = {"exact-1": [], "exact-2": horovodrun(2, machine.wrapper, hosts=machine.hosts)}
    found = []
    for name, launcher in launchers.items():
        run = machine.train(name, launcher, 180, flags)
        found.append([line["loss"] for line in lines(run / "metrics.jsonl")])
    assert found[0] == found[1], str(found)
    machine.run([*HVDTRAIN, "audit", str(machine.work / "exact-2")], 60)
    return f"{len(found[0])} losses are equal on one and two ranks; the last: {found[0][-1]}"


def patterns(machine: Machine) -> str:
    """The kernels that models/attention_kernels.py calls, in a whole run."""
    seen = []
    for pattern, own in PATTERNS.items():
        flags = f"--precision.name bf16 --model.attention.pattern {pattern} {own}"
        run = machine.train(pattern, [], 180, f"{flags} --train.duration {STEPS // 2}")
        steps = lines(run / "metrics.jsonl")
        first, last = steps[0]["loss"], steps[-1]["loss"]
        assert last < first, f"{pattern}: the loss went from {first} to {last}"
        seen.append(f"{pattern}: {first:.4f} to {last:.4f}")
    return ", ".join(seen)


def precisions(machine: Machine) -> str:
    seen = []
    for name, flags in PRECISIONS.items():
        found = compare(machine.train(name, [], 180, flags), machine.work / "one", limit=HALF_CURVE)
        seen.append(f"{name}: {found}")
    return "; ".join(seen)


def spanning(machine: Machine) -> str:
    """A model of two ranks, over torch's NCCL groups."""
    launcher = horovodrun(2, machine.wrapper, hosts=machine.hosts)
    seen = []
    for name, flags in SPANNING.items():
        seen.append(
            f"{name}: {compare(machine.train(name, launcher, 180, flags), machine.work / 'one')}"
        )
    return "; ".join(seen)


def refused(machine: Machine) -> str:
    ranks = machine.gpus + 1
    said = machine.run(horovodrun(ranks, machine.rank("refused")), 120, wanted=EXIT_USER)
    found = re.search(rf"has {machine.gpus} GPUs?, but {ranks} ranks[^\n]*", said)
    assert found, said[-500:]
    return found.group()


def by_mpirun(machine: Machine) -> str:
    if shutil.which("mpirun") is None:
        raise NotHereError("not run: no mpirun here")
    # All ranks of mpirun are on one host, where NCCL and hvdtrain refuse two ranks on one GPU.
    ranks = 1 if machine.gpus == 1 else 2
    found = compare(machine.train("mpi", mpirun(ranks, []), 180), machine.work / "one")
    return f"{ranks} by mpirun: {found}"


def kill(machine: Machine) -> str:
    root = machine.work / "killed"
    root.mkdir()
    discover = ["printf", "%s\\n", *machine.hosts.split(",")]
    flags = ["--config", machine.preset, *machine.model]
    command = [*machine.wrapper, *endless_training(sys.executable, flags, root)]
    try:
        with ControlledJob(elastic_horovodrun(2, 1, 2, discover, command), root) as job:
            job.wait_for(lambda lines: bool(lines) and lines[-1]["world_size"] == 2, "2 ranks")
            job.wait_for_more(5)
            since = time.time()
            job.kill_one()
            job.wait_for(lambda lines: lines[-1]["world_size"] == 1, "the kill's effect")
            job.wait_for(lambda lines: lines[-1]["world_size"] == 2, "the new rank's first step")
            job.wait_for_more(2)
            found = recovered(job.lines(), job.events(), since, 2)
    finally:
        with machine.log.open("a") as log:
            log.write((root / "output").read_text(errors="replace"))
    machine.run([*HVDTRAIN, "audit", str(root / "bench")], 60)
    return (
        f"{found.pause:.1f} s without a step, both ranks again after {found.whole:.1f} s, "
        "no step lost or done twice"
    )


CHECKS = (
    Check("GPU", "torch computes on it", a_gpu, gpus=1),
    Check("Horovod's build", "PyTorch, Gloo, and NCCL for GPUs", build),
    Check("one rank", "trains on the device, and the loss falls", one_rank),
    Check("phases of a step", "add up to the wall time; backward 0.5 to 5 x forward", timers),
    Check("device memory", "weights and the optimizer's state", memory),
    Check("profile", "kernels and peak memory", profile),
    Check("losses of two ranks", f"one rank's losses, within {CURVE}", two_ranks),
    Check("kill -9 of a rank", "the other continues, a new one joins", kill),
    Check("exact", "bitwise identical losses on one and two ranks", exact),
    Check("attention patterns", "train in bf16", patterns),
    Check("resume", "no step lost or twice; checkpoints and audit", resume),
    Check("generate", "text from the checkpoint", generate),
    Check("precisions", f"float32's losses, within {HALF_CURVE}", precisions),
    Check("model over two ranks", f"one rank's losses, within {CURVE}", spanning),
    Check("more ranks than GPUs", f"exit code {EXIT_USER} and one message", refused, gpus=1),
    Check("mpirun", f"one rank's losses, within {CURVE}", by_mpirun),
    Check("hvdtrain horovod check", "a sum over 2 ranks by each controller", all_reduce),
)


class NotHereError(Exception):
    """A check cannot run on this machine; the message says why."""


def look(check: Check, machine: Machine) -> Row:
    """Run one check; any error becomes its result."""
    began = time.monotonic()
    ok: bool | None = True
    try:
        if machine.gpus < check.gpus:
            raise NotHereError(f"not run: {machine.gpus} of {check.gpus} GPUs here")
        assert time.monotonic() < machine.until, "no time left"
        seen = check.look(machine)
    except NotHereError as error:
        ok, seen = None, str(error)
    except Exception as error:
        ok, seen = False, f"{type(error).__name__}: {error}"
    return Row(check.name, check.wanted, " ".join(seen.split()), ok, time.monotonic() - began)


def show(rows: list[Row]) -> str:
    """Format the table as Markdown."""
    words = {True: "yes", False: "NO", None: "-"}
    text = "| check | wanted | seen | ok | s |\n| --- | --- | --- | --- | --- |\n"
    for row in rows:
        seen = row.seen.replace("|", "/")
        text += f"| {row.check} | {row.wanted} | {seen} | {words[row.ok]} | {row.seconds:.0f} |\n"
    return text


def main() -> int:
    """Return 0: no check failed; 1: a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    leave_on_sigterm()
    work = args.work
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    machine = Machine(args.gpus, work, args.out / "log.txt", time.monotonic() + args.seconds)
    rows: list[Row] = []
    with machine.trained_on_cpu() as on_cpu:

        def curve(machine: Machine) -> str:
            return compare(machine.work / "one", on_cpu())

        # Last, because a CPU takes long.
        last = Check("losses of one rank", f"the CPU's losses, within {CURVE}", curve)
        for check in (*CHECKS, last):
            rows.append(look(check, machine))
            print(show(rows[-1:]).splitlines()[-1], flush=True)
            (args.out / "table.md").write_text(show(rows))
            found = json.dumps([asdict(row) for row in rows], indent=1)
            (args.out / "results.json").write_text(found)
    failed = [row.check for row in rows if row.ok is False]
    if failed:
        print(f"gpu-check: failed: {', '.join(failed)}; what was said: {machine.log}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
