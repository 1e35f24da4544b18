"""Ranks of horovodrun wait for a rank that begins late, longer than for a later exchange."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hvdtrain.errors import UserError
from hvdtrain.runtime import late_ranks
from tests.support import runs, warm
from tests.support.own_loops import PRELOAD, SHORT_LOOP

LATE = """
import os, time
if os.environ["HOROVOD_RANK"] == "0":
    time.sleep(9)  # downloads
"""


@pytest.fixture
def environment() -> Iterator[Callable[[int], dict[str, str]]]:
    server = RendezvousServer(secret="of this job")
    port = server.start()
    server.init([])
    yield lambda rank: {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "3",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_RENDEZVOUS_SECRET": "of this job",
    }
    server.stop()


def test_ranks_wait_until_the_last_one_has_come_and_meet_again(
    environment: Callable[[int], dict[str, str]],
) -> None:
    for _ in range(2):
        early = [
            threading.Thread(target=late_ranks.wait, args=(environment(rank),)) for rank in (1, 2)
        ]
        for thread in early:
            thread.start()
        time.sleep(0.3)
        assert all(thread.is_alive() for thread in early)
        late_ranks.wait(environment(0))
        for thread in early:
            thread.join()


def test_rank_that_waits_too_long_or_is_asked_to_stop_says_so(
    environment: Callable[[int], dict[str, str]],
) -> None:
    with pytest.raises(
        UserError, match=r"rank 1 .* waited for 0 s: not all of the 3 ranks"
    ) as raised:
        late_ranks.wait(environment(1), seconds=0.01)
    assert raised.value.exit_code == 1
    with pytest.raises(UserError, match="was asked to stop") as raised:
        late_ranks.wait(environment(1), stop=lambda: True)
    assert raised.value.exit_code == 75


def test_process_without_horovodrun_does_not_wait() -> None:
    late_ranks.wait({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"})


@pytest.mark.slow
def test_rank_0_may_come_later_than_the_limit_of_an_exchange(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE + SHORT_LOOP)
    flags = ["--train.duration", "2", "--batch.global_size", "4", "--telemetry.port", "0"]
    flags += ["--run.root", str(tmp_path), "--run.id", "run"]
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    command = [warm.python(2, PRELOAD), str(script)]
    done = runs.start(tmp_path / "output", flags, "gloo:2", env, command).wait(90)
    assert done.returncode == 0, done
    assert len(runs.losses(tmp_path / "run")) == 2
