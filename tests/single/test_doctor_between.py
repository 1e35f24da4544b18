"""The doctor across many hosts and on unusable directories, with simulated agents."""

from __future__ import annotations

import errno
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.doctor import host_facts, host_links, hosts, session
from hvdtrain.doctor.examine import Request, examine, examine_links
from hvdtrain.doctor.findings import Examination, notes
from hvdtrain.doctor.host_checks import Facts
from hvdtrain.doctor.network import RANKS, check_interfaces
from hvdtrain.doctor.session import HostSession, SilentError
from hvdtrain.errors import UserError
from hvdtrain.launch.hostfile import parse_hosts


class Agent(HostSession):
    """A host with configured answers.

    Args:
        answers: question -> answer, or a function of the question's arguments.
    """

    def __init__(self, name: str, answers: dict[str, Any]) -> None:
        self.name, self.answers = name, answers
        self.asked: list[str] = []

    def ask(self, do: str, limit: float, **arguments: Any) -> Any:
        self.asked.append(do)
        answer = self.answers[do]
        return answer(**arguments) if callable(answer) else answer


@pytest.fixture
def nobody() -> Iterator[Path]:
    """Deny this process access to the directory."""
    with tempfile.TemporaryDirectory() as name:
        own = os.geteuid()
        os.chmod(name, 0)
        if own == 0:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if own == 0:
                os.seteuid(own)
            os.chmod(name, 0o700)


def test_unsearchable_parent_directory_is_reported(nobody: Path) -> None:
    assert host_facts.directory(str(nobody / "runs"))["failed"] == "Permission denied"
    assert host_facts.attempt_lock(str(nobody / "runs" / "lock")) == "absent"


def test_directory_that_cannot_be_created_does_not_abort_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = str(tmp_path / "file" / "runs")
    assert host_facts.directory(root)["failed"] == "Not a directory"  # which is the finding
    assert hosts.check_locks([Agent("node1", {})], root) == []


def test_directory_that_cannot_be_removed_does_not_abort_the_doctor(tmp_path: Path) -> None:
    def hold(path: str) -> bool:  # NFS keeps an open file under another name
        (Path(path).parent / ".nfs0001").touch()
        return True

    first, second = Agent("node1", {"hold": hold}), Agent("node2", {"attempt": "taken"})
    (finding,) = hosts.check_locks([first, second], str(tmp_path / "new" / "runs"))
    assert (finding.check, finding.where) == ("locks", "node2")
    found = hosts.check_locks([Agent("node1", {"hold": True}), second], str(tmp_path / "a/b"))
    assert len(found) == 1 and not (tmp_path / "a").exists()  # only what it created


def _facts(number: int, **more: Any) -> Facts:
    address = f"10.0.0.{number}"
    interfaces = {"eth0": {"addresses": [address], "mtu": 1500, "mbit": 0}}
    facts = {"chosen": "eth0", "interfaces": interfaces, "ports": [40000, 40009], "mpi": None}
    return facts | {"gpus": [], "addresses": {}, "firewalls": []} | more


def _with_infiniband(number: int) -> Facts:
    facts = _facts(number, gpus=[{}])
    return facts | {
        "interfaces": facts["interfaces"] | {"ib0": {"addresses": [f"10.9.0.{number}"]}}
    }


LISTENS = {"ports": {RANKS: [40000]}, "stream": 40001, "udp": 40002}
STREAM = {"latency": 1e-4, "bandwidth": 1e9}


def _reach(address: str, ports: list[int]) -> dict[str, str]:
    return {str(port): "" for port in ports}


def _reach_no_infiniband(address: str, ports: list[int]) -> dict[str, str]:
    return {str(port): "no answer" if address.startswith("10.9.") else "" for port in ports}


def _agent(name: str, reach: Any = _reach, stream: Any = STREAM) -> Agent:
    answers = {"listen": LISTENS, "reach": reach, "packet": "arrives", "stream": stream}
    return Agent(name, answers)


def _examined(
    agents: list[Agent], facts: dict[str, Facts], slots: dict[str, int]
) -> tuple[Examination, list[str]]:
    found = Examination()
    examine_links(found, {agent.name: agent for agent in agents}, facts, slots)
    return found, [f"{one.check}: {one.where}" for one in found.findings]


def test_only_hosts_with_nccl_ranks_are_tested_on_nccl_interfaces() -> None:
    agents = [
        _agent("head", _reach_no_infiniband),  # only launches
        _agent("node1"),
        _agent("plain", _reach_no_infiniband),  # without a GPU
        _agent("node2"),
    ]
    facts = {"head": _facts(1, gpus=[{}]), "plain": _facts(2)}
    facts |= {"node1": _with_infiniband(3), "node2": _with_infiniband(4)}
    slots = {"node1": 1, "plain": 1, "node2": 1}
    assert _examined(agents, facts, slots)[1] == []
    agents[1] = _agent("node1", _reach_no_infiniband)
    found, places = _examined(agents, facts, slots)
    assert places == ["interfaces: node2"] and "node1 does not reach" in found.findings[0].what


