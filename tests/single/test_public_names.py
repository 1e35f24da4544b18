"""Public names: documented, and their examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain
from tests.support import runs

# The examples of hvdtrain.Run read the run of the example of hvdtrain.run.
EXAMPLES = """
import doctest, torch, hvdtrain
from hvdtrain.api.start import run

class OutputOfRunsLeftOut(doctest.OutputChecker):
    def check_output(self, want, got, flags):
        return not want or super().check_output(want, got, flags)

for name, value in (("run", run), ("Run", hvdtrain.Run), ("training", hvdtrain.training)):
    [test] = [t for t in doctest.DocTestFinder(recurse=False).find(value, name) if t.examples]
    test.globs.update(hvdtrain=hvdtrain, torch=torch)
    result = doctest.DocTestRunner(OutputOfRunsLeftOut()).run(test)
    print(name, result.attempted, result.failed)
"""


def test_examples_of_docstrings_do_what_they_show(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES],
        cwd=tmp_path,
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done
    found = [line.split() for line in done.stdout.splitlines() if line.endswith(" 0")]
    assert [name for name, _, _ in found] == ["run", "Run", "training"], done
    assert all(int(attempted) > 1 for _, attempted, _ in found), done


def test_listed_attributes_of_a_loop_exist_and_are_documented() -> None:
    from hvdtrain.engine.loop import Step

    [row] = re.findall(r"`hvdtrain.Training` \|.*", (runs.REPOSITORY / "docs/api.md").read_text())
    ours, of_step = (re.findall(r"`(\w+)`", part) for part in row.split("of a step:"))
    public, step = set(ours), set(of_step)
    assert {name for name in vars(hvdtrain.Training) if name[0] != "_"} == public - {"state"}
    assert step == {"index", "done", "result", "backward"}
    for owner, names in ((hvdtrain.Training, public), (Step, step)):
        text = owner.__doc__ or ""
        for name in names:
            assert f" {name}: " in text or getattr(owner, name).__doc__, name


@pytest.mark.parametrize("name", hvdtrain.__all__)
def test_public_name_is_documented(name: str) -> None:
    assert f"`hvdtrain.{name}`" in (runs.REPOSITORY / "docs/api.md").read_text()
    public = getattr(hvdtrain, name)
    documented = [public, *(getattr(public, n) for n in vars(public) if not n.startswith("_"))]
    assert not [one for one in documented if callable(one) and not one.__doc__]
