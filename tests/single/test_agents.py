"""Real agents with real processes, and the driver's side of them (agent/hub.py)."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import psutil
import pytest

from hvdtrain.agent import agent, driver_file, protocol
from hvdtrain.agent.agent import Agent, AgentSettings
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.agent.protocol import Channel
from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.run_files import owner_token
from tests.support.fleet import SECONDS, Fleet
from tests.support.job import has_ended, poll, running_children
from tests.support.runs import REPOSITORY


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def _forks(seconds: int = 600) -> str:
    """A script that leaves processes behind: a child, and one in a session of its own."""
    detached = f"setsid sh -c 'echo $$; touch $0; exec sleep {seconds}' started.$$ &"
    return f"sleep {seconds} & echo $!; {detached} until [ -e started.$$ ]; do sleep 0.02; done; "


def test_agent_starts_and_reports_processes_of_its_host(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.agent("b", slots=1)
    assert fleet.hub.find_available_hosts_and_slots() == {"a": 2, "b": 1}
    fleet.start(0, "echo $HOROVOD_RENDEZVOUS_SECRET $ADDRESS; pwd; echo problem >&2; exit 3")
    fleet.start(1, "kill -9 $$", host="b")
    assert fleet.wait_for_exit(0) == 3
    assert fleet.wait_for_exit(1) == 128 + 9
    secret, address, directory = fleet.output[0, "stdout"].split()
    assert len(secret) == 64 and secret != fleet.secret, "derived from the job's secret"
    assert (address, directory) == ("127.0.0.1", str(fleet.run))
    assert fleet.output[0, "stderr"] == "problem\n"


def test_rank_has_a_session_of_its_own_and_no_variables_of_the_task(fleet: Fleet) -> None:
    fleet.agent("a", env={"PMI_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OTHER": "kept"})
    fleet.start(0, "echo $$ $(ps -o sid= -p $$); env; trap; set -- /proc/$$/fd/*; echo $#")
    fleet.wait_for_exit(0)
    lines = fleet.output[0, "stdout"].splitlines()
    assert len(set(lines[0].split())) == 1
    assert "OTHER=kept" in lines
    assert not [line for line in lines if line.startswith(("PMI_", "OMPI_COMM_WORLD_"))]
    assert int(lines[-1]) <= 4, "descriptors of the agent"


def test_program_that_cannot_be_started_ends_with_127(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.hub._command = [["/no/such/program"]]
    fleet.agent("a")
    fleet.start(0, "")
    assert fleet.wait_for_exit(0) == 127
    assert "/no/such/program cannot be started: No such file" in fleet.output[0, "stderr"]
    fleet.close()


def test_long_command_arrives_complete(fleet: Fleet) -> None:
    words = [f"{'é' * 30}{number}" for number in range(16_000)]  # as of a glob of many files
    fleet.hub.finish(0)
    fleet.new_hub(["sh", "-c", "echo $#; shift 15999; echo $1", "sh", *words])
    fleet.agent("a")
    fleet.start(0, "")
    assert fleet.wait_for_exit(0) == 0
    assert fleet.output[0, "stdout"] == f"16000\n{words[-1]}\n"


def test_all_output_arrives_before_the_exit_code(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, "seq 100000; printf 'no newline'; printf '\\377' >&2")
    fleet.wait_for_exit(0)
    lines = fleet.output[0, "stdout"].split("\n")
    assert lines == [*map(str, range(1, 100001)), "no newline"]
    assert fleet.output[0, "stderr"] == "\ufffd"


def test_end_is_sigterm_then_sigkill(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, "trap 'echo saved; exit 75' TERM; echo ready; while :; do sleep 0.05; done")
    fleet.start(1, "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    for number in (0, 1):
        fleet.wait_for_output(number, "ready")
    began = time.monotonic()
    fleet.hub.end_all()
    assert fleet.wait_for_exit(0) == 75
    assert "saved" in fleet.output[0, "stdout"]
    assert fleet.wait_for_exit(1) == 128 + 9
    assert 4 < time.monotonic() - began < 9


def test_nothing_outlives_a_rank(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, _forks() + "exit 0")
    fleet.start(1, "sleep 600 & echo $!; wait")
    assert fleet.wait_for_exit(0) == 0
    left = [int(pid) for pid in fleet.output[0, "stdout"].split()]
    assert len(left) == 2
    poll(lambda: all(has_ended(pid) for pid in left), SECONDS, f"the end of {left}")
    other = int(fleet.wait_for_output(1, "\n"))
    assert not has_ended(other), "a process of another rank was killed"


def test_nothing_outlives_a_killed_agent_and_another_one_starts(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, "echo $$; " + _forks() + "trap '' TERM HUP; wait")
    fleet.wait_for_output(0, "\n")
    poll(lambda: fleet.output[0, "stdout"].count("\n") == 3, SECONDS, "three processes")
    began = time.monotonic()
    fleet.pid("a", "hvdtrain-agent").kill()
    assert fleet.wait_for_exit(0) == 128 + 9
    assert time.monotonic() - began < 1.5
    left = [int(pid) for pid in fleet.output[0, "stdout"].split()]
    poll(lambda: all(has_ended(pid) for pid in left), SECONDS, f"the end of {left}")
    assert fleet.hub.wait_for(lambda hosts: "a" in hosts, SECONDS)
    fleet.start(1, "exit 4")
    assert fleet.wait_for_exit(1) == 4


def test_nothing_outlives_a_killed_guard(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, "echo $$; " + _forks() + "trap '' TERM HUP; wait")
    poll(lambda: fleet.output.get((0, "stdout"), "").count("\n") == 3, SECONDS, "processes")
    fleet.pid("a", "hvdtrain-guard").kill()
    assert fleet.wait_for_exit(0) == 128 + 9
    left = [int(pid) for pid in fleet.output[0, "stdout"].split()]
    poll(lambda: all(has_ended(pid) for pid in left), SECONDS, f"the end of {left}")


def test_end_of_a_rank_is_reported_although_its_guard_was_stopped(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, "echo $$; exec sleep 600")
    rank = int(fleet.wait_for_output(0, "\n"))
    fleet.pid("a", "hvdtrain-guard").suspend()
    os.kill(rank, signal.SIGKILL)
    assert fleet.wait_for_exit(0) == 137


def test_processes_survive_a_broken_connection(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, "echo ready; read line < $PIPE; echo after; exit 5".replace(
        "$PIPE", str(fleet.run / "pipe")))  # fmt: skip
    os.mkfifo(fleet.run / "pipe")
    fleet.wait_for_output(0, "ready")
    before = fleet.hub._agents["a"].channel
    assert before is not None
    fleet.hub._call(before.abort)
    poll(lambda: fleet.hub._agents["a"].channel not in (None, before), SECONDS, "a connection")
    assert 0 not in fleet.codes
    (fleet.run / "pipe").write_text("\n")
    assert fleet.wait_for_exit(0) == 5
    assert fleet.output[0, "stdout"] == "ready\nafter\n"
    assert not fleet.said


def test_broken_connection_returns_without_a_look_at_a_slow_disk(fleet: Fleet) -> None:
    flag = fleet.run / "flag"
    fleet.agent("a", env=fleet.slow_disk(flag, 4.0))
    fleet.start(0, "echo ready; exec sleep 600")
    fleet.wait_for_output(0, "ready")
    flag.touch()
    before = fleet.hub._agents["a"].channel
    assert before is not None
    fleet.hub._call(before.abort)
    poll(lambda: fleet.hub._agents["a"].channel not in (None, before), SECONDS, "a connection")
    assert 0 not in fleet.codes and not fleet.said


def test_stopped_agent_loses_its_host_and_ends_old_processes_on_return(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, "echo $$; exec sleep 600")
    rank = int(fleet.wait_for_output(0, "\n"))
    agent = fleet.pid("a", "hvdtrain-agent")
    agent.suspend()
    assert fleet.wait_for_exit(0) == 128 + 9
    assert fleet.hub.find_available_hosts_and_slots() == {}
    assert re.search(r"no message for \d+\.\d\d s\); its 1 rank is lost", str(fleet.said))
    agent.resume()
    assert fleet.hub.wait_for(lambda hosts: "a" in hosts, SECONDS)
    assert has_ended(rank), "the slot was offered while its old process existed"


_LISTENS = """exec python -uc "
import os, socket
agent = socket.socket(socket.AF_UNIX)
agent.connect(chr(0) + os.environ['HVDTRAIN_AGENT'])
agent.send(b'r')
print('ready')
while lines := agent.recv(100):
    print('over', int(lines))
