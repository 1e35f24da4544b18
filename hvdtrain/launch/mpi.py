"""MPI implementations: which one is installed, and the options of its launcher.

| | Open MPI 4 | Open MPI 5 (PRRTE) | MPICH, MVAPICH (Hydra) | Intel MPI (its Hydra) |
| --- | --- | --- | --- | --- |
| hosts and slots | `-H a:2,b:1` | `-H a:2,b:1` | `-hosts a:2,b:1` | `-machinefile F` |
| no binding | `--bind-to none` | `--bind-to none` | `-bind-to none` | `I_MPI_PIN=0` |
| variables for ranks | `-x NAME` | `-x NAME` | passes all | passes all |
| root | `--allow-run-as-root` | `--allow-run-as-root` | allowed | allowed |
| more ranks than cores | `--oversubscribe` | `--oversubscribe` | allowed | allowed |
| prefix of output lines | off | off | off | off |
| ssh's options | `plm_rsh_args` | `plm_ssh_args` | a variable | a variable |
| keep-alive between daemons | `oob_tcp_keepalive_*` | `oob_tcp_keepalive_*` | none | none |
| kills ranks at once | `odls_base_sigkill_timeout` | none | always | always |
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.errors import UserError

# No prompts, and a dead peer is detected in seconds, whatever the user's ssh configuration.
SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=3"),
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3"),
)

_TITLES = {
    "openmpi": "Open MPI",
    "intelmpi": "Intel MPI",
    "mvapich": "MVAPICH",
    "craympich": "Cray MPICH",
    "mpich": "MPICH",
}
# In a version text of a program. A derivative comes before MPICH, which it names, too.
_BANNERS = (
    ("openmpi", r"Open MPI\)? v?(\d+(?:\.\d+)*)"),
    ("intelmpi", r"Intel\(R\) MPI Library.*?Version (\d+(?:\.\d+)*)"),
    ("mvapich", r"MVAPICH\S* .*?[Vv]ersion:?\s*(\d+(?:\.\d+)*)"),
    ("craympich", r"CRAY MPICH.*?version (\d+(?:\.\d+)*)"),
    ("mpich", r"HYDRA.*?Version:\s*(\d+(?:\.\d+)*)"),
    ("mpich", r"MPICH.*?[Vv]ersion:?\s*(\d+(?:\.\d+)*)"),
)
# In the macros of mpi.h.
_MACROS = (
    ("intelmpi", r'I_MPI_VERSION "(\d+(?:\.\d+)*)'),
    ("mvapich", r'MVAPICH2?_VERSION "(\d+(?:\.\d+)*)'),
    ("craympich", r'CRAY_MPICH_VERSION "?(\d+(?:\.\d+)*)'),
    ("mpich", r'MPICH_VERSION "(\d+(?:\.\d+)*)'),
)
_OPEN_MPI_MACROS = tuple(rf"OMPI_{part}_VERSION (\d+)" for part in ("MAJOR", "MINOR", "RELEASE"))
# They share an ABI and the protocol of Hydra, so each one's mpirun starts ranks of the others.
_MPICH_FAMILY = ("mpich", "mvapich", "craympich")
_TIMEOUT_S = 30.0
BY_HAND = (
    "start the ranks with your site's launcher, such as `srun --mpi=pmi2 -n 16 python -m "
    "hvdtrain.train ...`, or without MPI: horovodrun --gloo, or hvdtrain launch --controller gloo"
)


class MPI(NamedTuple):
    """An MPI implementation: its name (a key of _TITLES) and its version, such as 4.1.4."""

    name: str
    version: str

    def __str__(self) -> str:
        return self.name + self.version

    @property
    def title(self) -> str:
        return f"{_TITLES[self.name]} {self.version}"

    @property
    def is_open_mpi(self) -> bool:
        return self.name == "openmpi"

    @property
    def is_prrte(self) -> bool:
        """Whether its launcher is PRRTE: Open MPI from version 5 on."""
        return self.is_open_mpi and int(self.version.partition(".")[0]) >= 5

    def starts(self, library: MPI) -> bool:
        """Whether this MPI's mpirun starts ranks that are linked with `library`."""
        return self == library or {self.name, library.name} <= set(_MPICH_FAMILY)


# --- detection ----------------------------------------------------------------


def parse(banner: str) -> MPI | None:
    """Return the MPI that the version text of its launcher or of `mpichversion` names."""
    for name, pattern in _BANNERS:
        found = re.search(pattern, banner, re.DOTALL)
        if found:
            return MPI(name, found.group(1))
    return None


