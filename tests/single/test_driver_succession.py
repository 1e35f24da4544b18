"""What lets another driver continue a job: its record, the agents' processes, lease and address."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.agent import driver_file
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.elastic import job_record
from hvdtrain.elastic.decisions import (
    EndGeneration,
    FormGeneration,
    JobState,
    ReportResult,
    StartProcess,
    decide,
)
from hvdtrain.elastic.processes import Slots, TrainingProcess, assign
from hvdtrain.elastic.rendezvous import FILE_VARIABLE, DriverAddress
from hvdtrain.elastic.status import Identity, ProcessStatus
from hvdtrain.errors import EXIT_PREEMPTED, UserError
from hvdtrain.run_files.owner_token import Token
from hvdtrain.supervise import allocation
from hvdtrain.supervise.allocation import AllocationDriver, AllocationRun
from tests.support.fleet import Fleet
from tests.support.job import poll

HOSTS = ["a", "b", "c"]
IDENTITY = Identity("cpu", "digest", 100, None)
STATUS = ProcessStatus(IDENTITY, trained=True, step=7)
NOW = 5000.0


def running_job(hosts: list[str], gone: set[int] = frozenset()) -> JobState:  # type: ignore[assignment]
    """A job whose processes, one on each of `hosts`, train; those in `gone` ended before."""
    state = JobState(1, 9, 60.0, Slots(None))
    state.hosts.slots = {host: hosts.count(host) for host in hosts}
    for number, host in enumerate(hosts):
        slot = hosts[:number].count(host)
        state.processes.append(TrainingProcess(number, host, slot, status=STATUS))
    members = [p for p in state.processes if p.number not in gone]
    for process in state.processes:
        process.become("gone" if process.number in gone else "waiting", 1.0)
    plan = tuple(assign(members))
    state.apply(FormGeneration(0, tuple(p.number for p in members), plan), 1.0)
    return state


def rebuilt(state: JobState) -> JobState:
    """The state in another driver, from the record as it is in the file."""
    content = json.loads(json.dumps(asdict(job_record.record(11, state))))
    found = job_record.parse(content)
    assert found.job == 11
    return restored(found, 9)


def restored(found: job_record.JobRecord, max_np: int) -> JobState:
    state = JobState(1, max_np, 60.0, Slots(None))
    job_record.restore(found, state, NOW)
    return state


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=8), st.data())
def test_rebuilt_job_has_the_same_ranks_and_nothing_to_do(
    hosts: list[str], data: st.DataObject
) -> None:
    numbers = st.sets(st.integers(0, len(hosts) - 1), max_size=len(hosts) - 1)
    gone = data.draw(numbers)
    before = running_job(hosts, gone)
    after = rebuilt(before)
    assert assign(after.alive("running")) == assign(before.alive("running"))
    assert after.generations == 1 and len(after.processes) == len(hosts)
    assert {p.number for p in after.alive("running")} == set(range(len(hosts))) - gone
    starts = [a for a in decide(after, NOW) if not isinstance(a, StartProcess)]
    assert not starts, "ranks would pause although none is lost"


def test_loss_found_by_the_next_driver_forms_the_next_generation() -> None:
    state = rebuilt(running_job(["a", "b"]))
    state.exited(state.processes[1], 137, NOW)
    assert decide(state, NOW) == [EndGeneration(0)]
    state.apply(EndGeneration(0), NOW)
    state.requested(state.processes[0], STATUS, NOW)
    (action,) = decide(state, NOW)
    assert isinstance(action, FormGeneration)
    assert (action.number, action.processes) == (1, (0,)), "a generation must not repeat"
    state.apply(action, NOW)
    started = [a.number for a in decide(state, NOW + 60) if isinstance(a, StartProcess)]
    assert started == [2], "the number of an ended process must not repeat"


def test_record_contains_processes_about_to_start() -> None:
    found = job_record.record(11, running_job(["a"]), [StartProcess(1, "b", 0, 2)])
    assert found.next_number == 2 and job_record.live(found) == {0: "a", 1: "b"}


def test_starts_that_were_lost_with_the_first_driver_are_repeated() -> None:
    before = JobState(1, 2, 60.0, Slots(None))
    before.hosts.slots = {"a": 1, "b": 1}
    starts = [StartProcess(0, "a", 0, 1), StartProcess(1, "b", 0, 2)]
    state = restored(job_record.record(11, before, starts), 2)
    for process in state.processes:
        state.exited(process, 137, NOW)
    assert decide(state, NOW) == [], "slots pause, but the job does not end"
    again = decide(state, NOW + 2)
    assert [(a.number, a.host) for a in again if isinstance(a, StartProcess)] == [
        (2, "a"),
        (3, "b"),
    ]
    for action in again:
        state.apply(action, NOW + 2)
    assert not state.incidents, "the hosts are not to blame"
    assert state.exit_code == 0
    for process in state.processes[2:]:
        state.exited(process, 1, NOW + 3)
    assert decide(state, NOW + 9) == [ReportResult(exit_code=1)], "they have really failed"


@pytest.mark.parametrize("content", [{}, {"job": "x"}])
def test_damaged_record_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        job_record.parse(content)


# --- agents -----------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.hub.finish(0)
    for agent in fleet.agents.values():
        agent.kill()


def test_processes_of_agents_run_on_under_another_driver(fleet: Fleet) -> None:
    subprocess.run(["mkfifo", str(fleet.run / "fifo")], check=True)
    fleet.agent("a")
    fleet.start(0, "echo $$; read x < fifo; exit 6")
    fleet.start(1, "exit 3")
    fleet.wait_for_output(0, "\n")
    assert fleet.wait_for_exit(1) == 3
    old, codes = fleet.hub, dict[int, int]()
    fleet.new_hub(["false"])
    fleet.hub.adopt({"a": 2, "b": 1}, {0: "a", 1: "a", 2: "b"}, codes.__setitem__)
    old._call(lambda: [agent.channel.abort() for agent in old._agents.values() if agent.channel])
    fleet.hub.give_up_missing(3.0)
    assert codes == {1: 3, 2: 128 + 9}, "an exit code, and a process that no agent has"
    assert fleet.hub.find_available_hosts_and_slots() == {"a": 2}
    (fleet.run / "fifo").write_text("go\n")
    poll(lambda: 0 in codes, 10, "the end of a process of the first driver")
    assert codes[0] == 6


@pytest.mark.parametrize("well", [True, False])
def test_agent_with_a_slow_disk_is_waited_for_while_all_ranks_run(fleet: Fleet, well: bool) -> None:
    flag = fleet.run / "flag"
    fleet.agent("a")
    fleet.agent("b", env=fleet.slow_disk(flag, 4.0))
    for number, host in enumerate("ab"):
        fleet.start(number, "echo ready; exec sleep 600", host)
        fleet.wait_for_output(number, "ready")
    old, codes = fleet.hub, dict[int, int]()
    flag.touch()
    fleet.new_hub(["false"])
    fleet.hub.adopt({"a": 2, "b": 2}, {0: "a", 1: "b"}, codes.__setitem__)
    old._call(old._socket.close)
    old._call(lambda: [agent.channel.abort() for agent in old._agents.values() if agent.channel])
    fleet.hub.give_up_missing(2.0, 60.0, lambda: well)
    assert codes == ({} if well else {1: 128 + 9})
    assert {*fleet.hub.find_available_hosts_and_slots()} == ({"a", "b"} if well else {"a"})


def test_signal_that_no_driver_has_handled_reaches_the_next_one(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.hub.set_order(["a"])
    fleet.start(0, "echo $$; exec sleep 600")
    fleet.wait_for_output(0, "\n")
    old = fleet.hub
    old._call(old._socket.close)
    old._call(lambda: [agent.channel.abort() for agent in old._agents.values() if agent.channel])
    time.sleep(0.5)
    fleet.pid("a", "hvdtrain-agent").send_signal(signal.SIGUSR1)
    time.sleep(1)
    assert fleet.agents["a"].poll() is None and not fleet.signals
    fleet.new_hub(["false"])
    poll(lambda: fleet.signals == [("a", signal.SIGUSR1)], 10, "the signal")
    found = fleet.hub._agents["a"].channel
    assert found is not None
    fleet.hub._call(found.abort)
    poll(lambda: fleet.hub._agents["a"].channel not in (None, found), 10, "a connection")
    assert fleet.signals == [("a", signal.SIGUSR1)], "one signal was taken for two"


def test_agents_that_return_one_by_one_keep_their_processes(fleet: Fleet) -> None:
    codes = dict[int, int]()
    fleet.hub.adopt({"a": 1, "b": 1}, {0: "c"}, codes.__setitem__)
    waiter = threading.Thread(target=fleet.hub.give_up_missing, args=(3.0,))
    began = time.monotonic()
    waiter.start()
    time.sleep(1.5)
    fleet.agent("a")
    registered = time.monotonic() - began
    waiter.join(20)
    assert time.monotonic() - began > registered + 2, "it did not wait again after an agent"
    assert codes == {0: 128 + 9} and fleet.hub.lost_hosts


# --- lease and address ------------------------------------------------------------------------

LEASE = """
import sys, time
from pathlib import Path
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.ownership import Ownership, TokenPace
owner = Ownership(Path(sys.argv[1]), ".launch.", pace=TokenPace(0.1, 1.0, 1.0, True, 1.0))
owner.acquire(Claim.of_this_process())
assert owner.held()
print("held", flush=True)
time.sleep(30)
"""


def test_holder_of_a_lease_exits_when_it_cannot_be_renewed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", LEASE, str(tmp_path / "run")]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stderr is not None
        assert holder.stdout.readline() == "held\n"
        token = tmp_path / "run" / ".launch.owner"
        began = time.monotonic()
        token.unlink()
        token.mkdir()
        assert holder.wait(10) == EXIT_PREEMPTED
        assert 0.5 < time.monotonic() - began < 5
        assert "could not be renewed" in holder.stderr.read()


SLOW_LEASE = """
import sys, time
from pathlib import Path
from hvdtrain.run_files import ownership
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.ownership import Ownership, TokenPace
def slow(path, read=ownership.read):
    time.sleep(0.6)
    return read(path)
