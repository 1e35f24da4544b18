"""The recipe of Horovod's wheel, its patches, and what people see when it does not build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from packaging.version import Version

from hvdtrain.errors import UserError
from hvdtrain.horovod_wheel import build, check, cuda, prerequisites, recipe
from hvdtrain.horovod_wheel.diagnose import diagnose
from hvdtrain.horovod_wheel.process import TimedOutError, run_logged
from hvdtrain.launch.commands import horovodrun

# Cut from logs of real builds with the thing in question taken away.
LOGS = Path(__file__).with_name("build_logs")
CAUSES = {
    "no-cmake": ("Failed to install temporary CMake", "apt-get install cmake"),
    "no-compiler": ("No CMAKE_CXX_COMPILER could be found.", "apt-get install g++"),
    "no-mpi-header": ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "libopenmpi-dev"),
    "no-python-header": ("fatal error: Python.h: No such file", "apt-get install python3-dev"),
    "no-cuda": ("Could NOT find CUDAToolkit", "--gpu none"),
    "cxx14": ("#error C++17 or later", "g++ 9 or newer"),
}
LINES = {
    "a.cc:3:10: fatal error: mpi.h: No such file or directory": "libopenmpi-dev",
    "a.cc:3:10: fatal error: nccl.h: No such file or directory": "HOROVOD_NCCL_HOME",
    "a.cc:3:10: fatal error: foo/bar.h: No such file or directory": "apt-file find bar.h",
    "c++: fatal error: Killed signal terminated program cc1plus": "MAKEFLAGS=-j1",
    "/usr/bin/ld: final link failed: No space left on device": "make room",
    "ModuleNotFoundError: No module named 'cffi'": "pip install cffi",
    "a.cc:3:10: error: 'x' was not declared in this scope": "",
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_failed_build_hides_its_cause_or_what_to_install(name: str) -> None:
    line, advice = diagnose((LOGS / f"{name}.log").read_text())
    expected_line, expected_advice = CAUSES[name]
    assert expected_line in line and "\n" not in line
    assert expected_advice in advice


@pytest.mark.parametrize("line", LINES)
def test_a_known_error_line_gets_no_advice(line: str) -> None:
    found, advice = diagnose(f"[ 10%] Building\n  {line}\nmake: *** [Makefile:1: all] Error 2\n")
    assert found == line
    assert LINES[line] in advice and bool(LINES[line]) == bool(advice)


def test_what_cmake_does_without_is_taken_for_the_cause() -> None:
    assert diagnose((LOGS / "fine.log").read_text()) == ("Successfully built horovod", "")
    assert diagnose("") == ("(the log is empty)", "")
    where_and_what = "CMake Error at CMakeLists.txt:3 (message):\n  the disk is upside down\n"
    assert diagnose(where_and_what) == ("the disk is upside down", "")


@pytest.mark.parametrize(
    ("banner", "name"),
    [
        ("mpicxx: Open MPI 4.1.4 (Language: C++)", "openmpi4.1.4"),
        ("mpirun (Open MPI) 5.0.0rc12\n\nReport bugs to", "openmpi5.0.0"),
        (
            "HYDRA build details:\n    Version:                                 4.0.2\n",
            "mpich4.0.2",
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 2022", "intelmpi2021.8"),
        ("g++ (Debian 12.2.0-14) 12.2.0", None),
    ],
)
def test_an_mpi_is_not_known_by_its_banner(banner: str, name: str | None) -> None:
    assert recipe.parse_mpi(banner) == name


def test_two_different_builds_share_a_name_or_the_name_is_no_version() -> None:
    made = [
        recipe.Recipe("2.13.0+cpu", "openmpi4.1.4"),
        recipe.Recipe("2.13.0+cu130", "openmpi4.1.4"),
        recipe.Recipe("2.13.0+cpu", "openmpi4.1.5"),
        recipe.Recipe("2.13.0+cpu", "openmpi4.1.4", gpu="nccl"),
        recipe.Recipe("2.13.0+cpu", ""),
    ]
    assert len({one.version for one in made}) == len(made)
    for one in made:
        assert str(Version(one.version)) == one.version  # pip rewrites what is not normal
    assert re.fullmatch(
        r"0\.28\.1\+torch2\.13\.0\.cpu\.openmpi4\.1\.4\.gloo\.mpi\.p[0-9a-f]{8}", made[0].version
    )
    assert made[3].environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert ".cpu.gloo.p" in made[4].version
    assert made[4].environment["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in made[4].environment


def test_a_changed_patch_reuses_the_old_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe.Recipe("2.13.0", "openmpi4.1.4")
    name = before.wheel_pattern()
    for patch in recipe.patches():
        shutil.copy(patch, tmp_path)
    (tmp_path / "9999-new.patch").write_text("another\n")
    monkeypatch.setattr(recipe, "PATCHES", tmp_path)
    assert before.wheel_pattern() != name


def test_a_patch_does_not_say_why() -> None:
    for patch in recipe.patches():
        why = patch.read_text().split("\n--- ")[0].strip()
        assert len(why) > 60, patch


@pytest.mark.slow
def test_a_patch_does_not_apply_to_the_sdist(tmp_path: Path) -> None:
    try:
        archive = build.download(tmp_path)
    except build.BuildError as error:
        pytest.skip(str(error))
    source = build.unpack_and_patch(archive, tmp_path)
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "CMakeLists.txt").read_text()
    assert "ProcessFailedError" in (source / "horovod/runner/launch.py").read_text()
    assert not list(source.rglob("*.rej")) and not list(source.rglob("*.orig"))


def test_missing_prerequisites_are_not_told_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(prerequisites.MODULES, "no_such_module", "no-such-package")
    with pytest.raises(UserError) as told:
        build.build(wheel_dir=tmp_path)
    message = str(told.value)
    assert "missing on this machine: patch, cmake, make, g++, mpicxx, mpirun" in message
    assert "apt-get install -y patch cmake make g++ libopenmpi-dev openmpi-bin" in message
    assert f"{sys.executable} -m pip install no-such-package" in message
    assert "--without-mpi" in message
    assert told.value.exit_code == 2
    with pytest.raises(UserError) as told:
        build.build(mpi=False, wheel_dir=tmp_path)
    assert "mpicxx" not in str(told.value) and "--without" not in str(told.value)


def _nvcc(folder: Path, says: str = "") -> None:
    folder.mkdir(parents=True)
    (folder / "nvcc").write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    (folder / "nvcc").chmod(0o755)


def test_an_nvcc_that_is_a_script_hides_the_toolkit_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    _nvcc(tmp_path / "cuda/bin")
    _nvcc(tmp_path / "bin", f"#$ TOP={tmp_path}/cuda/bin/..")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert cuda.toolkit() == tmp_path / "cuda"
    made = cuda.environment(tmp_path)
    assert made["CUDA_HOME"] == made["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")
    _nvcc(tmp_path / "other/bin")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path / "other"))
    assert cuda.toolkit() == tmp_path / "other"


def test_torchs_own_nccl_is_not_found_or_taken_where_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, scratch = tmp_path / "site/nvidia/nccl", tmp_path / "scratch"
    for file in ("include/nccl.h", "lib/libnccl.so.2"):
        (wheel / file).parent.mkdir(parents=True)
        (wheel / file).touch()
    scratch.mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    made = cuda.environment(scratch)
    assert made["HOROVOD_NCCL_INCLUDE"] == str(wheel / "include")
    # The wheel has no libnccl.so, by which a linker finds a library.
    assert Path(made["HOROVOD_NCCL_LIB"], "libnccl.so").resolve() == wheel / "lib/libnccl.so.2"
    assert made["HOROVOD_NCCL_LINK"] == "SHARED"
    monkeypatch.setenv("HOROVOD_NCCL_HOME", "/opt/nccl")
    assert not any("NCCL" in name for name in cuda.environment(scratch))


def test_a_cached_wheel_is_compiled_again(tmp_path: Path) -> None:
    try:
        prerequisites.check()
    except UserError as error:
        pytest.skip(str(error))
    name = recipe.detect().wheel_pattern().replace("*", "")
    (tmp_path / name).touch()
    assert build.build(wheel_dir=tmp_path) == tmp_path / name


def test_an_installed_wheel_is_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "installed_version", lambda: "0.28.1+x")
    monkeypatch.setattr(build, "run_logged", lambda *_: pytest.fail("pip was called"))
    build.install(Path("horovod-0.28.1+x-cp311-cp311-linux_x86_64.whl"))


def test_a_wheel_dir_that_cannot_be_written_is_a_traceback(tmp_path: Path) -> None:
    try:
        prerequisites.check()
    except UserError as error:
        pytest.skip(str(error))
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match="choose another --wheel-dir"):
        build.build(wheel_dir=tmp_path / "file" / "wheels")


def test_a_command_that_hangs_is_waited_for_or_left_behind(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 300 & echo $! > {child}; echo busy; wait"
    with pytest.raises(TimedOutError, match="took more than 1 s: busy"):
        run_logged(["sh", "-c", script], tmp_path / "log", timeout=1.0)
    _wait_for_end(int(child.read_text()))


def test_a_build_that_is_terminated_leaves_its_compilers_behind(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = (
        "from pathlib import Path\n"
        "from hvdtrain.horovod_wheel.process import run_logged\n"
        "from hvdtrain.runtime.signals import leave_on_sigterm\n"
        "leave_on_sigterm()\n"
        f"script = 'sleep 300 & echo $! > {child}.new; mv {child}.new {child}; wait'\n"
        f"run_logged(['sh', '-c', script], Path({str(tmp_path / 'log')!r}), timeout=60.0)\n"
    )
    build = subprocess.Popen([sys.executable, "-c", program])
    try:
        deadline = time.monotonic() + 30.0
        while not child.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        build.terminate()
        assert build.wait(30.0) == 143
        _wait_for_end(int(child.read_text()))
    finally:
        build.kill()


def _wait_for_end(pid: int) -> None:
    """Of a process that has had its signal."""
    deadline = time.monotonic() + 5.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_check_without_horovod_does_not_end_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed_version", lambda: None)
    with pytest.raises(UserError, match="hvdtrain horovod build --install") as told:
        check.run()
    assert told.value.exit_code == 2


def test_check_says_ok_of_a_launcher_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "installed_version", lambda: "0.28.1+x")
    monkeypatch.setattr(check, "_built_controllers", lambda: (["gloo", "mpi"], ""))
    one_rank = [sys.executable, "-c", "print('rank 0 of 2: sum ok')"]
    crash = [sys.executable, "-c", "raise ValueError('no such device')"]
    monkeypatch.setattr(check, "horovodrun", lambda *_, **__: one_rank)
    monkeypatch.setattr(check, "mpirun", lambda *_: crash)
    assert check.run() == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("horovodrun --gloo -np 2: FAILED: no result from rank 1")
    assert said[2] == "mpirun -np 2: FAILED: exit code 1: ValueError: no such device"


@pytest.mark.parametrize(
    ("ending", "code", "last_words"),
    [
        ("print('wrong input', file=sys.stderr); sys.exit(2)", 2, "[1]<stderr>:wrong input"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "horovodrun: rank 1 on localhost was ended by signal 9 (Killed)",
        ),
    ],
)
def test_horovodrun_hides_how_the_first_rank_failed(
    ending: str, code: int, last_words: str
) -> None:
    if build.installed_version() in (None, recipe.VERSION):
        pytest.skip("Horovod is not the one of `hvdtrain horovod build`")
    script = f"import os, signal, sys, time\nif os.environ['HOROVOD_RANK'] == '1': {ending}"
    waits = f"{script}\ntime.sleep(60)"
    started = time.monotonic()
    done = subprocess.run(
        horovodrun(2, [sys.executable, "-c", waits]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.splitlines() == [last_words] and not done.stdout
    assert time.monotonic() - started < 30  # rank 0 did not sleep to its end