def parse_macros(macros: str) -> MPI | None:
    """Return the MPI that mpi.h belongs to, from its macros (`#define NAME VALUE` lines)."""
    numbers = [re.search(rf"#define {pattern}", macros) for pattern in _OPEN_MPI_MACROS]
    if all(numbers):
        return MPI("openmpi", ".".join(found[1] for found in numbers if found))
    for name, pattern in _MACROS:
        found = re.search(rf"#define {pattern}", macros)
        if found:
            return MPI(name, found.group(1))
    return None


def find(name: str) -> MPI | None:
    """Return the MPI of a wheel's name or a host's facts, such as openmpi4.1.4; None if unknown."""
    found = re.fullmatch(rf"({'|'.join(_TITLES)})(\d+(?:\.\d+)*)", name)
    return MPI(found[1], found[2]) if found else None


# Hosts and slots that a launcher has announced, as `a:2,b:1`: ranks compare them with their own.
HOSTS_VARIABLE = "HVDTRAIN_HOSTS"
# Part of a wheel's version: its MPI.
PATTERN = rf"(?:{'|'.join(_TITLES)})\d+(?:\.\d+)*?"


def of_launcher() -> MPI:
    """Return the MPI whose mpirun is on PATH.

    Raises:
        UserError: mpirun is missing or fails, or belongs to an unknown MPI.
    """
    path = shutil.which("mpirun")
    if path is None:
        raise UserError(f"mpirun is not found: install an MPI, or add it to PATH; or {BY_HAND}")
    return _of_launcher(path)


def problem() -> str:
    """Return why no ranks can be started with mpirun, in one line; "" if they can."""
    try:
        of_launcher()
    except UserError as error:
        return str(error)
    return ""


@functools.cache
def _of_launcher(path: str) -> MPI:
    texts = [_output([path, "--version"])]
    if (found := parse(texts[0])) is None:
        # Hydra of a derivative may not name it.
        texts.append(_output(["mpichversion"]))
        found = parse(texts[1])
    if found is None:
        said = next((line for text in texts for line in text.splitlines() if line.strip()), "")
        raise UserError(
            f"{path} belongs to an unknown MPI (`mpirun --version`: {said[:120] or 'no output'}), "
            "so its options are unknown: Open MPI, MPICH, MVAPICH and Intel MPI are expected; "
            f"{BY_HAND}"
        )
    return found


def of_compiler(wrapper: Sequence[str]) -> MPI | None:
    """Return the MPI that a C++ compiler or wrapper compiles against; None if it finds no mpi.h."""
    macros = [*wrapper, "-E", "-dM", "-x", "c++", "-"]
    return parse_macros(_output(macros, "#include <mpi.h>\n", intel_variables()))


