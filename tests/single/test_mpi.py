"""Detection of each MPI, and the options of its launcher."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import UserError
from hvdtrain.launch import mpi
from hvdtrain.launch.mpi import MPI
from hvdtrain.runtime import pmi
from tests.support.runs import environment

COMMAND = ["python", "-m", "hvdtrain.train"]
OPEN_4 = MPI("openmpi", "4.1.4")
OPEN_5 = MPI("openmpi", "5.0.11")
MPICH = MPI("mpich", "5.0.2")
INTEL = MPI("intelmpi", "2021.18.1")
ALL = [OPEN_4, OPEN_5, MPICH, INTEL]

# Output of `mpirun --version`.
OPEN_4_BANNER = """mpirun (Open MPI) 4.1.4

Report bugs to http://www.open-mpi.org/community/help/
"""
OPEN_5_BANNER = """mpirun (Open MPI) 5.0.11

Report bugs to https://www.open-mpi.org/community/help/
"""
MPICH_BANNER = """HYDRA build details:
    Version:                                 5.0.2
    Release Date:                            Fri Sep 25 20:45:26 UTC 2026
    CC:                              cc
    Configure options:                       --with-device=ch4:ucx,ofi --with-pm=hydra:gforker
    Process Manager:                         pmi
    Launchers available:                     ssh rsh fork slurm ll lsf sge manual persist
    Topology libraries available:            hwloc
    Resource management kernels available:   user slurm ll lsf sge pbs cobalt
    Demux engines available:                 poll select
"""
INTEL_BANNER = """Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)
Copyright 2003-2026, Intel Corporation.
"""


@pytest.mark.parametrize(
    ("banner", "found"),
    [
        (OPEN_4_BANNER, OPEN_4),
        (OPEN_5_BANNER, OPEN_5),
        (MPICH_BANNER, MPICH),
        (INTEL_BANNER, INTEL),
        ("mpirun (Open MPI) 5.0.0rc12\n\nReport bugs to", MPI("openmpi", "5.0.0")),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\n", MPICH),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 2022",
            MPI("intelmpi", "2021.8"),
        ),
        ("MVAPICH2 Version:      2.3.7\nMVAPICH2 Release date: ...\n", MPI("mvapich", "2.3.7")),
        ("g++ (Debian 12.2.0-14) 12.2.0", None),
        ("", None),
    ],
)
def test_launcher_is_identified_from_its_version_text(banner: str, found: MPI | None) -> None:
    assert mpi.parse(banner) == found


@pytest.mark.parametrize(
    ("macros", "found"),
    [
        (
            "#define OMPI_MINOR_VERSION 0\n#define OMPI_RELEASE_VERSION 11\n"
            "#define OMPI_MAJOR_VERSION 5\n",
            OPEN_5,
        ),
        ('#define MPICH_NUMVERSION 50002300\n#define MPICH_VERSION "5.0.2"\n', MPICH),
        # Intel MPI and the others state the MPICH that they are derived from, too.
        ('#define MPICH_VERSION "3.4a2"\n#define I_MPI_VERSION "2021.18.1"\n', INTEL),
        (
            '#define MPICH_VERSION "3.2.1"\n#define MVAPICH2_VERSION "2.3.7"\n',
            MPI("mvapich", "2.3.7"),
        ),
        ("#define __GNUC__ 12\n", None),
    ],
)
def test_compiler_is_identified_from_the_macros_of_mpi_h(macros: str, found: MPI | None) -> None:
    assert mpi.parse_macros(macros) == found


@pytest.mark.parametrize("one", ALL, ids=str)
def test_name_in_a_wheel_is_read_back(one: MPI) -> None:
    assert mpi.find(str(one)) == one


def test_only_the_mpich_family_starts_each_others_ranks() -> None:
    assert MPICH.starts(MPI("craympich", "8.1.25"))
    assert not OPEN_4.starts(OPEN_5) and not MPICH.starts(OPEN_4)
    assert not INTEL.starts(MPICH) and INTEL.starts(INTEL)


def test_launcher_on_path_and_compiler_belong_to_the_same_mpi() -> None:
    if shutil.which("mpirun") is None or shutil.which("mpicxx") is None:
        pytest.skip("no MPI")
    compiled = mpi.of_compiler(mpi.compiler())
    assert compiled is not None and mpi.of_launcher().starts(compiled)


def _mpirun(directory: Path, text: str) -> None:
    program = directory / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)


def test_missing_mpirun_is_reported_with_other_ways_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"mpirun is not found: .*srun .*--controller gloo"):
        mpi.of_launcher()


def test_unknown_mpi_is_reported_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mpirun(tmp_path, "FooMPI launcher 1.2")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError) as told:
        mpi.of_launcher()
    assert f"{tmp_path}/mpirun belongs to an unknown MPI" in str(told.value)
    assert "FooMPI launcher 1.2" in str(told.value) and "srun" in str(told.value)
    assert "\n" not in str(told.value)


def test_pip_installation_of_intel_mpi_gets_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("bin/mpicxx", "#!/bin/sh\necho -II_MPI_SUBSTITUTE_INSTALLDIR/include\n"),
        ("include/mpi.h", ""),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "bin/mpicxx").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert mpi.intel_variables({}) == {"I_MPI_ROOT": str(tmp_path)}
    assert mpi.intel_variables({"I_MPI_ROOT": "/opt/intel"}) == {}
    (tmp_path / "bin/mpicxx").write_text("#!/bin/sh\necho -I/opt/intel/oneapi/mpi/include\n")
    assert mpi.intel_variables({}) == {}


# --- command lines


@pytest.mark.parametrize("one", ALL, ids=str)
@pytest.mark.parametrize("watched", [False, True])
def test_command_line_ends_with_the_command_of_a_rank(one: MPI, watched: bool) -> None:
    argv = mpi.argv(one, 4, COMMAND, "a:2,b:2", ["HOROVOD_X"], watched)
    assert argv[-len(COMMAND) :] == COMMAND
    # Signals to Intel's mpirun, a script, would not reach the ranks.
    at = argv.index("mpiexec.hydra" if one == INTEL else "mpirun")
    assert argv[at + 1 : at + 3] == ["-np", "4"]
    assert argv[:at] == [] or argv[0] == "env"


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("one", ALL, ids=str)
def test_only_open_mpi_is_asked_to_run_as_root(
    one: MPI, root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)
    asked = "--allow-run-as-root" in mpi.argv(one, 2, COMMAND)
    assert asked == (root and one.is_open_mpi)


def test_open_mpi_options() -> None:
    for one, ssh in ((OPEN_4, "--mca plm_rsh_args -o"), (OPEN_5, "--prtemca plm_ssh_args -o")):
        text = " ".join(mpi.argv(one, 3, COMMAND, "a:2,b:1", ["HOROVOD_X", "OMP_Y"], True))
        assert "-H a:2,b:1 --bind-to none --map-by slot" in text
        assert "-x HOROVOD_X -x OMP_Y python" in text
        assert ssh in text and "oob_tcp_keepalive_time 1" in text
        assert "--oversubscribe" not in text
        assert "--oversubscribe" in mpi.argv(one, 2, COMMAND)
    assert "odls_base_sigkill_timeout" in " ".join(mpi.argv(OPEN_4, 2, COMMAND, watched=True))
    assert "odls_base" not in " ".join(mpi.argv(OPEN_5, 2, COMMAND, watched=True))


def test_hydra_options() -> None:
    argv = mpi.argv(MPICH, 3, COMMAND, "a:2,b:1", ["HOROVOD_X"], True)
    assert argv[1].startswith("HYDRA_LAUNCHER_EXTRA_ARGS=-o BatchMode=yes")
    assert argv[2:] == ["mpirun", "-np", "3", "-hosts", "a:2,b:1", "-bind-to", "none", *COMMAND]
    assert mpi.argv(MPICH, 2, COMMAND) == ["mpirun", "-np", "2", "-bind-to", "none", *COMMAND]
    argv = mpi.argv(INTEL, 3, COMMAND, "a:2,b:1", watched=True)
    assert argv[1].startswith("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS=-o BatchMode=yes")
    assert argv[5] == "-machinefile" and argv[7:] == ["-genv", "I_MPI_PIN", "0", *COMMAND]
    assert Path(argv[6]).read_text() == "a:2\nb:1\n" and Path(argv[6]).is_file()


def test_each_host_gets_its_slots_whatever_its_cores() -> None:
    """Two hosts that are this machine: Intel MPI filled the first one with a rank per core."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    hosts = f"localhost:1,{socket.gethostname()}:2"
    show = "import os; from hvdtrain.runtime import environment as e; "
    show += "os.write(1, f'size {e.mpi_local_size()}\\n'.encode())"
    argv = mpi.argv(mpi.of_launcher(), 3, [sys.executable, "-c", show], hosts)
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    sizes = sorted(line for line in done.stdout.splitlines() if line.startswith("size"))
    # Open MPI finds that both names are one host.
    assert sizes in (["size 1", "size 2", "size 2"], ["size 3"] * 3), done


