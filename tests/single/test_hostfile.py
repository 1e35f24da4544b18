"""Host lists from Open MPI hostfiles, the command line and Slurm's environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UserError
from hvdtrain.launch import mpi
from hvdtrain.launch.hostfile import (
    Host,
    as_text,
    first_slots,
    parse_hosts,
    read_hostfile,
    read_hosts,
    slurm_hosts,
    tasks_per_node,
    total_slots,
)
from tests.support.runs import environment

NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, unique=True)
HOSTS = NAMES.flatmap(
    lambda names: st.tuples(*(st.builds(Host, st.just(name), st.integers(1, 99)) for name in names))
)


def test_open_mpi_hostfile_syntax_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# two racks\n\nnode1 slots=8\nnode2  slots = 4 max_slots=8  # the old one\n"
        "node3:2\nnode4\nnode1 slots=1\n"
    )
    expected = [Host("node1", 9), Host("node2", 4), Host("node3", 2), Host("node4", 1)]
    assert read_hostfile(str(file)) == expected


def test_repository_hostfiles_are_readable() -> None:
    directory = Path(__file__).parents[2] / "hostfiles"
    assert read_hosts(hostfile=str(directory / "two-nodes")) == [Host("node1", 8), Host("node2", 8)]


@pytest.mark.parametrize("line", ["node1 slots=", "node1 slots=0", "node1 8", "-oProxyCommand=x:1"])
def test_invalid_hostfile_line_is_reported_with_line_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"node0 slots=1\n{line}\n")
    with pytest.raises(UserError, match=re.escape(f"{file}, line 2: {line}")):
        read_hostfile(str(file))


def test_unusable_hostfile_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("empty", "no host in it"),
        ("binary", "not a text file"),
        ("none", "No such file"),
    ):
        with pytest.raises(UserError, match=message):
            read_hostfile(str(tmp_path / name))


@given(HOSTS)
def test_host_list_round_trips_through_text(hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(as_text(hosts)) == list(hosts)


@pytest.mark.parametrize("text", ["", "a:8,", "a:b", "a:-1", "a b:2", "a:1:2"])
def test_invalid_host_list_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match="--hosts"):
        parse_hosts(text)


@given(HOSTS, st.integers(0, 500))
def test_first_slots_returns_leading_slots_up_to_limit(hosts: tuple[Host, ...], most: int) -> None:
    chosen = first_slots(hosts, most)
    assert total_slots(chosen) == min(most, total_slots(hosts))
    assert [host.name for host in chosen] == [host.name for host in hosts][: len(chosen)]
    assert all(0 < one.slots <= of.slots for one, of in zip(chosen, hosts, strict=False))
    assert chosen[:-1] == list(hosts)[: max(0, len(chosen) - 1)]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1))
def test_slurm_tasks_per_node_short_form_is_expanded(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in groups)
    assert tasks_per_node(text) == [tasks for tasks, nodes in groups for _ in range(nodes)]


def _scontrol(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (directory / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_slurm_hosts_match_job_nodes_and_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scontrol(tmp_path, monkeypatch, '[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3"')
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "8(x2),4"}
    assert slurm_hosts(job) == [Host("n1", 8), Host("n2", 8), Host("n3", 4)]
    with pytest.raises(UserError, match="3 nodes"):
        slurm_hosts(job | {"SLURM_TASKS_PER_NODE": "8(x2)"})
    with pytest.raises(UserError, match=r"8\(x2\),4 is expected"):
        slurm_hosts(job | {"SLURM_TASKS_PER_NODE": "many"})


def test_missing_slurm_job_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST is not set"):
        slurm_hosts({})
    _scontrol(tmp_path, monkeypatch, "echo no such job >&2; exit 1")
    with pytest.raises(UserError, match="no such job"):
        slurm_hosts({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "8"})


@pytest.mark.parametrize(
    ("tasks", "asked", "expected"),
    [
        ("8(x3)", "20", [7, 7, 6]),
        ("4(x3)", "3", [1, 1, 1]),
        ("8,2,8", "12", [5, 2, 5]),
        ("8(x2),4", "20", [8, 8, 4]),
        ("8(x2),4", "", [8, 8, 4]),
        ("2(x2)", "9", [2, 2]),
        ("999999999(x2)", "999999999", [500000000, 499999999]),
    ],
)
def test_slurm_hosts_have_no_more_tasks_than_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str, asked: str, expected: list[int]
) -> None:
    names = [f"n{number}" for number in range(len(expected))]
    _scontrol(tmp_path, monkeypatch, f"printf '%s\\n' {' '.join(names)}")
    job = {"SLURM_JOB_NODELIST": "n", "SLURM_TASKS_PER_NODE": tasks, "SLURM_NTASKS": asked}
    assert slurm_hosts(job) == [Host(*one) for one in zip(names, expected, strict=True)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("root@node1 slots=2", "~/.ssh/config"),
        ("node1 slots=2 port=22", "~/.ssh/config"),
        ("node1 username=root slots=2", "~/.ssh/config"),
        ("[::1]", "give the host's name"),
        ("fe80::1 slots=2", "give the host's name"),
        ("node1 slots=2 count=3", "a host and its slots are expected"),
    ],
)
def test_line_that_only_some_launchers_read_is_refused(
    tmp_path: Path, line: str, reason: str
) -> None:
    (tmp_path / "hosts").write_text(f"# comment\n{line}\n")
    with pytest.raises(UserError) as told:
        read_hostfile(str(tmp_path / "hosts"))
    assert reason in str(told.value) and f"line 2: {line}" in str(told.value)


def _lines(random: Random) -> list[str]:
    """Return the lines of a host file, each host with a number of slots or on several lines."""
    lines = []
    for number in range(random.randint(1, 5)):
        name, slots = f"node{number}", random.randint(1, 9)
        if random.random() < 0.3:
            lines += [name] * random.randint(2, 4)
            continue
        word = random.choice(["slots", "count", "cpu", "slots"])
        equals = random.choice(["=", " = ", "= "])
        parts = [f"{word}{equals}{slots}"]
        if random.random() < 0.4:
            limit = random.choice(["max_slots", "max-slots"])
            parts.insert(random.randint(0, 1), f"{limit}={slots + random.randint(0, 3)}")
        lines.append("\t ".join([name, *parts]) + random.choice(["", " # note", " // note", " "]))
    lines += random.choices(["", "# comment", "// comment", "   "], k=random.randint(0, 3))
    random.shuffle(lines)
    return lines


@pytest.mark.parametrize("seed", range(8))
def test_host_file_means_what_open_mpi_reads(tmp_path: Path, seed: int) -> None:
    if shutil.which("mpirun") is None or not mpi.of_launcher().version.startswith("4"):
        pytest.skip("no Open MPI 4, which shows its allocation for hosts that do not exist")
    file = tmp_path / "hosts"
    file.write_text("\n".join(_lines(Random(seed))) + "\n")
    ours = read_hostfile(str(file))
    options = ["--hostfile", str(file), "--do-not-launch", "--display-allocation", "--bind-to"]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, *options, "none", "-np", str(total_slots(ours)), "true"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    theirs = re.findall(r"Data for node: (\S+)\tNum slots: (\d+)", done.stdout)
    assert {tuple(host) for host in ours} == {(name, int(slots)) for name, slots in theirs}, done