" """


def test_ranks_are_notified_of_generations_that_are_over(fleet: Fleet) -> None:
    path = {"PATH": os.environ["PATH"]}
    fleet.agent("a", env=path)
    fleet.agent("b", env=path)
    fleet.start(0, _LISTENS)
    fleet.start(1, _LISTENS, host="b")
    for number in (0, 1):
        fleet.wait_for_output(number, "ready")
    fleet.hub.end_generation(3)
    for number in (0, 1):
        fleet.wait_for_output(number, "over 3")
    away = fleet.hub._agents["b"].channel
    assert away is not None
    fleet.hub._call(away.abort)
    fleet.hub.end_generation(4)  # lost with the connection
    for number in (0, 1):
        fleet.wait_for_output(number, "over 4")
    fleet.start(2, _LISTENS, host="b")
    fleet.wait_for_output(2, "over 4")


def test_rank_has_the_limit_of_open_files_that_its_agent_had_at_first(fleet: Fleet) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        fleet.agent("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert fleet.pid("a", "hvdtrain-agent").rlimit(psutil.RLIMIT_NOFILE)[0] > 500
    fleet.start(0, "ulimit -Sn")
    assert fleet.wait_for_exit(0) == 0
    assert fleet.output[0, "stdout"] == "500\n"


_WATCHES = """exec python -uc "
import os
from hvdtrain.agent.protocol import WATCHDOG, connect_to_agent
agent = connect_to_agent(WATCHDOG)
print(os.getpid())
agent.recv(1)
" """


def test_watchdog_that_was_stopped_is_continued(fleet: Fleet) -> None:
    fleet.agent("a", env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)})
    fleet.start(0, _WATCHES)
    watchdog = psutil.Process(int(fleet.wait_for_output(0, "\n")))
    watchdog.suspend()
    poll(lambda: watchdog.status() != psutil.STATUS_STOPPED, SECONDS, "its continuation")


