"""Breaks a running job on a cluster, by name: the injector behind the table of faults."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.cluster import Cluster, Process
from tests.support.job import Finished, Job

# Linear regression whose micro-batches take a while: a tenth of a second a step on 4 ranks.
PACED = (
    "--task tests.support.tasks:Paced --batch.global_size 8 --batch.micro_size 2 --eval.every 50"
    " --optim.name adamw --checkpoint.every 100 --telemetry.port 0"
)
START_SECONDS = 90


class ElasticJob:
    """An elastic job of horovodrun, and what can be done to it.

    Args:
        folder: where its run and its list of hosts lie.
        hosts: "node1:2 node2:2"; written to the file that the discovery script prints.
        discovery: the script; default: prints that file.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        hosts: str = "node1:2 node2:2",
        np: int = 4,
        min_np: int = 1,
        arguments: str = "",
        discovery: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.run = folder / "case"
        self._hosts = folder / "hosts"
        self.set_hosts(hosts)
        script = discovery or f"cat {self._hosts}"
        command = f"horovodrun --gloo -np {np} --min-np {min_np} --max-np 6".split()
        command += ["--host-discovery-script", script, "python", "-m", "hvdtrain.train"]
        command += f"{PACED} --run.root {folder} --run.id case {arguments}".split()
        self.job: Job = cluster.start("node1", command, env)

    # --- faults ------------------------------------------------------------

    def kill(self, *numbers: int) -> None:
        """SIGKILL to the processes that the launcher started as these numbers, at once."""
        self.cluster.kill([self.process(number) for number in numbers])

    def stop(self, number: int) -> None:
        """SIGSTOP for ever."""
        os.kill(self.process(number).pid, signal.SIGSTOP)

    def kill_processes_of(self, host: str) -> None:
        """All that the job has on a host: ranks, watchdogs, shells, ssh sessions."""
        ours = [p for p in self.cluster.processes(host) if "-m hvdtrain" in p.command]
        self.cluster.kill(ours)

    def set_hosts(self, hosts: str) -> None:
        """What discovery finds from now on."""
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts.split()))
        new.rename(self._hosts)

    # --- what is seen of the job -------------------------------------------

    def process(self, number: int) -> Process:
        """The living process that was started as this number: rank `number` at first."""
        for process in self.cluster.ranks():
            try:
                own = psutil.Process(process.pid).environ().get("HOROVOD_RANK")
            except psutil.Error:
                continue
            if own == str(number):
                return process
        raise LookupError(f"process {number} is not there")

    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far; a line that is being written is left out."""
        return [json.loads(line) for line in self._text().split("\n")[:-1]]

    def last(self) -> dict[str, Any]:
        """The last line; {} where there is none."""
        whole = self._text().rpartition("\n")[0]
        return json.loads(whole.rpartition("\n")[2]) if whole else {}

    def _text(self) -> str:
        path = self.run / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def wait_for(self, what: Callable[[dict[str, Any]], bool], seconds: float, name: str) -> None:
        """Waits until the last line of metrics.jsonl is so."""
        deadline = time.monotonic() + seconds
        while not ((line := self.last()) and what(line)):
            assert self.job.running(), f"ended before {name}: {self.job.wait(5)}"
            if time.monotonic() > deadline:
                self.job.kill()
                raise AssertionError(f"no {name} within {seconds} s: {self.job.wait(10)}")
            time.sleep(0.05)

    def wait_for_step(self, step: int, seconds: float = START_SECONDS) -> None:
        self.wait_for(lambda line: line["step"] >= step, seconds, f"step {step}")

    def wait_for_world(self, size: int, seconds: float) -> None:
        self.wait_for(lambda line: line["world_size"] == size, seconds, f"world of {size} ranks")

    def wait_for_more(self, steps: int, seconds: float) -> None:
        self.wait_for_step(self.last()["step"] + steps, seconds)

    def end(self) -> Finished:
        """Asks the launcher to stop; the job must end with 75 and a checkpoint."""
        launcher = next(p for p in self.cluster.processes("node1") if _is_launcher(p.command))
        os.kill(launcher.pid, signal.SIGUSR1)
        done = self.job.wait(40)
        assert done.returncode == 75, done
        return done


def _is_launcher(command: str) -> bool:
    words = command.split()
    return len(words) > 1 and words[1].endswith("/horovodrun")


def pause(lines: Sequence[Mapping[str, Any]], since: float) -> float:
    """The longest time between two steps that ended after `since` (unix), in seconds."""
    times = [line["time"] for line in lines]
    pairs = itertools.pairwise(times)
    return max(later - max(earlier, since) for earlier, later in pairs if later > since)


def assert_same_curve(lines: Sequence[Mapping[str, Any]], reference: Sequence[float]) -> None:
    """Every step once, and the losses of an undisturbed run to 1e-4."""
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)), "a gap or a double line"
    for line, expected in zip(lines, reference, strict=False):
        assert abs(line["loss"] - expected) <= 1e-4 * abs(expected) + 1e-9, (line, expected)
