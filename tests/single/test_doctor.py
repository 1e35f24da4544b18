"""Findings of the doctor from hosts' facts.

The facts include conditions that cannot be created on a test machine, such as clock skew, a file
system without locks, or a faulty GPU.
"""

from __future__ import annotations

import errno
import fcntl
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvdtrain import cli
from hvdtrain.doctor import collectives, host_checks, host_facts, hosts
from hvdtrain.doctor.collectives import Sum
from hvdtrain.doctor.findings import WARNING, Diagnosis, show
from hvdtrain.doctor.host_checks import Need
from hvdtrain.doctor.network import rounds
from hvdtrain.doctor.session import HostSession, together
from hvdtrain.launch.hostfile import parse_hosts

LIBRARIES = {"built": {"mpi": True, "gloo": True}, "cuda": None, "gpus": 0, "warning": ""}
GPU = {
    "name": "NVIDIA H200",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
}


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Return the facts of this machine, as if it were healthy."""
    found = host_facts.gather(["localhost"])
    disk = {"free": 10**12, "inodes": 1000, "failed": "", "locks": True}
    plenty = {"free_memory": 2**40, "cores": 64, "shm": {"total": 2**34, "free": 2**34}}
    return found | plenty | {"libraries": LIBRARIES, "disk": disk, "open_files": [65536, 65536]}


def _found(facts: dict[str, Any], slots: int = 2, **changed: Any) -> list[Diagnosis]:
    return host_checks.check_host("node1", facts | changed, Need(slots, slots, "/runs"))


def test_healthy_host_has_no_findings(facts: dict[str, Any]) -> None:
    assert _found(facts) == []
    assert _found(facts, gpus=[GPU] * 2, libraries=LIBRARIES | {"gpus": 2}) == []


@pytest.mark.parametrize(
    ("changed", "check", "says"),
    [
        ({"gpus": [GPU | {"clocks_throttle_reasons.hw_thermal_slowdown": "Active"}]}, "gpu",
         "its clock is throttled (hw_thermal_slowdown)"),
        ({"gpus": [GPU | {"pcie.link.width.current": "4"}]}, "gpu", "4 of 16 lanes"),
        ({"gpus": [{"failed": "No devices were found"}]}, "gpu", "No devices were found"),
        ({"gpus": [GPU], "libraries": LIBRARIES | {"gpus": 1}}, "gpu", "2 ranks for 1 GPU"),
        ({"libraries": LIBRARIES | {"warning": "The NVIDIA driver on your system is too old"}},
         "gpu", "driver on your system is too old"),
        ({"libraries": {"failed": "undefined symbol: _ZN2at"}}, "horovod", "undefined symbol"),
        ({"libraries": {"slow": 40}}, "horovod", "takes more than 40 s"),
        ({"shm": None}, "shm", "is missing"),
        ({"python": "3.9.2"}, "python", "Python 3.9.2"),
        ({"disk": {"free": 10**12, "inodes": 9, "failed": "", "locks": False}}, "locks",
         "no locks"),
        ({"disk": {"free": 0, "inodes": 0, "failed": "Disk quota exceeded", "locks": True}}, "disk",
         "Disk quota exceeded"),
        ({"locale": {"problem": "", "encoding": "ISO-8859-1"}}, "locale", "ISO-8859-1"),
    ],
)  # fmt: skip
def test_host_fault_is_reported_with_a_remedy(
    facts: dict[str, Any], changed: dict[str, Any], check: str, says: str
) -> None:
    (finding,) = _found(facts, **changed)
    assert finding.check == check and says in finding.what and finding.fix


def test_missing_horovod_is_reported_with_its_install_command(facts: dict[str, Any]) -> None:
    (finding,) = _found(facts, versions=facts["versions"] | {"horovod": None})
    assert "not installed" in finding.what and "horovod build --install" in finding.fix


def test_upstream_horovod_wheel_is_accepted(facts: dict[str, Any]) -> None:
    assert _found(facts, versions=facts["versions"] | {"horovod": "0.28.1"}) == []


def test_clock_offset_is_reported_only_beyond_its_uncertainty() -> None:
    offsets = {"node1": (0.0, 0.001), "node2": (-7.2, 0.01), "node3": (3.0, 2.9)}
    (finding,) = hosts.compare_clocks(offsets)
    assert finding.where == "node2" and "7.2 s behind" in finding.what


def test_file_system_without_locks_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert host_facts.directory(str(tmp_path / "new" / "runs"))["locks"]
    monkeypatch.setattr(fcntl, "flock", refuse)
    found = host_facts.directory(str(tmp_path / "new" / "runs"))
    assert not found["locks"] and not found["failed"]
    assert list(tmp_path.iterdir()) == []  # no files remain


def test_host_that_falls_silent_is_reported() -> None:
    session = HostSession("node2", here=True)
    try:
        assert session.start() and abs(session.ask("clock", 20) - time.time()) < 20
        assert list(hosts.check_answers("node2", session.failures)) == []
        assert together([session], lambda one: one.ask("reach", 20, address="", port=[])) == {}
        session.close()
        assert together([session], lambda one: one.ask("clock", 20)) == {}
    finally:
        session.close()
    (finding,) = hosts.check_answers("node2", session.failures)
    assert "reach: TypeError" in finding.what and "clock: " in finding.what


def test_internal_error_of_the_doctor_propagates() -> None:
    session = HostSession("node2", here=True)
    try:
        with pytest.raises(ZeroDivisionError):
            together([session], lambda one: 1 / 0)
    finally:
        session.close()


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_no_host_is_in_two_pairs_at_a_time(count: int) -> None:
    names = [f"node{n}" for n in range(count)]
    every = rounds(names)
    for pairs in every:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    met = [frozenset(pair) for pairs in every for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    assert len(every) == (count - 1 if count % 2 == 0 else count)


def test_slow_gpu_and_memory_are_compared_with_the_median_host() -> None:
    healthy = {"processor": 1e11, "memory": 2e10, "gpu 0": 7e14}
    speeds = {f"node{n}": dict(healthy) for n in range(4)}
    assert hosts.check_speeds(speeds) == []
    speeds["node3"] |= {"gpu 0": 3e14, "memory": 1e10}
    found = hosts.check_speeds(speeds)
    assert [one.where for one in found] == ["node3", "node3"]
    assert "gpu 0: 300 TFLOP/s, 43% of the median host" in found[0].what
    assert "memory: 10 GB/s, 50%" in found[1].what


def test_only_a_slow_all_reduce_is_reported() -> None:
    fast, slow = (Sum("mpi", 2, "a:1,b:1", seconds, 0.1) for seconds in (0.2, 1.5))
    assert collectives.check([fast, Sum("mpi", 2, "", 9.0, 0.0)]) == []
    (finding,) = collectives.check([slow])
    assert "take 1500 ms on 2 ranks" in finding.what and "bench allreduce" in finding.fix


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("", 1, [(2, "")]),
        ("a:1,b:1", 2, [(2, "a:1,b:1")]),
        ("a:8,b:8", 12, [(2, "a:1,b:1"), (12, "a:8,b:4")]),
        ("a:4", 4, [(4, "a:4")]),
        ("a:1", 1, []),
    ],
)
def test_all_reduce_plan_selects_the_expected_ranks(
    text: str, ranks: int, expected: object
) -> None:
    assert collectives.plan(parse_hosts(text) if text else [], ranks) == expected


def test_remedy_can_be_copied_from_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    mend = "printf 'x' && " + "true && " * 30 + "[red]true"
    finding = Diagnosis("ports", "a -> b", "closed", "it hangs", mend)
    show([finding], ["a note"], Console(width=60, color_system=None))
    shown = capsys.readouterr().out
    assert mend in shown and "1 error, 0 warnings" in shown and "it hangs" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs/a", "--np", "2"], "are for checks of hosts"),
        (["runs/a"], "is not a run directory"),
        (["--hosts", "a:1", "--np", "2"], "the hosts have 1 slots together"),
        (["--", "--run.rot", "x"], "run.rot"),
    ],
)
def test_invalid_command_line_exits_with_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("severity", "code"), [(None, 0), (WARNING, 0), ("error", 1)])
def test_only_errors_exit_with_1(
    severity: str | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hvdtrain.doctor import examine

    found = [Diagnosis("disk", "a", "full", "why", "mend", severity)] if severity else []
    monkeypatch.setattr(examine, "examine", lambda request: examine.Examination(found))
    assert cli.main(["doctor", "--format", "json"]) == code
    content = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in content["findings"]] == ["disk"] * len(found)