def test_silence_without_a_witness_may_show_an_isolated_driver(fleet: Fleet) -> None:
    responding: list[set[str]] = []
    fleet.hub.on_isolation = lambda hosts: responding.append(set(hosts))
    for number, host in enumerate("abc"):
        fleet.agent(host)
        fleet.start(number, "echo ready; exec sleep 600", host=host)
        fleet.wait_for_output(number, "ready")
    agent = fleet.pid("b", "hvdtrain-agent")
    agent.suspend()
    assert fleet.wait_for_exit(1) == 128 + 9
    assert responding == [{"a", "c"}]
    agent.resume()
    assert fleet.hub.wait_for(lambda hosts: "b" in hosts, SECONDS)
    turns = fleet.hub._agents["a"].channel
    assert turns is not None
    with patch.object(turns, "send") as send:
        fleet.hub.postpone({"a"})
    sent = [call.args[0] for call in send.call_args_list]  # heartbeats, too
    (turn,) = [one["turn"] for one in sent if one["type"] == "turn"]
    assert turn > len(fleet.agents)


@pytest.mark.alone
def test_silent_host_is_given_up_early_if_another_one_confirms_it(fleet: Fleet) -> None:
    silences: list[tuple[int, ...]] = []
    fleet.hub.on_silence = lambda numbers, why: silences.append(tuple(numbers))
    for host in "ab":
        fleet.agent(host)
    for number, host in enumerate("aab"):
        fleet.start(number, "echo ready; exec sleep 600", host=host)
        fleet.wait_for_output(number, "ready")
    fleet.hub.set_witnesses(set("ab"))
    time.sleep(3)
    assert not silences
    agent = fleet.pid("a", "hvdtrain-agent")
    agent.suspend()
    began = time.monotonic()
    assert fleet.wait_for_exit(0) == fleet.wait_for_exit(1) == 128 + 9
    assert 0.7 < time.monotonic() - began < 2.5
    assert silences == [(0, 1)]
    assert re.search(r"no message for 1.* bound 1.*; its 2 ranks are lost", str(fleet.said))
    assert 2 not in fleet.codes
    agent.resume()
    assert fleet.hub.wait_for(lambda hosts: "a" in hosts, SECONDS)