ownership.read = slow
owner = Ownership(Path(sys.argv[1]), ".launch.", pace=TokenPace(0.1, 3.0, 3.0, True, 3.0))
owner.acquire(Claim.of_this_process())
while owner._mine.beats < 9:
    time.sleep(0.1)
assert not owner.held(), "it must not act on what it knew before"
"""


def test_holder_of_a_lease_survives_a_slow_disk(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SLOW_LEASE, str(tmp_path / "run")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_process_follows_the_driver_file_when_its_driver_is_gone(tmp_path: Path) -> None:
    secret = driver_file.new_secret()
    with socket.create_server(("127.0.0.1", 0)) as old:
        place = "127.0.0.1", int(old.getsockname()[1])
        env = {FILE_VARIABLE: str(tmp_path / driver_file.NAME)}
        driver = DriverAddress(*place, env)
        driver_file.write(tmp_path, DriverFile(["127.0.0.1"], 1, secret, rendezvous=place[1]))
        assert driver.reachable() and not driver.follow()
    assert not driver.reachable()
    with socket.create_server(("127.0.0.1", 0)) as new:
        port = int(new.getsockname()[1])
        driver_file.write(tmp_path, DriverFile(["127.0.0.1"], 1, secret, rendezvous=port))
        assert driver.reachable() and driver.place == ("127.0.0.1", port)
        assert not DriverAddress(*place, {}).reachable(), "without agents no file is read"


def test_host_without_network_does_not_replace_a_driver_that_had_one(tmp_path: Path) -> None:
    """It would publish the address of its loopback, at which no other host reaches it."""
    driver_file.write(tmp_path, DriverFile(["10.0.0.1", "127.0.0.1"], 1, "00"))
    token = Token("owner", 1, 0, "host", 1, "boot", False)
    plan = AllocationRun(1, None, 1, 1.0, 60.0, ["true"], tmp_path)
    with (
        patch.object(allocation, "_addresses", return_value=["127.0.0.1"]),
        pytest.raises(UserError, match="no address that other hosts reach"),
    ):
        AllocationDriver(plan, 2, str(tmp_path)).take_over(token, 0.0)
    assert not (tmp_path / ".launch.owner").exists()


def test_address_that_a_host_gets_later_is_published_first() -> None:
    content = DriverFile(["127.0.0.1"], 1, "00")
    with patch.object(allocation, "_addresses", return_value=["10.0.0.1", "127.0.0.1"]):
        content = allocation._with_new_addresses(content)
    assert content.addresses == ["10.0.0.1", "127.0.0.1"]
    with patch.object(allocation, "_addresses", return_value=["127.0.0.1"]):
        assert allocation._with_new_addresses(content) == content, "its link is down for a moment"
