"""Make Horovod's wheel: download, check, unpack, patch, compile, cache.

recipe  = recipe.detect()                torch, MPI, operations, patches -> a name
wheel   = the cached file of that name, else
          check_prerequisites()          all at once, before any download
          download -> unpack -> patch -> compile -> rename into the cache
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.horovod_wheel import cuda, recipe
from hvdtrain.horovod_wheel.diagnose import diagnose, how_to_install
from hvdtrain.horovod_wheel.process import BuildError, pip, run_logged, say
from hvdtrain.horovod_wheel.recipe import installed_version
from hvdtrain.launch import mpi as mpis

DOWNLOAD_TIMEOUT_S = 900.0
PATCH_TIMEOUT_S = 60.0
COMPILE_TIMEOUT_S = 5400.0
INSTALL_TIMEOUT_S = 600.0
_MEMORY_PER_JOB = 2 * 1024**3  # bytes that g++ needs for one file that includes torch
# program -> Debian/Ubuntu package
PROGRAMS = {
    "patch": "patch",
    "cmake": "cmake",
    "make": "make",
    "g++": "g++",
}
MPI_PROGRAMS = {"mpicxx": "libopenmpi-dev", "mpirun": "openmpi-bin"}
# module -> pip package
MODULES = {
    "torch": "torch",
    "pip": "pip",
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "yaml": "pyyaml",
    "psutil": "psutil",
}


def default_wheel_dir() -> Path:
    """The directory of the cached wheels: $XDG_CACHE_HOME or ~/.cache, /hvdtrain/wheels."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "hvdtrain" / "wheels"


def build(
    gpu: str = "none", mpi: bool = True, wheel_dir: Path | None = None, verbose: bool = False
) -> Path:
    """Return the path of the wheel for this environment; compile it if it is not cached.

    Raises UserError if something is missing, BuildError if a step fails.
    """
    directory = (wheel_dir or default_wheel_dir()).expanduser().absolute()
    # First, because a cached wheel requires no compiler.
    cached = _cached(directory, gpu, mpi)
    if cached:
        say(f"Horovod's wheel is cached: {cached.name}")
        return cached
    toolkit = cuda.find() if gpu != "none" else None
    check_prerequisites(mpi, toolkit)
    made = recipe.detect(gpu, mpi)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Use a directory inside the cache, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(prefix=".build-", dir=directory) as scratch:
            return _make(made, toolkit, Path(scratch), directory, verbose)
    except OSError as error:
        raise BuildError(
            f"cannot build in {directory}: {error}; choose another --wheel-dir"
        ) from error


def check_prerequisites(mpi: bool = True, toolkit: cuda.Toolkit | None = None) -> None:
    """Raise UserError that lists everything that is missing, and how to install it.

    Args:
        mpi: whether Horovod is built with MPI.
        toolkit: CUDA for a build with GPU operations.
    """
    needed = PROGRAMS | (MPI_PROGRAMS if mpi and not _mpi_without_mpicxx() else {})
    programs = [name for name in needed if not _has_program(name)]
    packages = [needed[name] for name in programs]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        programs.append("Python.h")
        packages.append("python3-dev")
    modules = [MODULES[name] for name in MODULES if importlib.util.find_spec(name) is None]
    no_cuda = toolkit.missing if toolkit else ""
    if not (programs or modules or no_cuda):
        return
    lines = ["Horovod cannot be compiled here yet."]
    if programs:
        lines.append(f"  missing on this machine: {', '.join(programs)}")
        lines.append(f"    {how_to_install(packages)}")
        if any(name in MPI_PROGRAMS for name in programs):
            lines.append("    or load your site's MPI (module load ...; on a Cray: CC=cc CXX=CC)")
            lines.append("    or, if Gloo is enough: --without-mpi")
    if modules:
        python = shlex.quote(sys.executable)
        lines.append(f"  missing in this Python environment: {', '.join(modules)}")
        lines.append(f"    {python} -m pip install {' '.join(modules)}")
    if no_cuda:
        lines.append(f"  missing for GPUs: {no_cuda}")
    raise UserError("\n".join(lines))


def _mpi_without_mpicxx() -> bool:
    """Whether $CXX is a wrapper that finds MPI itself, as on a Cray, whose srun starts ranks."""
    words = mpis.compiler()
    return words not in ([], ["mpicxx"]) and mpis.of_compiler(words) is not None


def _has_program(name: str) -> bool:
    if name == "g++" and os.environ.get("CXX"):
        name = shlex.split(os.environ["CXX"])[0]
    return shutil.which(name) is not None


def install(wheel: Path) -> None:
    """Install `wheel` here unless exactly its version is already installed.

    Raises BuildError if pip fails.
    """
    version = wheel.name.split("-")[1]
    if installed_version("horovod") == version:
        say(f"horovod {version} is already installed")
        return
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "pip.log")
        # --no-deps: Horovod's requirements are in hvdtrain's extra and have been checked.
        code = run_logged([*pip("install"), str(wheel)], log, INSTALL_TIMEOUT_S)
        if code:
            line, _ = diagnose(log.read_text(errors="replace"))
            raise BuildError(f"pip could not install {wheel}: {line}")
    say(f"horovod {version} is installed")


