"""`hvdtrain doctor RUN`: most likely cause of a failure, the line that shows it, the key to set."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hvdtrain import cli, log
from hvdtrain.doctor.findings import Diagnosis
from hvdtrain.doctor.runs import diagnose
from tests.support import runs
from tests.support.job import poll
from tests.support.recorded import LongRun

TASK = "--batch.global_size 8 --batch.micro_size 2 --eval.every 0 --telemetry.port 0 --run.id case"


def _flags(root: Path, task: str, *flags: str) -> list[str]:
    arguments = ["--task", f"tests.support.tasks:{task}", *TASK.split()]
    return [*arguments, "--run.root", str(root), *flags]


def _check(finding: Diagnosis, check: str, says: str, mend: str) -> None:
    """Check the cause, and that the reported line shows it."""
    assert finding.check == check and says in finding.what and mend in finding.fix, finding
    path, _, rest = finding.where.partition(":")
    if number := re.match(r"\d+", rest):
        shown = Path(path).read_text().splitlines()[int(number[0]) - 1]
        assert says in shown, (finding, shown)


@pytest.mark.slow
def test_out_of_memory_run_is_explained(tmp_path: Path) -> None:
    assert runs.run(tmp_path / "output", _flags(tmp_path, "Large")).returncode == 1
    findings, _ = diagnose(tmp_path / "case")
    _check(findings[0], "memory", "DefaultCPUAllocator", "--batch.micro_size")
    assert findings[0].severity == "error"


@pytest.mark.slow
def test_diverged_run_is_explained(tmp_path: Path) -> None:
    flags = _flags(tmp_path, "NotFinite", "--train.max_nonfinite", "3")
    done = runs.run(tmp_path / "output", flags, env={"HVDTRAIN_TEST_NAN": "3-"})
    assert done.returncode == 3, done
    findings, how = diagnose(tmp_path / "case")
    _check(findings[0], "not finite", "the gradient is not finite", "--optim.lr")
    assert how == "how it ended: ended with exit code 3"


@pytest.mark.slow
def test_run_killed_from_outside_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = runs.start(tmp_path / "output", _flags(tmp_path, "Slow", "--train.duration", "1000"))
    metrics = tmp_path / "case" / "metrics.jsonl"
    poll(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, 60, "steps")
    job.kill()
    assert cli.main(["doctor", str(tmp_path / "case")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no end 0 errors, 1 warning" in shown and "dmesg" in shown, shown


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A long simulated run: 2 hosts, a slow rank in its second quarter."""
    LongRun(tmp_path / "run", 200, 24, ())
    return tmp_path / "run"


def _ended(directory: Path, code: int | None) -> None:
    """Replace the end of the run; None: it has no end."""
    path = directory / "events.jsonl"
    lines = path.read_text().splitlines()[:-1]
    if code is not None:
        lines.append(json.dumps({"event": "end", "time": 2e9, "step": 200, "exit_code": code}))
    path.write_text("\n".join(lines) + "\n")


def _log(directory: Path, rank: int, *errors: str) -> None:
    """Log an error as a rank does at its end."""
    log.close()
    log.to_file(directory / "logs", rank, f"node{rank}")
    for error in errors:
        log.logger.error(error)
    log.close()


LOST = "HorovodInternalError: Connection closed by peer"
# Log lines, and the expected fixes.
MESSAGES = {
    "gpu memory": (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "micro_size",
    ),
    "memory": ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "workers"),
    "shared memory": ("RuntimeError: DataLoader worker is killed by signal: Bus error", "/dev/shm"),
    "nccl": ("RuntimeError: NCCL error: ncclUnhandledCudaError: Call to CUDA failed", "NCCL_DEBUG"),
    "gpu": ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "--hosts"),
    "disk": ("checkpoint of step 9 could not be written: No space left on device", "--run.root"),
    "network": ("UserError: the rendezvous failed 20 times in a row", "doctor --hosts"),
    "owner": ("UserError: runs/a was taken over by process 7 on node2", "--run.id"),
    "rank lost": (LOST, "dmesg"),
}


