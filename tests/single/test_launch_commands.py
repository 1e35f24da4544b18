"""The horovodrun and mpirun command lines that start the ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdtrain.launch.commands import horovodrun, mpirun

COMMAND = ["python", "-m", "hvdtrain.train", "--seed", "1"]


def test_horovodrun_command_uses_current_environment() -> None:
    argv = horovodrun(16, COMMAND, hosts="node1:8,node2:8")
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    assert argv == [launcher, "--gloo", "-np", "16", "-H", "node1:8,node2:8", *COMMAND]
    assert "--mpi" in horovodrun(2, COMMAND, controller="mpi")
    with pytest.raises(ValueError, match="controller"):
        horovodrun(2, COMMAND, controller="nccl")


@pytest.mark.parametrize("root", [True, False])
def test_mpirun_allows_root_only_for_root_user(root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)
    assert ("--allow-run-as-root" in mpirun(2, COMMAND)) == root


def test_mpirun_oversubscribes_this_machine_but_no_listed_hosts() -> None:
    alone = mpirun(2, COMMAND)
    assert "--oversubscribe" in alone and alone[-len(COMMAND) :] == COMMAND
    listed = mpirun(16, COMMAND, hosts="node1:8,node2:8")
    assert "--oversubscribe" not in listed
    assert listed[listed.index("-H") + 1] == "node1:8,node2:8"