def compiler(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words of the C++ compiler that finds MPI: mpicxx, or $CXX (Cray: CC)."""
    if shutil.which("mpicxx"):
        return ["mpicxx"]
    return shlex.split(env.get("CXX", ""))


# Patterns of `mpirun --version` in a shell script, and which MPI has them; the last one is Hydra.
SHELL_PATTERNS = (
    ('*"Open MPI"*', MPI("openmpi", "4")),
    ("*Intel*", MPI("intelmpi", "2021")),
    ("*", MPI("mpich", "4")),
)


def intel_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return I_MPI_ROOT for an Intel MPI whose mpicxx lacks it: that of pip, in an environment."""
    path = shutil.which("mpicxx")
    if path is None or env.get("I_MPI_ROOT"):
        return {}
    prefix = Path(path).parent.parent
    # The wrapper of an installation by Intel's own installer knows its directory.
    unset = "I_MPI_SUBSTITUTE_INSTALLDIR" in _output([path, "-show"])
    return {"I_MPI_ROOT": str(prefix)} if unset and (prefix / "include/mpi.h").is_file() else {}


def _output(
    command: Sequence[str], text: str = "", variables: Mapping[str, str] | None = None
) -> str:
    import subprocess  # every command imports this module

    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ | (variables or {}),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


# --- command lines ------------------------------------------------------------


def argv(
    mpi: MPI,
    np: int,
    command: Sequence[str],
    hosts: str | None = None,
    exported: Sequence[str] = (),
    watched: bool = False,
) -> list[str]:
    """Return the argv that starts `command` on `np` ranks with the mpirun of `mpi`.

    Ranks are not bound to cores: Horovod's background thread would share its rank's core.

    Args:
        hosts: `name:slots,name:slots`; default: this machine, for any number of ranks.
        exported: names of environment variables that the ranks need.
        watched: a dead rank ends the others at once, and a broken connection is detected in
            seconds, as far as this MPI can (see `lacking`).
    """
    variables = _launcher_variables(mpi, watched)
    before = ["env", *variables] if variables else []
    options = [*_hosts(mpi, hosts), *binding(mpi), *(_watch(mpi) if watched else ())]
    if mpi.is_open_mpi:
        if os.geteuid() == 0:
            options.insert(0, "--allow-run-as-root")  # refused without it: containers
        options += exports(mpi, exported)
    return [*before, program(mpi), "-np", str(np), *options, *command]


def program(mpi: MPI) -> str:
    """Return the name of the launcher, which passes signals on to the ranks."""
    # Intel's mpirun is a script that starts mpiexec.hydra and does not pass signals on.
    return "mpiexec.hydra" if mpi.name == "intelmpi" else "mpirun"


def binding(mpi: MPI) -> list[str]:
    """Return the options that leave ranks unbound and fill one host after another."""
    if mpi.is_open_mpi:
        return ["--bind-to", "none", "--map-by", "slot"]
    return ["-genv", "I_MPI_PIN", "0"] if mpi.name == "intelmpi" else ["-bind-to", "none"]


def exports(mpi: MPI, names: Sequence[str]) -> list[str]:
    """Return the options that pass environment variables to ranks; Hydra passes all of them."""
    return [word for name in names for word in ("-x", name)] if mpi.is_open_mpi else []


def _hosts(mpi: MPI, hosts: str | None) -> list[str]:
    if mpi.is_open_mpi:
        # Open MPI counts cores, not hardware threads, and stops if ranks are more.
        return ["-H", hosts] if hosts else ["--oversubscribe"]
    if not hosts:
        return []
    # Intel MPI ignores slots in -hosts and -hostfile: it fills each host with a rank per core.
    return ["-machinefile", _machine_file(hosts)] if mpi.name == "intelmpi" else ["-hosts", hosts]


def host_file_option(mpi: MPI) -> str:
    """Return the option for a file in which a host has a line for each of its slots."""
    return "-machinefile" if mpi.name == "intelmpi" else "--hostfile"


@functools.cache
def _machine_file(hosts: str) -> str:
    """Return the path of a file with a line `name:slots` for each host, in this process's memory.

    mpiexec.hydra requires a regular file. Nothing is left when this process has ended.
    """
    file = os.memfd_create("hosts")
    os.write(file, hosts.replace(",", "\n").encode() + b"\n")
    return f"/proc/{os.getpid()}/fd/{file}"


def _watch(mpi: MPI) -> list[str]:
    """Return the options for connections between mpirun and its daemons, and for the end of ranks.

    Open MPI's defaults are minutes: with these, both ends detect a broken link after about 4 s,
    and each ends its ranks. When one rank is gone the others are killed at once; by default mpirun
    takes 4 s on two hosts. A request to stop is sent as SIGUSR1.
    """
    if not mpi.is_open_mpi:
        return []
    option, ssh = ("--prtemca", "plm_ssh_args") if mpi.is_prrte else ("--mca", "plm_rsh_args")
    parameters = {
        ssh: " ".join(SSH_OPTIONS),
        "oob_tcp_keepalive_time": "1",
        "oob_tcp_keepalive_intvl": "1",
        "oob_tcp_keepalive_probes": "3",
    }
    if not mpi.is_prrte:
        parameters["odls_base_sigkill_timeout"] = "0"
    return [word for name, value in parameters.items() for word in (option, name, value)]


def _launcher_variables(mpi: MPI, watched: bool) -> list[str]:
    """Return NAME=VALUE for what a launcher reads only from its own environment."""
    if mpi.is_open_mpi or not watched:
        return []
    name = "HYDRA_LAUNCHER_EXTRA_ARGS"
    if mpi.name == "intelmpi":
        name = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
    return [f"{name}={' '.join(SSH_OPTIONS)}"]


def lacking(mpi: MPI) -> list[str]:
    """Return what `argv(watched=True)` cannot ask of this MPI; a supervisor reports it at start."""
    if mpi.is_prrte:
        return ["mpirun kills the ranks of a failed job after a delay of its own, not at once"]
    if not mpi.is_open_mpi:
        return [
            "its launcher does not detect a broken link: if this host dies, ranks on other hosts "
            "remain until the run is started again"
        ]
    return []


def exit_code(mpi: MPI, code: int) -> int:
    """Return the exit code of a job from the exit code of its mpirun: 128 + n after signal n.

    Open MPI returns the code of the first rank that failed. Hydra returns a signal as its number,
    Intel MPI returns 255.
    """
    if mpi.is_open_mpi:
        return code
    if code == 255:
        return 1
    return 128 + code if code in _SIGNALS else code


# Signals that end a rank; hvdtrain uses none of their numbers as an exit code.
_SIGNALS = (4, 6, 7, 8, 9, 11, 15)
