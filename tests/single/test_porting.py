"""Ported scripts of docs/porting.md: the diffs there, and one curve on any number of ranks."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from hvdtrain.audit.report import audit
from tests.support import runs, warm

DOCS = runs.REPOSITORY / "docs"
PORTED = {
    **dict.fromkeys(["digits", "elastic", "imagenet", "benchmark", "policy"], "horovod"),
    **dict.fromkeys(["ddp", "trainer", "gan"], "torchrun"),
}
PRELOAD = "torch._dynamo"  # as soon as a script makes an optimizer: seconds of CPU time
IN_THE_GATE = ("policy", "gan")
MOST_CHANGED_LINES = 15
SHORT = [
    *("--train.duration", "12", "--telemetry.port", "0"),
    *("--exchange.name", "exact", "--runtime.threads", "1"),
]


def changes(name: str) -> list[str]:
    """Lines of the unified diff of a whole script, without its header."""
    old, new = (
        (DOCS / f"porting/{file}.py").read_text().splitlines()
        for file in (f"{name}_{PORTED[name]}", name)
    )
    return [*difflib.unified_diff(old, new, n=99, lineterm="")][3:]


@pytest.mark.parametrize("name", PORTED)
def test_page_shows_the_change_which_is_small(name: str) -> None:
    lines = changes(name)
    block = "```diff\n" + "\n".join(line.rstrip() for line in lines) + "\n```"
    assert block in (DOCS / "porting.md").read_text()
    new = [line for line in lines if line.startswith("+") and line != "+"]
    assert len(new) <= MOST_CHANGED_LINES, new


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_THE_GATE else pytest.mark.soak) for name in PORTED],
)
def test_ported_script_has_one_curve_and_resumes(name: str, tmp_path: Path) -> None:
    script = str(DOCS / f"porting/{name}.py")

    def train(run: str, launcher: str, *more: str) -> list[tuple[float, float]]:
        command = [warm.python(int([*launcher.split(":"), "1"][1]), PRELOAD), script]
        where = ["--run.root", str(tmp_path), "--run.id", run]
        where += ["--images", str(tmp_path / "images")] if name == "imagenet" else []
        done = runs.start(tmp_path, [*SHORT, *where, *more], launcher, command=command).wait(90)
        assert done.returncode == 0, done
        return [(line["loss"], line["grad_norm"]) for line in runs.metrics(tmp_path / run)]

    alone = train("alone", "")
    assert len(alone) == 12
    train("parts", "gloo:2", "--train.duration", "7")
    assert train("parts", "gloo:3") == alone
    assert audit(tmp_path / "parts").clean