@pytest.mark.parametrize("check", MESSAGES)
def test_log_line_identifies_the_root_cause(finished: Path, check: str) -> None:
    message, mend = MESSAGES[check]
    _ended(finished, 1)
    _log(finished, 0, LOST)
    _log(finished, 3, "another thing", message)
    findings, _ = diagnose(finished)
    _check(findings[0], check, message, mend)


def test_hung_rank_is_explained_by_its_stack(finished: Path) -> None:
    _ended(finished, 1)
    _log(finished, 0, LOST)
    (finished / "logs" / "hang_node1_2.txt").write_text(
        "\n2026-01-02 03:04:05 killed by its watchdog: no progress for 60 s, while TRAINING\n"
        "thread 7: python, kernel futex_wait, call 202\n"
        'Thread 0x00007f (most recent call first):\n  File "/data/lock.py", line 7 in acquire\n'
    )
    findings, _ = diagnose(finished)
    assert findings[0].check == "hang" and 'File "/data/lock.py", line 7' in findings[0].what
    assert findings[0].where.endswith("hang_node1_2.txt:2")


def test_failed_checkpoint_is_explained_by_its_event(finished: Path) -> None:
    path = finished / "events.jsonl"
    event = {"event": "checkpoint_failed", "time": 2e9, "step": 3, "error": "OSError: [Errno 28]"}
    path.write_text(path.read_text() + json.dumps(event) + "\n")
    findings, _ = diagnose(finished)
    _check(findings[0], "disk", "checkpoint_failed", "--run.root")
    assert findings[0].severity == "warning"  # the run finished


def test_wrong_gradient_is_explained_by_its_event(finished: Path) -> None:
    path = finished / "events.jsonl"
    event = {"event": "replay", "time": 2e9, "step": 3, "verdict": "inexact", "hosts": []}
    path.write_text(path.read_text() + json.dumps(event) + "\n")
    assert not any(finding.check == "wrong gradient" for finding in diagnose(finished)[0])
    event = {**event, "verdict": "wrong", "hosts": ["node2"]}
    path.write_text(path.read_text() + json.dumps(event) + "\n")
    found = [finding for finding in diagnose(finished)[0] if finding.check == "wrong gradient"]
    _check(found[0], "wrong gradient", "node2", "exclude the named host")


def test_kill_after_memory_growth_is_attributed_to_memory(finished: Path) -> None:
    _ended(finished, None)
    path = finished / "ranks.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["host_memory_bytes"][5] = int(2e9 * (1 + number))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    findings, _ = diagnose(finished)
    assert findings[0].check == "memory" and "rank 5 grew from" in findings[0].what


def test_slow_rank_is_named(finished: Path) -> None:
    findings, how = diagnose(finished)
    assert how == "how it ended: finished"
    (finding,) = [one for one in findings if one.check == "straggler"]
    assert "rank 17 on node2 was slow for 50 steps" in finding.what
    assert "most in: data" in finding.what and "loader.workers" in finding.fix


@pytest.mark.parametrize(
    ("phase", "check", "key"),
    [
        ("data", "data-bound", "--loader.workers"),
        ("comm_exposed", "communication-bound", "--exchange.wire"),
    ],
)
def test_bottleneck_of_a_run_is_named(finished: Path, phase: str, check: str, key: str) -> None:
    path = finished / "ranks.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["phases"][phase] = [2.0] * 24
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = finished / "events.jsonl"
    kept = [line for line in events.read_text().splitlines() if "straggler" not in line]
    events.write_text("\n".join(kept) + "\n")
    findings, _ = diagnose(finished)
    (finding,) = [one for one in findings if one.check == check]
    assert key in finding.fix and finding.severity == "warning"


@pytest.mark.parametrize("code", [2, None])
def test_unexplained_failure_is_reported_with_its_last_error(
    finished: Path, code: int | None
) -> None:
    _ended(finished, code)
    _log(finished, 0, "ValueError: the task's own")
    findings, _ = diagnose(finished)
    assert findings[0].check == "error" and "the task's own" in findings[0].what
