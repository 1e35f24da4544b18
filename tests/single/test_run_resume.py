"""An interrupted and resumed run is bitwise identical to an uninterrupted one."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.support.job import Finished
from tests.support.runs import REPOSITORY, TINY, losses, metrics, run, train, weights

STEPS = 20
MICRO_BATCHES = 4  # during a step
FLAGS = [
    *TINY,
    *("--task", "tests.support.tasks:Signalled", "--model.dropout", "0.1"),
    *("--train.duration", str(STEPS), "--checkpoint.every", "10"),
]


def _run(root: Path, run_id: str, *flags: str, signals: str = "") -> Finished:
    arguments = [*FLAGS, "--run.root", str(root), "--run.id", run_id, *flags]
    return run(root / "output", arguments, env={"HVDTRAIN_TEST_SIGNAL": signals})


def _in_step(name: str, step: int) -> str:
    """Send a signal in the middle of a step, counted from 1 since the start of the process."""
    return f"{name}:{(step - 1) * MICRO_BATCHES + 2}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of all runs, with "whole", an uninterrupted run."""
    root = tmp_path_factory.mktemp("runs")
    done = _run(root, "whole")
    assert done.returncode == 0, done
    return root


def _assert_whole(root: Path, run_id: str, first: int = 1) -> None:
    directory, whole = root / run_id, root / "whole"
    assert [line["step"] for line in metrics(directory)] == list(range(first, STEPS + 1))
    assert losses(directory) == losses(whole)[first - 1 :]
    assert weights(directory, STEPS) == weights(whole, STEPS)