def test_launcher_states_what_it_cannot_watch() -> None:
    assert mpi.lacking(OPEN_4) == []
    assert all(len(mpi.lacking(one)) == 1 for one in (OPEN_5, MPICH, INTEL))


@pytest.mark.parametrize(
    ("one", "code", "meaning"),
    [(OPEN_4, 137, 137), (OPEN_5, 9, 9), (MPICH, 9, 137), (MPICH, 75, 75), (MPICH, 3, 3),
     (INTEL, 255, 1), (INTEL, 2, 2), (INTEL, 9, 137)],
)  # fmt: skip
def test_exit_code_of_a_killed_rank_is_128_and_the_signal(
    one: MPI, code: int, meaning: int
) -> None:
    assert mpi.exit_code(one, code) == meaning


# --- ranks of the MPI on this machine


def test_ranks_are_started_with_the_installed_mpi() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    show = (
        "from hvdtrain.runtime import environment as e; "
        "import os; rank, size = e.launched_rank(), e.launched_size(); "
        "local = f'{e.launched_local_rank()} {e.launched_local_size()}'; "
        "os.write(1, f'rank {rank} {size} {local}\\n'.encode())"
    )
    argv = mpi.argv(mpi.of_launcher(), 3, [sys.executable, "-c", show])
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert ranks == [f"rank {rank} 3 {rank} 3" for rank in range(3)], done


def test_rank_that_fails_before_mpi_has_started_ends_the_job() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    fail = (
        "import sys, time\nfrom hvdtrain.runtime import environment, pmi\n"
        "if environment.launched_rank() == 1:\n    pmi.abort_job(3)\n    sys.exit(3)\n"
        "time.sleep(60)\n"
    )
    argv = mpi.argv(mpi.of_launcher(), 2, [sys.executable, "-c", fail])
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 3, done


def test_abort_is_sent_only_over_a_connection_that_mpi_has_not_taken() -> None:
    reader, writer = os.pipe()
    env = {"PMI_FD": str(writer)}
    pmi.abort_job(3, env)
    assert os.read(reader, 99) == b"cmd=abort exitcode=3\n"
    pmi.taken(env)
    pmi.abort_job(3, env)
    os.close(writer)
    assert os.read(reader, 99) == b""
    pmi.abort_job(3, {"PMI_FD": str(writer)})  # closed meanwhile
    os.close(reader)
