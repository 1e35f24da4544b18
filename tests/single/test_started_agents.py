"""Agents that the hub starts by itself (agent/started.py), on this machine and with other programs
than ssh."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.agent import driver_file, invitation, started
from hvdtrain.agent.hub import Hub
from hvdtrain.agent.invitation import Invitation
from hvdtrain.agent.started import StartedAgents
from hvdtrain.errors import UserError
from tests.support.job import has_ended, poll, running_children

SECONDS = 20


FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


class Fleet:
    """A hub that starts agents.

    Attributes:
        codes: exit code of each process that has ended.
        output: what processes wrote on stdout.
        said: messages for the user.
    """

    def __init__(self, directory: Path, ssh: list[str], local: bool) -> None:
        secret = driver_file.new_secret()
        self.codes: dict[int, int] = {}
        self.output = ""
        self.said: list[str] = []
        self.hub = Hub(
            bytes.fromhex(secret),
            30,
            ["sh", "-c", 'eval "$SCRIPT"'],
            str(directory),
            self._on_output,
            lambda *_: None,
            self.said.append,
        )
        self.scripts: dict[int, str] = {}
        self.hub.environment = lambda slot, _: {"SCRIPT": self.scripts[slot.rank]}
        environment = {"KEY": 'it\'s a "password"\n'}
        invited = Invitation(["127.0.0.1"], self.hub.port, secret, str(directory), environment)
        self.agents = StartedAgents(
            self.hub, invited, ssh, lambda _: local, self.said.append, FILES
        )
        self.hub.start_agents_with(self.agents.start)

    def _on_output(self, number: int, stream: str, text: str) -> None:
        self.output += text

    def start(self, number: int, script: str) -> None:
        self.scripts[number] = script
        self.hub.start(
            SlotInfo("a", number, number, 0, 1, 1, 1),
            lambda code: self.codes.__setitem__(number, code),
        )

    def wait_for_exit(self, number: int) -> int:
        poll(lambda: number in self.codes, SECONDS, f"the end of {number}: {self.said}")
        return self.codes[number]

    def keepers(self) -> list[psutil.Process]:
        return running_children(lambda process: process.name() == "hvdtrain-keeper")

    def close(self) -> None:
        self.hub.finish(0)
        self.agents.end(SECONDS)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    fleets = []

    def make(ssh: list[str] | None = None) -> Fleet:
        fleets.append(Fleet(tmp_path, ssh or [], ssh is None))
        return fleets[-1]

    yield make
    for one in fleets:
        one.close()


def _program(directory: Path, script: str) -> list[str]:
    path = directory / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return [str(path)]


def test_processes_of_a_host_share_one_agent_and_its_environment(
    fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    job = fleet()
    for number in range(3):
        job.start(number, 'echo "$KEY$PWD"; exit 3')
    assert [job.wait_for_exit(number) for number in range(3)] == [3, 3, 3]
    assert job.output == f'it\'s a "password"\n{tmp_path}\n' * 3
    assert len(job.keepers()) == 1


def test_agent_starts_through_a_program_that_passes_no_stdin_on(
    fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    # As Kubeflow's kubexec.sh, which exists only in its containers.
    job = fleet(_program(tmp_path, 'shift\nexec /bin/sh -c "$*" < /dev/null'))
    job.start(0, 'echo "$KEY"; exit 4')
    assert job.wait_for_exit(0) == 4
    assert job.output == 'it\'s a "password"\n\n'


def test_killed_agent_ends_its_processes_and_another_one_starts(
    fleet: Callable[..., Fleet],
) -> None:
    job = fleet()
    job.start(0, "echo $$; exec sleep 600")
    poll(lambda: "\n" in job.output, SECONDS, "the process")
    (keeper,) = job.keepers()
    agent = keeper.children()[0]
    keeper.kill()
    agent.kill()
    assert job.wait_for_exit(0) == 255
    rank = int(job.output)
    poll(lambda: has_ended(rank), 5, "the end of the rank")
    job.start(1, "exit 5")
    assert job.wait_for_exit(1) == 5


def test_failed_start_of_an_agent_ends_waiting_processes(
    fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    job = fleet(_program(tmp_path, "echo no route to $1 >&2; exit 255"))
    job.start(0, "")
    job.start(1, "")
    assert [job.wait_for_exit(number) for number in (0, 1)] == [255, 255]
    assert job.said.count("a: no route to a") == 1, job.said
    job.start(2, "")
    assert job.wait_for_exit(2) == 255
    assert job.said.count("a: no route to a") == 2, job.said


def test_hanging_start_of_an_agent_is_ended(
    fleet: Callable[..., Fleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started, "_REGISTER_SECONDS", 0.5)
    job = fleet(_program(tmp_path, "exec sleep 600"))
    began = time.monotonic()
    job.start(0, "")
    assert job.wait_for_exit(0) == 255 and time.monotonic() - began < 5
    assert any(line.startswith("a: no agent has responded") for line in job.said), job.said


def test_process_that_waits_for_an_agent_can_be_ended(
    fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    job = fleet(_program(tmp_path, "exec sleep 600"))
    job.start(0, "")
    job.start(1, "")
    job.hub.end(0)
    assert job.wait_for_exit(0) == 143
    job.hub.end_all()
    assert job.wait_for_exit(1) == 143
    job.agents._kill_all()


def test_agent_of_an_earlier_attempt_is_refused(fleet: Callable[..., Fleet]) -> None:
    job = fleet()
    job.start(0, "echo $$; exec sleep 600")
    poll(lambda: "\n" in job.output, SECONDS, "the process")
    job.hub.expect_agent("a", "another")
    os.kill(job.keepers()[0].children()[0].pid, 9)  # the keeper starts an agent, which registers
    poll(lambda: any("another agent has replaced it" in x for x in job.said), SECONDS, "refusal")
    poll(lambda: not job.keepers(), SECONDS, "the end of the agent")


def test_incomplete_invitation_is_an_error() -> None:
    line = Invitation(["127.0.0.1"], 1, "00", "/", {"A": "\udcff"}, "a", "b").line()
    assert invitation.parse(line).environment == {"A": "\udcff"}
    with pytest.raises(UserError, match="no invitation"):
        invitation.parse(line[:-20])
