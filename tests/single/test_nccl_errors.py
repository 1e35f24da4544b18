"""Horovod's NCCL operations when a rank dies, with stubs of CUDA and NCCL (tests/horovod_nccl).

The stubs decide when a kernel ends and what NCCL reports, and find a communicator that is used
after it was freed. ThreadSanitizer finds accesses that Horovod's threads do not order.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from hvdtrain.horovod_wheel import build, recipe
from hvdtrain.horovod_wheel.process import BuildError
from tests.support.runs import REPOSITORY, environment

MAKEFILE = REPOSITORY / "tests" / "horovod_nccl" / "Makefile"
CACHE = REPOSITORY / "build" / "nccl_errors"
SANITIZE = "-fsanitize=thread"
SETTINGS = {
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_IFACE": "lo",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first one compiles


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Compile the program, unless it has been compiled from these files, and return its command."""
    source = CACHE / recipe.source_version()
    if not source.exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        written = tmp_path_factory.mktemp("nccl_errors") / "source"
        try:
            build.write_source(written)
        except BuildError as error:
            pytest.skip(str(error))
        CACHE.mkdir(parents=True)
        shutil.move(written, CACHE / "incomplete")
        (CACHE / "incomplete").rename(source)
    prefix = _sanitizer(tmp_path_factory.mktemp("sanitizer"))
    if prefix is None:
        warnings.warn("ThreadSanitizer does not run here: races are not detected", stacklevel=1)
    objects = source / ("plain" if prefix is None else "sanitized")
    objects.mkdir(exist_ok=True)
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    make = ["make", "-s", jobs, "-f", str(MAKEFILE), f"SOURCE={source}"]
    make.append(f"SANITIZE={SANITIZE if prefix is not None else ''}")
    # Not a part of the `make` that runs the tests.
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        make, cwd=objects, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [*(prefix or []), str(objects / "nccl_errors")]


def _sanitizer(directory: Path) -> list[str] | None:
    """Return what must precede a program with ThreadSanitizer, or None if none runs here.

    Some kernels place a program at more random addresses than it supports.
    """
    (directory / "empty.cc").write_text("int main() {}")
    compiler = [os.environ.get("CXX", "g++"), SANITIZE, "empty.cc", "-o", "empty"]
    for prefix in ([], ["setarch", "-R"]):
        try:
            for words in (compiler, [*prefix, "./empty"]):
                subprocess.run(words, cwd=directory, capture_output=True, check=True, timeout=60)
        except (OSError, subprocess.CalledProcessError):
            continue
        return prefix
    return None


def _run(command: list[str], case: str) -> None:
    done = subprocess.run(
        [*command, case],
        env=environment(SETTINGS),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[:6000]}"


@pytest.mark.parametrize(
    "case",
    [
        "launch_error",
        "launch_error_elastic",
        "asynchronous_error",
        "shutdown_after_error",
        "shutdown_while_pending",
        "shutdown_while_alltoall_is_pending",
        "shutdown_while_statuses_are_late",
    ],
)
def test_aborted_nccl_collectives_end_with_an_error(command: list[str], case: str) -> None:
    _run(command, case)


def test_shutdown_waits_for_nccl_collectives_of_a_healthy_job(command: list[str]) -> None:
    _run(command, "shutdown_while_completing")


def test_int64_sums_sent_together_by_nccl_keep_every_bit(command: list[str]) -> None:
    _run(command, "fused_int64")
