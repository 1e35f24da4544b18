"""All-reduce through the memory that the ranks of a host share, and without: patches 0027, 0032."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import runs, warm
from tests.support.job import Finished

pytestmark = pytest.mark.slow
RANKS = 3
# Of Gloo: seconds until a rank that does not respond is given up.
TIMEOUT = 2


def _run(
    directory: Path, launcher: str, module: str, *words: str, ranks: int = RANKS, **env: str
) -> Finished:
    command = [warm.python(ranks), "-m", module]
    settings = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", **env}
    return runs.start(directory, words, f"{launcher}:{ranks}", settings, command).wait(60)


@pytest.mark.parametrize("launcher", ["gloo", "mpirun"])
def test_three_ranks_sum_in_their_order(tmp_path: Path, launcher: str) -> None:
    done = _run(tmp_path, launcher, "tests.support.shared_sums")
    assert done.returncode == 0, done
    # The ranks of a set share memory too; the first rank is alone in its set.
    shared = re.findall(r"rank (\d) shares (\d)", done.stdout)
    assert sorted(shared) == [("0", "1"), ("1", "2"), ("2", "2")], done
    assert "do not share memory" not in done.stderr


@pytest.mark.alone
@pytest.mark.parametrize(("number", "within"), [("SIGKILL", 0.3), ("SIGSTOP", TIMEOUT + 1.0)])
def test_exchange_fails_when_a_rank_is_lost(tmp_path: Path, number: str, within: float) -> None:
    timeout = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUT)}
    done = _run(tmp_path, "gloo", "tests.support.lost_peer", number, **timeout)
    seconds = [float(text) for text in re.findall(r"failed after ([\d.]+) s", done.stdout)]
    assert len(seconds) == RANKS - 1, done
    assert max(seconds) < within, done


def test_small_sum_over_gloo_takes_pairs_of_ranks(tmp_path: Path) -> None:
    off = {"HOROVOD_SHARED_MEMORY": "0"}
    done = _run(tmp_path, "gloo", "tests.support.small_sums", ranks=7, **off)
    assert done.returncode == 0, done
    assert done.stdout.count("agrees") == 7


def test_sums_begun_together_are_rounded_as_one_after_another(tmp_path: Path) -> None:
    done = _run(tmp_path, "gloo", "tests.support.sums_together", **{"HOROVOD_SHARED_MEMORY": "0"})
    assert done.returncode == 0, done
    assert done.stdout.count("[] differ") == RANKS, done
