"""The runs of a check, and their commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.check.process import finish
from hvdtrain.check.traces import RunTrace
from hvdtrain.checkpoint.layout import finished, step_of
from hvdtrain.errors import UserError
from hvdtrain.launch.commands import elastic_horovodrun, horovodrun
from hvdtrain.run_files.digests import VARIABLE, DigestFiles
from hvdtrain.run_files.events_file import each_line
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime import environment
from hvdtrain.runtime.machine import cores
from hvdtrain.untrusted import printable_lines

RANKS = 2
_WORKERS = 2
_HASH_SEED = "PYTHONHASHSEED"
# The exchange is replaced, because only exact is bitwise identical on any number of ranks. Nothing
# is compared, uploaded, measured or logged elsewhere.
_FIXED = (
    *("--exchange.name=exact", "--exchange.wire=float32", "--exchange.compression=none"),
    *("--exchange.reduce=average", "--exchange.sync_every=0", "--exchange.outer=none"),
    *("--precision.cudnn_benchmark=false", "--integrity.replay_every=0"),
    *("--train.log_every=1", "--train.replica_check_every=0", "--train.patience=0"),
    *("--checkpoint.every_seconds=0", "--checkpoint.mirror=null", "--preempt.notice=null"),
    *("--telemetry.port=0", "--telemetry.tensorboard=false", "--telemetry.wandb_project=null"),
    *("--telemetry.mlflow_experiment=null", "--profile.steps=null"),
)
_ERROR = "error: "


@dataclass(frozen=True)
class CheckRun:
    """One run, after its end.

    Args:
        title: as shown.
        code: exit code; None: it took too long.
        directory: its run directory.
        output: lines of its output.
        failure: why it has not ended well; "" if it has.
    """

    title: str
    code: int | None
    directory: RunDirectory
    output: list[str]
    trace: RunTrace
    failure: str
    seconds: float

    def warnings(self) -> list[str]:
        """Warnings of its ranks, without repetitions."""
        lines = (line for path in sorted(self.directory.logs.glob("*")) for line in each_line(path))
        found = [line for line in lines if line is not None and line.get("level") == "warning"]
        return [*dict.fromkeys(str(line["message"]) for line in found)]


@dataclass
class RunStarter:
    """Starts the runs of a check, one after another.

    Args:
        command: argv of a rank.
        steps: steps of each run.
        directory: for all files.
        seconds: limit of each run.
        say: called with the title of a run that starts.
    """

    command: Sequence[str]
    steps: int
    directory: Path
    seconds: float
    say: Callable[[str], None]
    _started: int = field(init=False, default=0)

    @property
    def half(self) -> int:
        """The step after which a run is stopped, or loses a rank."""
        return self.steps // 2

    @property
    def threads(self) -> int:
        """Threads of each rank, unless the command sets them."""
        return max(1, cores() // RANKS)

    def alone(self, title: str = "1 rank", workers: int = 0, hash_seed: int = 1) -> CheckRun:
        """Run on one rank, which saves a checkpoint at half of the steps."""
        keys = [f"--checkpoint.every={self.half}"]
        return self._run(title, lambda command: [*command], keys, workers, hash_seed)

    def on_ranks(self, workers: int = _WORKERS) -> CheckRun:
        """Run on several ranks, with data workers."""
        with_workers = f", {workers} data workers each" if workers else ""
        title = f"{RANKS} ranks{with_workers}"
        return self._run(title, lambda command: horovodrun(RANKS, command), [], workers, 2)

    def resumed(self, first: CheckRun, ranks: int = RANKS) -> CheckRun:
        """Continue the run on one rank from its checkpoint, in new processes."""
        checkpoints = finished(first.directory.checkpoints)
        found = [path for path in checkpoints if step_of(path) == self.half]
        if not found:
            raise UserError(
                f"the run has no checkpoint of step {self.half}: with --steps {self.steps} it "
                f"ended after step {first.trace.last}"
            )
        title = f"stopped after step {self.half}, resumed on {ranks} rank{'s'[: ranks > 1]}"
        seed = 3 if ranks > 1 else 1

        def launch(command: Sequence[str]) -> list[str]:
            return horovodrun(ranks, command) if ranks > 1 else [*command]

        return self._run(title, launch, [f"--run.resume={found[0]}"], 0, seed)

    def elastic(self) -> CheckRun:
        """Run on several ranks, of which rank 0 is killed; a new process joins the others."""
        discovery = [sys.executable, "-m", "hvdtrain.cli", "discover"]
        discovery += ["--hosts", f"localhost:{RANKS}"]
        title = f"rank 0 killed after step {self.half}, another rank joined"
        return self._run(
            title,
            lambda command: elastic_horovodrun(RANKS, 1, RANKS, discovery, command),
            [],
            0,
            4,
            lambda files: files.plan_failure(self.half, RANKS),
        )

    def _run(
        self,
        title: str,
        launch: Callable[[Sequence[str]], list[str]],
        keys: Sequence[str],
        workers: int,
        hash_seed: int,
        prepare: Callable[[DigestFiles], None] = lambda files: None,
    ) -> CheckRun:
        self.say(title)
        root = self.directory / title.replace(" ", "-").replace(",", "")
        digests = root / "digests"
        digests.mkdir(parents=True)
        prepare(DigestFiles(digests))
        flags = [
            *_FIXED,
            f"--checkpoint.every={self.steps}",
            *(() if self._sets_threads() else (f"--runtime.threads={self.threads}",)),
            f"--train.duration={self.steps}",
            f"--loader.workers={workers}",
            f"--run.root={root}",
            "--run.id=run",
            *keys,
        ]
        env = {**os.environ, VARIABLE: str(digests)}
        environment.forget_launcher(env)
        if env.get(_HASH_SEED, "random") == "random":
            # Different in each run, as without the variable, but the run can be repeated.
            env[_HASH_SEED] = str(hash_seed)
        began, output = time.monotonic(), root / "output"
        code = finish(launch([*self.command, *flags]), env, output, self.seconds)
        lines = output.read_text(errors="replace").splitlines()
        trace = RunTrace.read(digests)
        failure = _failure(code, lines, self.seconds)
        directory, seconds = RunDirectory(root / "run"), time.monotonic() - began
        return CheckRun(title, code, directory, lines, trace, failure, seconds)

    def _sets_threads(self) -> bool:
        return any(word.partition("=")[0] == "--runtime.threads" for word in self.command)


def pins_hashes() -> bool:
    """Whether the user's environment fixes the order of sets of text."""
    return os.environ.get(_HASH_SEED, "random") != "random"


def _failure(code: int | None, lines: Sequence[str], seconds: float) -> str:
    if code == 0:
        return ""
    if code is None:
        return f"did not end within {seconds:.0f} s (--timeout)"
    errors = [line for line in lines if _ERROR in line]
    last = [line for line in lines if line.strip()][-1:]
    reason = errors[0].partition(_ERROR)[2] if errors else "".join(last) or "no output"
    return printable_lines(f"ended with exit code {code}: {reason}")