def test_killed_run_resumes_identically_without_repeated_lines(root: Path) -> None:
    killed = _run(root, "killed", signals=_in_step("SIGKILL", 14))
    assert killed.returncode == -9, killed
    steps = [line["step"] for line in metrics(root / "killed")]
    # Those of the last tenth of a second may be missing; a checkpoint has all before it.
    assert steps == list(range(1, len(steps) + 1)) and 10 <= len(steps) <= 13
    with open(root / "killed/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 14, "los')  # a line torn by a power failure
    done = _run(root, "killed")
    assert done.returncode == 0, done
    assert "resumed from the checkpoint of step 10" in done.stderr, done
    _assert_whole(root, "killed")
    manifest = json.loads((root / "killed/manifest.json").read_text())
    assert [start["step"] for start in manifest["starts"]] == [0, 10]
    assert manifest["restarts"] == 1


def test_stop_signal_saves_a_checkpoint_and_exits_with_75(root: Path) -> None:
    # The flag is sent with the exchange of the next step, after which the run ends.
    for name, step, last in (("SIGTERM", 7, 8), ("SIGUSR1", 5, 14)):
        done = _run(root, "stopped", signals=_in_step(name, step))
        assert done.returncode == 75, done
        assert len(metrics(root / "stopped")) == last, done
        assert (root / f"stopped/checkpoints/step_{last:08}/complete").exists(), done
    assert _run(root, "stopped").returncode == 0
    _assert_whole(root, "stopped")


def test_stop_without_time_to_save_exits_with_75_and_resumes_identically(root: Path) -> None:
    grace = ("--preempt.grace_seconds", "0.0001")
    done = _run(root, "hurried", *grace, signals=_in_step("SIGTERM", 14))
    assert done.returncode == 75, done
    assert "(preempt.grace_seconds); the newest checkpoint is of step 10" in done.stderr, done
    assert not (root / "hurried/checkpoints/step_00000015").exists(), done
    assert _run(root, "hurried").returncode == 0
    _assert_whole(root, "hurried")


def test_second_signal_ends_the_run_at_once(root: Path) -> None:
    done = _run(root, "twice", signals="SIGUSR1:13,SIGTERM:14")
    assert done.returncode == 128 + 15, done


def test_resume_from_a_checkpoint_path_starts_there(root: Path) -> None:
    checkpoint = root / "whole/checkpoints/step_00000010"
    done = _run(root, "branch", "--run.resume", str(checkpoint))
    assert done.returncode == 0, done
    _assert_whole(root, "branch", first=11)


def test_resume_names_a_damaged_checkpoint_and_uses_an_older_one(root: Path) -> None:
    shutil.copytree(root / "whole", root / "damaged")
    path = root / "damaged/checkpoints/step_00000020/optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    done = _run(root, "damaged")
    assert done.returncode == 0, done
    reports = [line for line in done.stderr.splitlines() if "optimizer.safetensors" in line]
    assert len(reports) == 1 and "step_00000020" in reports[0], done
    _assert_whole(root, "damaged")


def test_branch_without_whole_checkpoints_is_not_started_again(
    root: Path,
) -> None:
    other = root / "whole/checkpoints/step_00000010"
    shutil.copytree(root / "whole", root / "unmarked")
    for directory in (root / "unmarked/checkpoints").iterdir():
        (directory / "complete").unlink()
    done = _run(root, "unmarked", "--run.resume", str(other))
    assert done.returncode == 2 and "is intact (step_00000020, step_00000010)" in done.stderr, done


REFUSED = {
    "never": (["--run.resume", "never"], "already contains a run"),
    "seed": (["--seed", "5"], "seed was 1234"),
    "data": (["--data.train", str(REPOSITORY / "README.md")], "the number of training samples was"),
    "model": (["--model.width", "64"], "of another model"),
    "path": (
        ["--run.resume", "nowhere/step_00000010"],
        "nowhere/step_00000010: expected auto, never",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_resume_leaves_the_run_unchanged(root: Path, case: str) -> None:
    flags, message = REFUSED[case]
    kept = {name: (root / "whole" / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    done = _run(root, "whole", *flags)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr and done.stdout == "", done
    assert done.stderr.count(message) == 1, done
    assert {name: (root / "whole" / name).read_bytes() for name in kept} == kept
    assert len(list((root / "whole/checkpoints").glob("step_*"))) == 2


def test_unwritable_run_root_is_reported_as_invalid_input(root: Path) -> None:
    # No user, including root, can create a directory below a file.
    below = str(root / "whole/config.yaml")
    done = _run(root, "run", "--run.root", below)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr and "run.root" in done.stderr, done


@pytest.mark.slow
def test_resume_from_a_slow_disk_survives_the_watchdog(tmp_path: Path) -> None:
    # Rank 0 reads the model, then both ranks read the optimizer's files; each read takes 6 s,
    # longer than a rank may be idle or missing in a collective.
    flags = [
        *("--task", "tests.support.disturbed:OnSlowDisk", "--parallel.shard.stage", "1"),
        *("--batch.global_size", "4", "--batch.micro_size", "2", "--elastic.hang_seconds", "3"),
        *("--telemetry.port", "0", "--run.root", str(tmp_path), "--run.id", "slow"),
    ]
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    for steps in ("2", "4"):
        done = run(tmp_path, [*flags, "--train.duration", steps], "gloo:2", env)
        assert done.returncode == 0, done
    assert "resumed from the checkpoint of step 2" in done.stderr, done


def test_run_whose_root_is_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "purged/runs")
    (tmp_path / "purged").write_text("a file")
    done = run(tmp_path / "output", [*TINY, "--run.root", str(tmp_path / "runs")])
    assert done.returncode == 2 and "cannot be written" in done.stderr, done


def test_run_without_an_id_never_resumes_one_of_the_same_second(tmp_path: Path) -> None:
    earlier = train(tmp_path, "earlier", ["--train.duration", "1"])
    names = set()
    now = time.time()
    for second in range(int(now), int(now) + 60):
        day = time.strftime("%Y%m%d-%H%M%S", time.localtime(second))
        names.add(f"{day}-language_model")
        shutil.copytree(earlier, tmp_path / f"{day}-language_model")
    flags = [*TINY, "--train.duration", "2", "--run.root", str(tmp_path)]
    done = run(tmp_path / "output", flags, "gloo:2")
    assert done.returncode == 0, done
    (own,) = {path.name for path in tmp_path.glob("2*")} - names
    assert own.endswith("-2") and own.removesuffix("-2") in names
    assert [line["step"] for line in metrics(tmp_path / own)] == [1, 2]
