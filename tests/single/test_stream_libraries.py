"""Datasets of libraries whose requirements contradict the tests' own: installed by these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.audit.report import audit
from tests.support import runs

pytestmark = pytest.mark.soak

SCRIPT = str(runs.REPOSITORY / "tests/support/scripts/stream_library.py")
STEPS = 12  # two passes and a part of the third
FLAGS = [
    *("--batch.global_size", "8", "--batch.micro_size", "2", "--telemetry.port", "0"),
    *("--exchange.name", "exact", "--runtime.threads", "1", "--run.id", "a"),
]
# With what they import and the tests' environment lacks. Without their other requirements: litdata
# declares an older huggingface_hub, mosaicml-streaming older NumPy and transformers.
PINS = {
    "mosaicml-streaming": "mosaicml-streaming==0.13.0 brotli==1.2.1 catalogue==2.0.10"
    " cramjam==2.14.0 python-snappy==0.7.3 xxhash==4.1.0 zstd==1.5.7.2",
    "litdata": "litdata==0.2.76 lightning-utilities==0.15.3 tifffile==2026.3.3",
}


@pytest.mark.parametrize("library", [*PINS])
def test_library_gives_the_samples_of_a_list_in_the_runs_order(
    library: str, tmp_path: Path
) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target"]
    packages = tmp_path / "packages"
    subprocess.run([*pip, str(packages), *PINS[library].split()], check=True)
    env = {
        "HVDTRAIN_TEST_LIBRARY": library,
        "HVDTRAIN_TEST_DATA": str(tmp_path / "data"),
        "PYTHONPATH": os.pathsep.join([str(runs.REPOSITORY), str(packages)]),
    }
    written = runs.start(tmp_path, ["write"], "", env, [sys.executable, SCRIPT]).wait(90)
    assert written.returncode == 0, written

    def losses(name: str, *starts: tuple[str, int, int], **more: str) -> list[float]:
        """Losses of a run by its starts: launcher, last step, loader.workers."""
        for launcher, steps, workers in starts:
            own = ["--train.duration", str(steps), "--loader.workers", str(workers)]
            argv = [*FLAGS, *own, "--run.root", str(tmp_path / name)]
            command = [sys.executable, SCRIPT]
            done = runs.start(tmp_path / name, argv, launcher, env | more, command).wait(90)
            assert done.returncode == 0, done
        report = audit(tmp_path / name / "a")
        assert report.clean and not report.lineage.findings, report.to_text()
        return runs.losses(tmp_path / name / "a")

    expected = losses("list", ("", STEPS, 0), HVDTRAIN_TEST_LIBRARY="list")
    assert len({*expected}) == STEPS
    assert losses("alone", ("", STEPS, 0)) == expected
    assert losses("two", ("gloo:2", STEPS, 0)) == expected
    assert losses("workers", ("mpirun:2", STEPS, 2)) == expected
    assert losses("resumed", ("gloo:2", 7, 1), ("", STEPS, 0)) == expected
