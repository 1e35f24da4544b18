"""Horovod's patches: series, headers, the table of their tests, and tests of single patches."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from horovod.runner import mpi_run
from horovod.runner.util.network import get_driver_ip

from hvdtrain.errors import UserError
from hvdtrain.horovod_wheel import build, recipe
from hvdtrain.horovod_wheel.process import BuildError
from hvdtrain.launch.commands import horovodrun
from tests.support.runs import REPOSITORY, environment

DOCS = REPOSITORY / "docs" / "horovod-build.md"
# Patches whose effect no test on two CPUs shows: it needs GPUs, or is a duration only.
UNTESTED = {"0015-gloo-yields", "0023-mpi-ring", "0028-gloo-loop-sleeps", "0034-libcuda"}


def test_series_names_every_patch_once_in_the_order_of_their_numbers() -> None:
    assert recipe.patches() == sorted(recipe.PATCHES.glob("*.patch"))
    numbers = [int(patch.name[:4]) for patch in recipe.patches()]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("patch", recipe.patches(), ids=lambda patch: patch.stem)
def test_patch_has_a_dep_3_header(patch: Path) -> None:
    header, separator, _ = patch.read_text().partition("\n---\n--- ")
    assert separator, "the header ends with a line of three dashes"
    assert not re.findall(r"^(?! |[A-Z][A-Za-z-]+: \S)", header, re.M), "fields and their text"
    fields = dict(re.findall(r"^([A-Z][A-Za-z-]+): ((?:.|\n )+)", header, re.M))
    assert {"Description", "Origin", "Forwarded", "Last-Update"} <= fields.keys()
    assert len(fields["Description"]) > 60, "it gives a reason"
    assert fields["Origin"] == "vendor" and re.match(r"no$|https://", fields["Forwarded"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", fields["Last-Update"])


def test_documentation_names_a_test_for_each_patch() -> None:
    rows = re.findall(r"^\| `(\d{4}-[\w-]+)` \|.*\| (.+) \|$", DOCS.read_text(), re.M)
    assert [name for name, _ in rows] == [patch.stem for patch in recipe.patches()]
    for name, cell in rows:
        tests = re.findall(r"`(tests/\S+\.py)::(\w+)`", cell)
        assert bool(tests) == (name not in UNTESTED), name
        for file, test in tests:
            tree = ast.parse((REPOSITORY / file).read_text())
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_driver_uses_the_first_named_interface_that_exists() -> None:
    assert get_driver_ip(["absent0", "lo"]) == "127.0.0.1"
    with pytest.raises(SystemExit) as ended:
        get_driver_ip(["absent0", "absent1"])
    message = str(ended.value)
    assert "absent0, absent1" in message and "\n" not in message


@pytest.mark.parametrize(
    ("banner", "expected"),
    [
        ("mpirun (Open MPI) 5.0.8", ("--prtemca", "OpenMPI", ["--bind-to none", "--map-by slot"])),
        ("mpirun (Open MPI) 4.1.4", ("--mca", "OpenMPI", ["--bind-to none", "--map-by slot"])),
        ("HYDRA build details:\n    Version: 4.0.2", ("", "MPICH", ["-bind-to none"])),
        ("Intel(R) MPI Library, Version 2021.17", ("", "IntelMPI", ["-genv I_MPI_PIN 0"])),
    ],
)
def test_horovodrun_uses_the_options_of_the_installed_mpi(
    tmp_path: Path, banner: str, expected: tuple[str, str, list[str]]
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\ncat <<END\n{banner}\nEND\n")
    mpirun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    option, name, binding = expected
    _, found, implementation = mpi_run._get_mpi_implementation_flags(False, env)
    assert (implementation, found) == (name, binding)
    assert not option or mpi_run._launcher_parameters(env)[0] == option


def test_horovodrun_names_a_host_that_ssh_does_not_reach() -> None:
    command = horovodrun(1, [sys.executable, "-c", "1"], "nosuchhost.invalid:1")
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ssh not successful for host nosuchhost.invalid" in done.stdout
    assert done.stderr == "horovodrun: could not connect to some hosts via ssh\n"


# The first getpeername() of rank 1's event loop finds that the other side has left.
LEFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef int Original(int, struct sockaddr *, socklen_t *);

int getpeername(int fd, struct sockaddr *address, socklen_t *length) {
  static int calls;
  const char *rank = getenv("HOROVOD_RANK");
  if (rank && rank[0] == '1' && syscall(SYS_gettid) != getpid() && !calls++) {
    errno = ENOTCONN;
    return -1;
  }
  return ((Original *)dlsym(RTLD_NEXT, "getpeername"))(fd, address, length);
}
"""
INIT = """
import horovod.torch as hvd
try:
    hvd.init()
except ValueError:
    print("init failed", flush=True)
"""


def test_connection_that_is_gone_at_once_fails_init_alone(tmp_path: Path) -> None:
    (tmp_path / "left.c").write_text(LEFT)
    library = tmp_path / "left.so"
    compiler = ["cc", "-shared", "-fPIC", f"-o{library}", str(tmp_path / "left.c"), "-ldl"]
    subprocess.run(compiler, check=True)
    preload = ["env", f"LD_PRELOAD={library}", "HOROVOD_GLOO_TIMEOUT_SECONDS=20"]
    command = horovodrun(2, [*preload, sys.executable, "-c", INIT])
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("init failed") == 2


IDLE = """
import time
import horovod.torch as hvd
hvd.init()
begin = time.process_time()
time.sleep(0.5)
print("used", time.process_time() - begin)
"""


@pytest.mark.slow
def test_idle_rank_that_writes_a_timeline_uses_no_processor() -> None:
    settings = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_CONTROLLER": "gloo"}
    env = environment({**settings, "HOROVOD_CPU_OPERATIONS": "gloo"})
    done = subprocess.run(
        [sys.executable, "-c", IDLE], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.25


def test_source_is_not_written_over_other_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match=f"{place} is not an empty directory: name a new one"):
            build.write_source(place)


def test_failed_download_of_the_source_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BuildError, match=r"cannot download horovod 0\.28\.1: .*\n  check the net"):
        build.write_source(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_written_source_is_patched_and_names_its_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        build.write_source(tmp_path / "new")
    except BuildError as error:
        pytest.skip(str(error))
    assert (tmp_path / "new/horovod/runner/util/guarded_exec.py").is_file()
    text = (tmp_path / "new/horovod/__init__.py").read_text()
    (version,) = re.findall(r"__version__ = '(\S+)'", text)
    monkeypatch.setattr(recipe, "installed_version", lambda package: version)
    assert recipe.is_ours()
