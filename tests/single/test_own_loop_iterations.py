"""Iterations of a script's own loop: no code counts twice, whatever ends or joins between."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support import runs, warm
from tests.support.own_loops import EXACT, FLAGS, PRELOAD, SCRIPTS, curve, train

SCRIPT = "around_the_block.py"
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    "what", ["target", "averages", *(pytest.param(w, marks=SOAK) for w in ("decay", "before"))]
)
def test_resumed_run_repeats_no_code_around_the_block(tmp_path: Path, what: str) -> None:
    env = {"HVDTRAIN_TEST_WHAT": what}
    whole = train(tmp_path, "whole", SCRIPT, "", *EXACT, **env)
    train(tmp_path, "parts", SCRIPT, "gloo:2", *EXACT, "--train.duration", "6", **env)
    ended = train(tmp_path, "parts", SCRIPT, "", *EXACT, **env)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert ended == whole


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("target", "block"),
        ("switch", "block"),
        ("averages", "evaluation"),
        ("before", "evaluation"),
        pytest.param("decay", "block", marks=SOAK),
        pytest.param("decay", "evaluation", marks=SOAK),
        pytest.param("averages", "block", marks=SOAK),
        pytest.param("before", "block", marks=SOAK),
    ],
)
def test_code_around_the_block_counts_once_after_rank_is_killed(
    tmp_path: Path, what: str, place: str
) -> None:
    env = {"HVDTRAIN_TEST_WHAT": what}
    whole = train(tmp_path, "whole", SCRIPT, "", *EXACT, **env)
    (tmp_path / "hosts").write_text("localhost:3\n")
    launcher = shlex.split(
        "horovodrun --gloo -np 3 --min-np 1 --max-np 3 --network-interfaces lo"
        f" --host-discovery-script 'cat {tmp_path}/hosts'"
    )
    command = [warm.python(3, PRELOAD), str(SCRIPTS / SCRIPT)]
    flags = [*FLAGS, *EXACT, "--run.root", str(tmp_path), "--run.id", "a"]
    env |= {"HVDTRAIN_TEST_KILL": f"{place} 5", "HVDTRAIN_TEST_KILLED": str(tmp_path / "killed")}
    env |= {"HVDTRAIN_TEST_PACE": "0.3"}
    done = runs.start(tmp_path / "output", flags, "", env, [*launcher, *command]).wait(180)
    assert done.returncode == 0, done
    events = map(json.loads, (tmp_path / "a/events.jsonl").read_text().splitlines())
    assert "failure" in [event["cause"] for event in events if event["event"] == "start"], done
    assert curve(tmp_path / "a") == curve(tmp_path / "whole")
    assert whole in done.stdout