def test_host_silent_in_the_nccl_check_does_not_abort_the_doctor() -> None:
    def silent(address: str, ports: list[int]) -> dict[str, str]:
        if address.startswith("10.9."):
            raise SilentError("no answer in time")
        return _reach(address, ports)

    agents = [_agent("node1", silent), _agent("node2", _reach_no_infiniband)]
    facts = {"node1": _with_infiniband(1), "node2": _with_infiniband(2)}
    assert _examined(agents, facts, {"node1": 1, "node2": 1})[1] == ["interfaces: node1"]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("^lo,docker0", False),
        ("^eth", True),  # no files remain
        ("^=eth", False),
        ("eth", False),  # prefix of the name
        ("=eth", True),
        ("=eth0,ib0", False),
        ("10.0.0.0/8", False),
        ("ib0", True),
    ],
)
def test_interface_list_is_parsed_as_nccl_parses_it(
    value: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    found = check_interfaces({"node1": _facts(1)})
    assert [one.where for one in found] == ["node1"] * wrong, found


def _many(count: int, stream: Any = lambda number: STREAM) -> tuple[list[Agent], dict[str, Facts]]:
    agents = [_agent(f"node{n}", stream=stream(n)) for n in range(count)]
    return agents, {f"node{n}": _facts(n) for n in range(count)}


def test_above_64_hosts_each_is_measured_with_16_others() -> None:
    agents, facts = _many(66)
    found, places = _examined(agents, facts, {})
    assert places == [] and found.left_out == [
        "between hosts: 528 of 2145 pairs were measured, each host with 16 other hosts"
    ]
    ends = {(link["from"], link["to"]) for link in found.measured["links"]}
    assert all(len({b for a, b in ends if a == name}) == 16 for name in facts)
    reached = {"node0"}  # a fault in any part of the network affects some measured link
    while more := {b for a, b in ends if a in reached} - reached:
        reached |= more
    assert reached == set(facts)
    shown = list(notes(found))
    assert len(shown) < 15 and "1048 faster directions" in "".join(shown)
    assert _examined(*_many(4), {})[0].left_out == []


def test_slow_links_between_distant_groups_are_remeasured_and_reported() -> None:
    def stream(number: int) -> Any:
        far = [f"10.0.0.{n}" for n in range(8) if (n < 4) != (number < 4)]
        return lambda address, **_: STREAM | {"latency": 4e-3 if address in far else 1e-4}

    agents, facts = _many(8, stream)
    for number, theirs in enumerate(facts.values()):
        theirs["addresses"] = {f"node{n}": f"10.0.0.{n}" for n in range(8) if n != number}
    found, (place,) = _examined(agents, facts, {})
    assert place.startswith("latency: 32 directions, such as node")
    assert "node0 is in 8" in place and "4.0 ms" in found.findings[0].what
    assert sum(agent.asked.count("stream") for agent in agents) == 8 * 7 + 16


def test_slow_host_is_named_among_many_links() -> None:
    def stream(number: int) -> Any:
        return STREAM | {"bandwidth": 1e8 if number == 3 else 1e9}

    found, (place,) = _examined(*_many(6, stream), {})
    assert (
        place.startswith("bandwidth: 5 directions, such as node3 ->") and "node3 is in 5" in place
    )
    assert "800 Mbit/s" in found.findings[0].what


def test_measurement_of_a_distant_host_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def echo(own: socket.socket) -> None:
        if own.recv(1) == b"p":
            while byte := own.recv(1):
                time.sleep(0.1)
                own.sendall(byte)
        while own.recv(1 << 20):
            pass
        own.sendall(b"7")

    monkeypatch.setattr(host_links, "_serve", echo)
    began = time.monotonic()
    answer = host_links.stream("127.0.0.1", host_links.listen({})["stream"], 0.3)
    assert answer["latency"] >= 0.1 and time.monotonic() - began < 3


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """Return name -> limit on open files when the session began; (name, "closed"): it was closed.

    This process has a lower limit than the hard limit.
    """
    states: dict[Any, Any] = {}

    class Opened(HostSession):
        def __init__(self, name: str, here: bool) -> None:
            if name == "203.0.113.3":
                raise OSError(errno.EMFILE, "Too many open files")
            self.name = name
            states[name] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

        def close(self) -> None:
            states[self.name, "closed"] = True

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(session, "HostSession", Opened)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    yield states
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_hosts_is_a_user_error_that_closes_all_sessions(
    opened: dict[Any, Any],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(UserError, match="only 3 of 4 hosts can be queried at once: Too many open"):
        examine(Request(parse_hosts("localhost:1,203.0.113.1:1,203.0.113.2:1,203.0.113.3:1")))
    names = ("localhost", "203.0.113.1", "203.0.113.2")
    # This host's agent reports the limit that ranks here would have.
    assert [opened[name] for name in names] == [soft, hard, hard]
    assert all((name, "closed") in opened for name in names)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