def test_agent_without_driver_ends_its_ranks_and_exits_with_75(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, timeout=1)
    fleet.agent("a")
    fleet.start(0, "trap 'touch saved; exit 75' TERM; echo ready; while :; do sleep 0.05; done")
    fleet.wait_for_output(0, "ready")
    began = time.monotonic()
    fleet.hub._call(time.sleep, 12)  # it serves no agent meanwhile
    assert fleet.exit_code("a") == 75
    assert 3 < time.monotonic() - began < 12
    assert (tmp_path / "saved").exists()
    stderr = fleet.agents["a"].stderr
    assert stderr is not None and "has been away for 1 s" in stderr.read()


def test_agent_without_driver_waits_for_its_directory(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, timeout=1)
    fleet.agent("a")
    fleet.start(0, "echo ready; exec sleep 600")
    fleet.wait_for_output(0, "ready")
    token = tmp_path / f"{owner_token.LAUNCH}owner"
    token.mkdir()  # no driver can write it
    held = threading.Event()
    fleet.hub._call(held.wait, 60)  # it serves no agent meanwhile
    time.sleep(8)  # to notice the silence takes 3 s
    assert fleet.agents["a"].poll() is None
    token.rmdir()
    assert fleet.exit_code("a") == EXIT_PREEMPTED
    held.set()
    stderr = fleet.agents["a"].stderr
    text = "" if stderr is None else stderr.read()
    assert text.count("cannot be written (Is a directory)") == 1, text
    assert text.index("can be written again") < text.index("has been away for 1 s"), text


def test_agents_look_at_the_directory_seldom(tmp_path: Path) -> None:
    async def looks() -> int:
        found = Agent(AgentSettings(tmp_path, "a", 1, 600.0, {}))
        found._ever = True
        watching = asyncio.create_task(found._watch_directory(tmp_path))
        await asyncio.sleep(0.5)
        watching.cancel()
        return obstacle.call_count

    with (
        patch.object(agent, "_LOOK_SECONDS", 0.01),
        patch.object(owner_token, "obstacle", return_value="") as obstacle,
    ):
        assert asyncio.run(looks()) <= 1


def test_agent_accepted_while_it_gives_up_gives_up_again_later() -> None:
    settings = AgentSettings(None, "a", 1, 0.1, {}, DriverFile(["127.0.0.1"], 1, "00"))

    async def give_up() -> None:
        agent = Agent(settings)
        agent._code = asyncio.get_running_loop().create_future()
        agent._ever, agent._timeout, agent._away = True, 0.1, 1.0
        agent._channel = cast("Channel", object())  # of a driver that has just accepted it
        agent._giving_up = asyncio.create_task(agent._give_up())
        await agent._giving_up
        assert not agent._code.done()
        agent._channel = None
        watching = asyncio.create_task(agent._watch())
        assert await asyncio.wait_for(agent._code, SECONDS) == EXIT_PREEMPTED
        watching.cancel()

    asyncio.run(give_up())


@pytest.mark.filterwarnings("ignore:Exception in thread agents")
def test_agents_move_to_a_driver_that_replaces_theirs(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.start(0, "echo $$; exec sleep 600")
    rank = int(fleet.wait_for_output(0, "\n"))
    first = fleet.hub
    fleet.new_hub(["true"])
    assert not fleet.hub.wait_for(lambda hosts: "a" in hosts, 0.5), "it left a driver that serves"
    first._call(first._socket.close)
    first._loop.call_soon_threadsafe(first._loop.stop)
    assert fleet.hub.wait_for(lambda hosts: "a" in hosts, SECONDS)
    assert has_ended(rank), "the new driver does not know it"


def test_all_agents_exit_with_the_code_of_the_job(fleet: Fleet) -> None:
    fleet.agent("a")
    fleet.agent("b")
    fleet.start(0, "echo $$; exec sleep 600", host="b")
    rank = int(fleet.wait_for_output(0, "\n"))
    fleet.hub.finish(3)
    assert [fleet.exit_code(host) for host in "ab"] == [3, 3]
    assert has_ended(rank)


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("hvdtrain-keeper", signal.SIGUSR1),
        ("hvdtrain-agent", signal.SIGUSR1),
        ("hvdtrain-keeper", signal.SIGUSR2),
        ("hvdtrain-agent", signal.SIGHUP),
    ],
)
def test_signal_to_an_agent_reaches_the_driver_once(
    fleet: Fleet, target: str, number: signal.Signals
) -> None:
    fleet.agent("a")
    fleet.start(0, "echo; exec sleep 600")
    fleet.wait_for_output(0, "\n")  # it has the driver's answer
    for _ in range(2):  # a batch system sends them in pairs
        fleet.pid("a", target).send_signal(number)
    poll(lambda: bool(fleet.signals), SECONDS, "the signal")
    time.sleep(0.2)
    assert fleet.signals == [("a", number)]


