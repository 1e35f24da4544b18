"""Real agents on this machine, and the driver's side of them (agent/hub.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.agent import driver_file, protocol
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.agent.hub import Hub, Slot
from tests.support.job import poll, running_children

SECONDS = 20
# In an agent: its reads of the driver's file take so long while a file exists.
_SLOW_DISK = """
import os, time
from hvdtrain.agent import driver_file
def slow(path, limit, read=driver_file._read_private):
    if os.path.exists({flag!r}):
        time.sleep({seconds})
    return read(path, limit)
driver_file._read_private = slow
"""


class Fleet:
    """A hub and agents on this machine, each with a host name of its own.

    Attributes:
        codes: exit code of each process that has ended.
        output: text of each process and stream.
        signals: (host, number) of signals that agents received.
        said: messages for the user.
    """

    def __init__(self, run: Path, timeout: float = 30) -> None:
        self.run, self._timeout = run, timeout
        self._tls, self._certificate = protocol.new_certificate()
        self.secret = driver_file.new_secret()
        self.codes: dict[int, int] = {}
        self.output: dict[tuple[int, str], str] = {}
        self.signals: list[tuple[str, int]] = []
        self.said: list[str] = []
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self._scripts: dict[int, str] = {}
        self.new_hub(["sh", "-c", 'eval "$SCRIPT"'])

    def new_hub(self, command: list[str]) -> None:
        self.hub = Hub(
            bytes.fromhex(self.secret),
            self._timeout,
            command,
            str(self.run),
            self._on_output,
            lambda host, number: self.signals.append((host, number)),
            self.said.append,
            self._tls,
        )
        self.hub.environment = self._environment
        content = DriverFile(["127.0.0.1"], self.hub.port, self.secret)
        driver_file.write(self.run, replace(content, certificate=self._certificate))

    def _on_output(self, number: int, stream: str, text: str) -> None:
        self.output[number, stream] = self.output.get((number, stream), "") + text

    def _environment(self, slot: Slot, address: str) -> Mapping[str, str]:
        return {"ADDRESS": address, "SCRIPT": self._scripts[slot.rank]}

    def agent(
        self,
        host: str,
        slots: int = 2,
        env: Mapping[str, str] | None = None,
        guest: bool = False,
    ) -> None:
        """Start an agent, and wait until it is registered; `guest`: not as a task of a launch."""
        argv = [sys.executable, "-m", "hvdtrain.cli", "agent", "--run", str(self.run)]
        argv += [] if guest else ["--task"]
        self.agents[host] = subprocess.Popen(
            [*argv, "--host", host, "--slots", str(slots), "--wait", "20"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | dict(env or {}),
        )
        assert self.hub.wait_for(lambda hosts: host in hosts, SECONDS), self.said

    def slow_disk(self, flag: Path, seconds: float) -> dict[str, str]:
        """Return the environment of an agent whose disk is slow while `flag` exists."""
        directory = self.run / "slow"
        directory.mkdir()
        code = _SLOW_DISK.format(flag=str(flag), seconds=seconds)
        (directory / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', os.getcwd())}"}

    def start(self, number: int, script: str, host: str = "a") -> None:
        """Start a shell script as a process."""
        self._scripts[number] = script
        self.hub.start(
            SlotInfo(host, number, number, 0, 1, 1, 1),
            lambda code: self.codes.__setitem__(number, code),
        )

    def wait_for_exit(self, number: int) -> int:
        poll(lambda: number in self.codes, SECONDS, f"the end of {number}: {self.said}")
        return self.codes[number]

    def wait_for_output(self, number: int, text: str, stream: str = "stdout") -> str:
        def written() -> bool:
            return text in self.output.get((number, stream), "")

        poll(written, SECONDS, f"{text!r} in {self.output}")
        return self.output[number, stream]

    def pid(self, host: str, name: str) -> psutil.Process:
        """The agent's process of that name, such as hvdtrain-agent."""
        keeper = psutil.Process(self.agents[host].pid)
        found: list[psutil.Process] = []

        def exists() -> bool:
            below = running_children(lambda p: p.name() == name, keeper.pid)
            found[:] = [keeper] if keeper.name() == name else below
            return bool(found)

        poll(exists, SECONDS, name)
        return found[0]

    def exit_code(self, host: str) -> int:
        return self.agents[host].wait(SECONDS)

    def close(self) -> None:
        self.hub.finish(0)
        for agent in self.agents.values():
            try:
                agent.wait(SECONDS)
            finally:
                agent.kill()
