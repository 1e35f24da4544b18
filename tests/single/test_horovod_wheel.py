"""Horovod's wheel: build recipe, patches, CUDA toolkit, and diagnosis of failed builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.version import Version

from hvdtrain.errors import UserError
from hvdtrain.horovod_wheel import build, check, cuda, recipe
from hvdtrain.horovod_wheel.diagnose import diagnose
from hvdtrain.horovod_wheel.process import BuildError, TimedOutError, run_logged
from hvdtrain.launch import mpi
from hvdtrain.launch.commands import horovodrun
from tests.support.job import has_ended, poll

# Excerpts from logs of real builds without the program or package in question.
LOGS = Path(__file__).with_name("build_logs")
CAUSES = {
    "no-cmake": ("Failed to install temporary CMake", "apt-get install cmake"),
    "no-compiler": ("No CMAKE_CXX_COMPILER could be found.", "apt-get install g++"),
    "no-mpi-header": ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "libopenmpi-dev"),
    "no-python-header": ("fatal error: Python.h: No such file", "apt-get install python3-dev"),
    "no-cuda": ("Could NOT find CUDAToolkit", "--gpu none"),
    "cxx14": ("#error C++17 or later", "g++ 9 or newer"),
    "cxx17": ("#error C++20 or later", "g++ 11 or newer"),
}
LINES = {
    "a.cc:3:10: fatal error: mpi.h: No such file or directory": "libopenmpi-dev",
    "a.cc:3:10: fatal error: nccl.h: No such file or directory": "HOROVOD_NCCL_HOME",
    "a.cc:3:10: fatal error: foo/bar.h: No such file or directory": "apt-file find bar.h",
    "c++: fatal error: Killed signal terminated program cc1plus": "MAKEFLAGS=-j1",
    "/usr/bin/ld: final link failed: No space left on device": "make room",
    "ModuleNotFoundError: No module named 'cffi'": "pip install cffi",
    'Target "pytorch" requires the language dialect "CXX20" , but': "g++ 11 or newer",
    "a.cc:3:10: error: 'x' was not declared in this scope": "",
}


@pytest.mark.parametrize("name", CAUSES)
def test_failed_build_reports_cause_and_fix(name: str) -> None:
    line, advice = diagnose((LOGS / f"{name}.log").read_text())
    expected_line, expected_advice = CAUSES[name]
    assert expected_line in line and "\n" not in line
    assert expected_advice in advice


@pytest.mark.parametrize("line", LINES)
def test_known_error_line_gets_matching_advice(line: str) -> None:
    found, advice = diagnose(f"[ 10%] Building\n  {line}\nmake: *** [Makefile:1: all] Error 2\n")
    assert found == line
    assert LINES[line] in advice and bool(LINES[line]) == bool(advice)


@pytest.mark.parametrize("variable", ["LMOD_CMD", "MODULESHOME"])
def test_advice_names_modules_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.setenv(variable, "/opt/modules")
    for name, module in (("no-compiler", "gcc make"), ("cxx17", "gcc"), ("no-cmake", "cmake")):
        _, advice = diagnose((LOGS / f"{name}.log").read_text())
        assert f"module load {module} (`module avail`" in advice and "apt-get" not in advice
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"module load patch cmake make gcc openmpi \(") as told:
        build.build(wheel_dir=tmp_path)
    assert "apt-get" not in str(told.value)


def test_diagnosis_ignores_optional_cmake_packages() -> None:
    assert diagnose((LOGS / "fine.log").read_text()) == ("Successfully built horovod", "")
    assert diagnose("") == ("(the log is empty)", "")
    where_and_what = "CMake Error at CMakeLists.txt:3 (message):\n  the disk is upside down\n"
    assert diagnose(where_and_what) == ("the disk is upside down", "")


def test_wheel_is_not_built_for_one_mpi_and_named_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "mpicxx"
    wrapper.write_text("#!/bin/sh\nprintf '#define MPICH_VERSION \"4.0.2\"\\n'\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    with pytest.raises(UserError, match=r"mpicxx belongs to MPICH 4\.0\.2, and .*/mpirun to "):
        recipe.detect()


def test_compiler_without_mpi_is_reported_with_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/usr/bin/false --my-flag")
    with pytest.raises(UserError, match=r"`/usr/bin/false --my-flag` does not find mpi\.h") as told:
        recipe.detect()
    assert "CC=cc CXX=CC" in str(told.value) and "--without-mpi" in str(told.value)


def test_compiler_in_cxx_replaces_mpicxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Cray there are cc and CC, which find MPI, and neither mpicxx nor mpirun."""
    compiler = shutil.which("mpicxx")
    if compiler is None:
        pytest.skip("no mpicxx")
    for name in ("patch", "cmake", "make", "g++"):
        (tmp_path / name).symlink_to(shutil.which(name) or "/usr/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    build.check_prerequisites()
    assert recipe.detect().mpi == str(mpi.of_compiler([compiler]))


def test_wheel_versions_are_distinct_and_pep440_normalized() -> None:
    made = [
        recipe.Recipe("2.13.0+cpu", "openmpi4.1.4"),
        recipe.Recipe("2.13.0+cu130", "openmpi4.1.4"),
        recipe.Recipe("2.13.0+cpu", "openmpi4.1.5"),
        recipe.Recipe("2.13.0+cpu", "openmpi4.1.4", gpu="nccl"),
        recipe.Recipe("2.13.0+cpu", ""),
    ]
    assert len({one.version for one in made}) == len(made)
    for one in made:
        assert str(Version(one.version)) == one.version  # pip normalizes other forms
    assert re.fullmatch(
        r"0\.28\.1\+torch2\.13\.0\.cpu\.openmpi4\.1\.4\.gloo\.mpi\.p[0-9a-f]{8}", made[0].version
    )
    assert made[3].environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert ".cpu.gloo.p" in made[4].version
    assert made[4].environment["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in made[4].environment


def test_wheel_name_changes_with_a_patch_but_not_with_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe.Recipe("2.13.0", "openmpi4.1.4")
    name = before.wheel_pattern()
    copy = tmp_path / "patches"
    shutil.copytree(recipe.PATCHES, copy)
    monkeypatch.setattr(recipe, "PATCHES", copy)
    first = recipe.patches()[0]
    first.write_text("Bug: https://example.org/1\n" + first.read_text())
    assert before.wheel_pattern() == name
    first.write_text(first.read_text().replace("CMAKE_CXX_STANDARD 17", "CMAKE_CXX_STANDARD 23"))
    assert before.wheel_pattern() != name


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Horovod's source with every patch applied."""
    try:
        archive = build.download(tmp_path)
    except BuildError as error:
        pytest.skip(str(error))
    return build.unpack_and_patch(archive, tmp_path)


@pytest.mark.slow
def test_patches_apply_cleanly_to_sdist(source: Path) -> None:
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "CMakeLists.txt").read_text()
    assert "ProcessFailedError" in (source / "horovod/runner/launch.py").read_text()
    assert not list(source.rglob("*.rej")) and not list(source.rglob("*.orig"))


@pytest.mark.slow
def test_cxx_standard_follows_torch_headers(source: Path, tmp_path: Path) -> None:
    for standard, flags in {"17": {"c++17"}, "20": {"c++20", "c++2a"}}.items():
        compiled = _configure(source, tmp_path / standard, standard)
        named = set(re.findall(r"-std=(\S+)", compiled))
        assert len(named) == 1 and named <= flags


@pytest.mark.slow
def test_cpu_build_ignores_incomplete_cuda_toolkit(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cuda"
    _nvcc(home / "bin")  # compiles nothing, and has neither headers nor libraries
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    compiled = _configure(source, tmp_path, "20")
    assert "mpi_ops_v2.cc" in compiled and "CUDA" not in compiled


def _configure(source: Path, directory: Path, standard: str) -> str:
    """Run CMake with a stand-in for torch 2.14+cu130; return the compilers' commands."""
    torch = directory / "site/torch"
    headers = directory / "include"
    files = {
        torch / "__init__.py": (
            "import sys\n"
            "from torch import version\n"
            "torch = sys.modules['torch']\n"
            "__version__ = '2.14.1+cu130'\n"
            "def compiled_with_cxx11_abi():\n"
            "    return True\n"
        ),
        torch / "version.py": "cuda, hip = '13.0', None\n",
        torch / "utils/cpp_extension.py": (
            "import os\n"
            "CUDA_HOME, ROCM_HOME = os.environ.get('CUDA_HOME'), None\n"
            "class CppExtension:\n"
            "    def __init__(self, *_):\n"
            f"        self.include_dirs = [{str(headers)!r}]\n"
            "        self.library_dirs, self.libraries = [], []\n"
            "CUDAExtension = CppExtension\n"
        ),
        headers / "ATen/ATen.h": f"#error C++{standard} or later compatible compiler is required\n",
    }
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    out = directory / "configured"
    environment = {**os.environ, **recipe.Recipe("2.14.1", "").environment}
    environment |= {"PYTHONPATH": str(directory / "site"), "HOROVOD_WITHOUT_GLOO": "1"}
    command = ["cmake", "-S", str(source), "-B", str(out), "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command += [f"-DPYTHON_EXECUTABLE={sys.executable}"]
    command += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY_RELWITHDEBINFO={out}"]
    command += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    code = run_logged(command, directory / "cmake.log", 120.0, environment)
    assert code == 0, (directory / "cmake.log").read_text()
    return (out / "compile_commands.json").read_text()


def test_all_missing_prerequisites_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "LMOD_CMD", "MODULESHOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(build.MODULES, "no_such_module", "no-such-package")
    with pytest.raises(UserError) as told:
        build.build(wheel_dir=tmp_path)
    message = str(told.value)
    assert "missing on this machine: patch, cmake, make, g++, mpicxx, mpirun" in message
    assert "apt-get install patch cmake make g++ libopenmpi-dev openmpi-bin" in message
    assert f"{sys.executable} -m pip install no-such-package" in message
    assert "--without-mpi" in message
    assert told.value.exit_code == 2
    with pytest.raises(UserError) as told:
        build.build(mpi=False, wheel_dir=tmp_path)
    assert "mpicxx" not in str(told.value) and "--without" not in str(told.value)


def _nvcc(directory: Path, says: str = "", release: str = "13.0", code: int = 0) -> None:
    """Write a stand-in that prints its release, and exits with `code` when it should compile."""
    directory.mkdir(parents=True)
    version = f'[ "$1" = --version ] && echo "release {release}, V{release}.88" && exit 0'
    (directory / "nvcc").write_text(f"#!/bin/sh\n{version}\necho '{says}' >&2\nexit {code}\n")
    (directory / "nvcc").chmod(0o755)


@pytest.fixture
def no_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a torch for CUDA 13.0 on a machine without CUDA."""
    monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(cuda, "DEFAULT_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(cuda, "_cuda_of_torch", lambda: "13.0")
    monkeypatch.setattr(cuda, "_requirement", lambda: "")


def test_cuda_toolkit_is_resolved_through_nvcc_wrapper_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_toolkit: None
) -> None:
    _nvcc(tmp_path / "cuda/bin")
    _nvcc(tmp_path / "bin", f"#$ TOP={tmp_path}/cuda/bin/..")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    toolkit = cuda.find()
    assert toolkit.home == tmp_path / "cuda" and not toolkit.missing
    made = cuda.environment(toolkit, tmp_path)
    assert made["CUDA_HOME"] == made["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")
    assert made["PATH"].split(":")[0] == str(tmp_path / "cuda/bin")
    _nvcc(tmp_path / "other/bin")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path / "other"))
    assert cuda.find().home == tmp_path / "other"


def test_cuda_toolkit_must_compile_and_match_torch_major_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_toolkit: None
) -> None:
    _nvcc(tmp_path / "old/bin", release="12.8")
    _nvcc(tmp_path / "partial/bin", "/usr/bin/ld: cannot find -lcudart", code=1)
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "partial"))
    toolkit = cuda.find()
    assert toolkit.home is None
    assert toolkit.rejected == (
        f"{tmp_path}/old is CUDA 12, torch has CUDA 13.0",
        f"{tmp_path}/partial does not compile and link a program: "
        "/usr/bin/ld: cannot find -lcudart",
    )
    with pytest.raises(UserError, match=r"missing for GPUs: NVIDIA's CUDA toolkit 13\.0.*partial"):
        build.check_prerequisites(toolkit=toolkit)
    _nvcc(tmp_path / "newer/bin", release="13.2")
    monkeypatch.setattr(cuda, "DEFAULT_HOME", str(tmp_path / "newer"))
    assert cuda.find().home == tmp_path / "newer"
    monkeypatch.setattr(cuda, "_cuda_of_torch", str)
    assert cuda.find().missing == "a build of torch with CUDA"


def test_cuda_compiler_is_installed_with_pip_if_host_has_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_toolkit: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cuda, "_requirement", lambda: "cuda-toolkit[nvcc]==13.0.3")
    toolkit = cuda.find()
    assert toolkit.home is None and not toolkit.missing
    home = tmp_path / "cuda/nvidia/cu13"

    def run_pip(command: list[str], *_: object) -> int:
        assert command[-2:] == [str(tmp_path / "cuda"), "cuda-toolkit[nvcc]==13.0.3"]
        _nvcc(home / "bin")
        (home / "lib").mkdir()
        (home / "lib/libcudart.so.13").touch()
        return 0

    monkeypatch.setattr(cuda, "run_logged", run_pip)
    made = cuda.environment(toolkit, tmp_path)
    assert made["CUDA_HOME"] == made["HOROVOD_CUDA_HOME"] == str(home)
    # Linkers need these names, which the packages lack.
    assert (home / "lib64/libcudart.so").resolve() == home / "lib/libcudart.so.13"
    assert "CUDA's compiler: cuda-toolkit[nvcc]==13.0.3 (pip)" in capsys.readouterr().err


def test_build_ignores_gpu_operations_from_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}

    def run_pip(
        command: list[str], log: Path, timeout: float, environment: dict[str, str], **_: bool
    ) -> int:
        log.touch()
        seen.update(environment)
        return 1

    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setattr(build, "check_prerequisites", lambda *_: None)
    monkeypatch.setattr(build, "download", lambda directory: directory)
    monkeypatch.setattr(build, "unpack_and_patch", lambda archive, directory: directory)
    monkeypatch.setattr(build, "run_logged", run_pip)
    with pytest.raises(BuildError, match="did not compile"):
        build.build(mpi=False, wheel_dir=tmp_path)
    assert seen["HOROVOD_WITHOUT_MPI"] == "1" and "HOROVOD_GPU_OPERATIONS" not in seen


def test_torch_nccl_is_used_unless_nccl_home_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, scratch = tmp_path / "site/nvidia/nccl", tmp_path / "scratch"
    for file in ("include/nccl.h", "lib/libnccl.so.2"):
        (wheel / file).parent.mkdir(parents=True)
        (wheel / file).touch()
    scratch.mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    toolkit = cuda.Toolkit("13.0", tmp_path / "cuda")
    made = cuda.environment(toolkit, scratch)
    assert made["HOROVOD_NCCL_INCLUDE"] == str(wheel / "include")
    # The wheel lacks libnccl.so, by which a linker finds the library.
    assert Path(made["HOROVOD_NCCL_LIB"], "libnccl.so").resolve() == wheel / "lib/libnccl.so.2"
    assert made["HOROVOD_NCCL_LINK"] == "SHARED"
    monkeypatch.setenv("HOROVOD_NCCL_HOME", "/opt/nccl")
    assert not any("NCCL" in name for name in cuda.environment(toolkit, scratch))


def test_cached_wheel_requires_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"g\+\+"):
        build.build(mpi=False, wheel_dir=tmp_path)
    name = recipe.detect(mpi=False).wheel_pattern().replace("*", "")
    (tmp_path / name).touch()
    assert build.build(mpi=False, wheel_dir=tmp_path) == tmp_path / name


def test_install_skips_wheel_that_is_already_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "installed_version", lambda _: "0.28.1+x")
    monkeypatch.setattr(build, "run_logged", lambda *_: pytest.fail("pip was called"))
    build.install(Path("horovod-0.28.1+x-cp311-cp311-linux_x86_64.whl"))


def test_build_reports_unwritable_wheel_dir(tmp_path: Path) -> None:
    try:
        build.check_prerequisites()
    except UserError as error:
        pytest.skip(str(error))
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="choose another --wheel-dir"):
        build.build(wheel_dir=tmp_path / "file" / "wheels")


def test_hanging_command_times_out_and_its_children_are_killed(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 300 & echo $! > {child}; echo busy; wait"
    with pytest.raises(TimedOutError, match="took more than 1 s: busy"):
        run_logged(["sh", "-c", script], tmp_path / "log", timeout=1.0)
    poll(lambda: has_ended(int(child.read_text())), 5, "the end of the child")


def test_terminated_build_kills_its_compilers(tmp_path: Path) -> None:
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
        poll(lambda: has_ended(int(child.read_text())), 5, "the end of the child")
    finally:
        build.kill()


def test_check_exits_with_2_if_horovod_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed_version", lambda _: None)
    with pytest.raises(UserError, match="hvdtrain horovod build --install") as told:
        check.run()
    assert told.value.exit_code == 2


def test_check_reports_failed_launchers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "installed_version", lambda _: "0.28.1+x")
    monkeypatch.setattr(check, "_built_controllers", lambda: (["gloo", "mpi"], ""))
    one_rank = [sys.executable, "-c", "print('rank 0 of 2: sum ok')"]
    crash = [sys.executable, "-c", "raise ValueError('no such device')"]
    monkeypatch.setattr(check, "horovodrun", lambda *_, **__: one_rank)
    monkeypatch.setattr(check, "mpirun", lambda *_: crash)
    assert check.run() == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("horovodrun --gloo -np 2: FAILED: no result from rank 1")
    assert said[2] == "mpirun -np 2: FAILED: exit code 1: ValueError: no such device"


def test_horovodrun_prints_lines_of_rank_0_without_a_prefix() -> None:
    if not recipe.is_ours():
        pytest.skip("Horovod is not the one of `hvdtrain horovod build`")
    script = "import os; print('rank', os.environ['HOROVOD_RANK'])"
    argv = horovodrun(2, [sys.executable, "-c", script])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["[1]<stdout>:rank 1", "rank 0"], done


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
def test_horovodrun_reports_how_first_failed_rank_ended(
    ending: str, code: int, last_words: str
) -> None:
    if recipe.installed_version("horovod") in (None, recipe.VERSION):
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