def test_sigterm_to_an_agent_without_a_launcher_makes_its_host_leave(fleet: Fleet) -> None:
    left: list[tuple[str, tuple[int, ...]]] = []
    fleet.hub.on_leave = lambda host, processes: left.append((host, tuple(processes)))
    fleet.agent("a")
    fleet.start(0, "echo $$; exec sleep 600")
    fleet.wait_for_output(0, "\n")
    fleet.pid("a", "hvdtrain-keeper").send_signal(signal.SIGTERM)
    poll(lambda: left == [("a", (0,))], SECONDS, f"the agent leaves: {left}")
    assert fleet.agents["a"].poll() is None, "its rank has not ended"
    fleet.hub.end(0)
    assert fleet.exit_code("a") == EXIT_PREEMPTED
    assert not fleet.signals


def test_sigterm_to_an_agent_of_a_launcher_reaches_the_driver(fleet: Fleet) -> None:
    fleet.agent("a", env={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    fleet.start(0, "echo; exec sleep 600")
    fleet.wait_for_output(0, "\n")
    fleet.pid("a", "hvdtrain-keeper").send_signal(signal.SIGTERM)
    poll(lambda: fleet.signals == [("a", signal.SIGTERM)], SECONDS, f"the signal: {fleet.signals}")


@pytest.mark.parametrize(
    ("number", "accepts", "expected"),
    [
        (signal.SIGUSR1, True, {"type": "signal", "number": signal.SIGUSR1}),
        (signal.SIGTERM, True, {"type": "leave"}),
        (signal.SIGUSR1, False, EXIT_PREEMPTED),
    ],
)
def test_signal_before_the_drivers_answer_takes_effect_after_it(
    tmp_path: Path, number: signal.Signals, accepts: bool, expected: object
) -> None:
    secret, done = driver_file.new_secret(), asyncio.Event()
    received: list[protocol.Message] = []

    async def drive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            channel = await protocol.accept(reader, writer, bytes.fromhex(secret))
            await channel.receive()
            (process,) = running_children(lambda p: p.name() == "hvdtrain-agent", agent.pid)
            process.send_signal(number)
            await asyncio.sleep(0.5)
            if accepts:
                channel.send({"type": "welcome", "driver_timeout": 30})
            else:
                channel.send({"type": "refuse", "reason": "not now", "final": False})
            while not received:
                message = await channel.receive()
                received.extend([message] if message["type"] != "beat" else [])
        done.set()

    async def serve() -> int:
        nonlocal agent
        server = await asyncio.start_server(drive, "127.0.0.1", 0)
        driver_file.write(
            tmp_path, DriverFile(["127.0.0.1"], server.sockets[0].getsockname()[1], secret)
        )
        argv = [sys.executable, "-m", "hvdtrain.cli", "agent", "--run", str(tmp_path)]
        agent = subprocess.Popen([*argv, "--host", "a"], stderr=subprocess.DEVNULL)
        try:
            await asyncio.wait_for(done.wait(), SECONDS)
            agent.send_signal(signal.SIGINT)
            return await asyncio.to_thread(agent.wait, SECONDS)
        finally:
            agent.kill()

    agent: subprocess.Popen[bytes]
    code = asyncio.run(serve())
    assert (received[0] if accepts else code) == expected, received


def _squeue(directory: Path, left: str) -> dict[str, str]:
    """The environment of a Slurm job that has this time left, as squeue shows it."""
    squeue = directory / "bin/squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\necho 7 {left}\n")
    squeue.chmod(0o755)
    return {"SLURM_JOB_ID": "7", "PATH": f"{squeue.parent}:{os.environ['PATH']}"}


def test_lent_host_leaves_before_the_end_of_its_job(fleet: Fleet, tmp_path: Path) -> None:
    left: list[tuple[str, tuple[int, ...]]] = []
    fleet.hub.on_leave = lambda host, processes: left.append((host, tuple(processes)))
    line = '{"step": 1, "step_seconds": 20.0}\n'
    (fleet.run / "metrics.jsonl").write_text(line)  # two such steps: 40 s
    fleet.agent("a", env=_squeue(tmp_path, "0:44"), guest=True)
    fleet.start(0, "echo $HVDTRAIN_BORROWED; exec sleep 600")
    assert float(fleet.wait_for_output(0, "\n")) == pytest.approx(time.time(), abs=60)
    poll(lambda: left == [("a", (0,))], SECONDS, f"the agent leaves: {left}")
    fleet.hub.end(0)
    assert fleet.exit_code("a") == EXIT_PREEMPTED
    stderr = fleet.agents["a"].stderr
    assert stderr is not None and "job 7 ends in 40 s" in stderr.read()


def test_lent_host_without_ranks_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.agent.agent._UNUSED_SECONDS", 0.5)
    monkeypatch.setattr("hvdtrain.agent.agent.seconds_left", lambda job: None)
    settings = AgentSettings(Path("/none"), "a", 1, 0.1, {}, guest=True, job="7")

    async def leave() -> list[int]:
        agent, signals = Agent(settings), list[int]()
        agent._ever = True
        monkeypatch.setattr(agent, "_on_signal", signals.append)
        await asyncio.wait_for(agent._leave_before_end(Path("/none"), "7"), SECONDS)
        return signals

    assert asyncio.run(leave()) == [signal.SIGTERM]


def test_guest_of_another_slurm_step_joins_and_leaves_alone(fleet: Fleet) -> None:
    content = driver_file.read(fleet.run)
    assert content is not None
    driver_file.write(fleet.run, replace(content, launch="slurm-5.0.0"))
    left: list[str] = []
    fleet.hub.on_leave = lambda host, processes: left.append(host)
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    fleet.agent("a", env=step, guest=True)
    fleet.pid("a", "hvdtrain-keeper").send_signal(signal.SIGTERM)
    assert fleet.exit_code("a") == EXIT_PREEMPTED
    assert left == ["a"] and not fleet.signals


def test_second_agent_of_a_host_is_refused(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.agent.hub._SAME_HOST_SECONDS", 0.1)
    fleet.agent("a")
    argv = [sys.executable, "-m", "hvdtrain.cli", "agent", "--run", str(fleet.run)]
    done = subprocess.run([*argv, "--host", "a"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert "a already has an agent; start one per host" in done.stderr
    assert fleet.hub.find_available_hosts_and_slots() == {"a": 2}


def test_agent_without_any_driver_ends_after_wait(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hvdtrain.cli", "agent", "--run", str(tmp_path)]
    done = subprocess.run([*argv, "--wait", "0.5"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert "no driver" in done.stderr and "--wait" in done.stderr


def test_late_agent_of_an_ended_launch_exits_with_the_code_of_the_job(tmp_path: Path) -> None:
    content = DriverFile(["127.0.0.1"], 1, "", "slurm-7.0.0", exit_code=75)
    driver_file.write(tmp_path, content)
    argv = [sys.executable, "-m", "hvdtrain.cli", "agent", "--task", "--run", str(tmp_path)]

    def exit_code(step: str) -> int:
        env = os.environ | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step}
        command = [*argv, "--wait", "0.5"]
        return subprocess.run(command, capture_output=True, timeout=SECONDS, env=env).returncode

    assert exit_code("0") == 75
    assert exit_code("1") == 1, "another step waits for its own driver"


def test_agent_imports_neither_torch_nor_horovod() -> None:
    modules = "hvdtrain.cli, hvdtrain.commands.agent, hvdtrain.agent.agent, hvdtrain.agent.host"
    heavy = ("torch", "horovod", "yaml", "numpy", "jsonargparse")
    show = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done