def download(directory: Path) -> Path:
    """Fetch the sdist with pip (which knows the user's mirrors) and check its sha256.

    Returns the archive's path. Raises BuildError if the download fails.
    """
    requirements = directory / "requirements.txt"
    requirements.write_text(f"horovod=={recipe.VERSION} --hash=sha256:{recipe.SDIST_SHA256}\n")
    log = directory / "download.log"
    command = [*pip("download"), "--no-binary", ":all:", "--no-build-isolation"]
    command += ["--require-hashes", "-d", str(directory), "-r", str(requirements)]
    code = run_logged(command, log, DOWNLOAD_TIMEOUT_S)
    archive = directory / f"horovod-{recipe.VERSION}.tar.gz"
    if code or not archive.is_file():
        line, _ = diagnose(log.read_text(errors="replace"))
        raise BuildError(
            f"cannot download horovod {recipe.VERSION}: {line}\n"
            "  check the network, and pip's index and proxy settings (pip config list)"
        )
    return archive


def write_source(directory: Path) -> None:
    """Write Horovod's patched source into `directory`, for other builds than `build`.

    Its version, such as 0.28.1+p01234567, tells hvdtrain which patches it has.

    Raises:
        UserError: `directory` is a file or not empty, or `patch` is not installed.
        BuildError: the source cannot be downloaded or written.
    """
    try:
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise UserError(f"{directory} is not an empty directory: name a new one")
        if shutil.which("patch") is None:
            raise UserError(f"patch is not installed: {how_to_install(['patch'])}")
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            say(f"downloading the source of horovod {recipe.VERSION}")
            source = unpack_and_patch(download(scratch), scratch)
            version = source / "horovod" / "__init__.py"
            text = version.read_text()
            version.write_text(text.replace(recipe.VERSION, recipe.source_version()))
            shutil.copytree(source, directory, symlinks=True, dirs_exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot write the source into {directory}: {error}") from error


def unpack_and_patch(archive: Path, directory: Path) -> Path:
    """Unpack the sdist into `directory` and apply every patch; return the source directory.

    Raises BuildError if a patch does not apply.
    """
    with tarfile.open(archive) as content:
        content.extractall(directory)  # its sha256 matches the recipe
    source = directory / f"horovod-{recipe.VERSION}"
    for patch in recipe.patches():
        command = ["patch", "-p1", "--batch", "--fuzz=0", "-d", str(source), "-i", str(patch)]
        log = directory / "patch.log"
        if run_logged(command, log, PATCH_TIMEOUT_S):
            output = log.read_text(errors="replace").strip()
            raise BuildError(f"{patch} does not apply to horovod {recipe.VERSION}:\n{output}")
    return source


def _make(
    made: recipe.Recipe, toolkit: cuda.Toolkit | None, scratch: Path, directory: Path, verbose: bool
) -> Path:
    say(f"building horovod {made.version}")
    say("downloading the source")
    source = unpack_and_patch(download(scratch), scratch)
    say(f"compiling on {_jobs()} cores: this takes a few minutes, once")
    log = scratch / "compile.log"
    out = scratch / "out"
    # Error messages name source files; strip the directory, which is deleted by then. Horovod gets
    # Python's headers from distutils, which Python 3.12 no longer has.
    headers = sysconfig.get_path("include")
    flags = f"{os.environ.get('CXXFLAGS', '')} -I{headers} -ffile-prefix-map={source}/="
    # The wheel's name states its GPU operations, so the user's variables must not select any.
    theirs = {name: text for name, text in os.environ.items() if not name.startswith("HOROVOD_GPU")}
    environment = {**theirs, **made.environment, "MAKEFLAGS": _makeflags(), "CXXFLAGS": flags}
    environment |= _compiler_cache(scratch)
    environment |= mpis.intel_variables()
    if toolkit is not None:
        environment |= cuda.environment(toolkit, scratch)
    command = [*pip("wheel"), "-v", "--no-build-isolation", "-w", str(out), str(source)]
    code = run_logged(command, log, COMPILE_TIMEOUT_S, environment, verbose=verbose, progress=True)
    wheel = _find(out, made)
    if code or wheel is None:
        kept = directory / f"horovod-{made.version}.log"
        shutil.copyfile(log, kept)
        line, advice = diagnose(log.read_text(errors="replace"))
        what_to_do = f"\n  {advice}" if advice else ""
        raise BuildError(f"Horovod did not compile: {line}{what_to_do}\n  full log: {kept}")
    os.replace(wheel, directory / wheel.name)
    return directory / wheel.name


def _compiler_cache(scratch: Path) -> dict[str, str]:
    """Variables with which CMake compiles through ccache, if it is installed.

    A wheel for another MPI then compiles only the files that include mpi.h.
    """
    if shutil.which("ccache") is None:
        return {}
    # Each build has another directory.
    own = {"CCACHE_BASEDIR": str(scratch), "CCACHE_NOHASHDIR": "1"}
    return own | {f"CMAKE_{name}_COMPILER_LAUNCHER": "ccache" for name in ("C", "CXX")}


def _cached(directory: Path, gpu: str, mpi: bool) -> Path | None:
    """Return the wheel of this environment, if it is known and cached."""
    try:
        return _find(directory, recipe.detect(gpu, mpi))
    except (PackageNotFoundError, UserError):  # no torch or no MPI: the prerequisites name them
        return None


def _find(directory: Path, made: recipe.Recipe) -> Path | None:
    return next(iter(sorted(directory.glob(made.wheel_pattern()))), None)


def _jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _MEMORY_PER_JOB))


def _makeflags() -> str:
    # Under `make` the variable holds the flags of the outer make, which do not apply here.
    under_make = "MAKELEVEL" in os.environ
    return (not under_make and os.environ.get("MAKEFLAGS")) or f"-j{_jobs()}"
