"""`hvdtrain check`: comparisons, causes, planted faults, and no false alarm."""

from __future__ import annotations

import os
import random
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hvdtrain.check.causes import CheckEvidence, likely_causes
from hvdtrain.check.certificate import Certificate, Row, check
from hvdtrain.check.process import finish
from hvdtrain.check.runs import CheckRun, RunStarter
from hvdtrain.check.traces import OPTIONS, Difference, Name, RunTrace, first_difference
from hvdtrain.cli import main
from hvdtrain.run_files.digests import DigestFiles
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.content import TooLargeError, content_of
from tests.support import runs, warm
from tests.support.scripts import misuse

DOCS = runs.REPOSITORY / "docs"
SCRIPTS = Path(misuse.__file__).parent
FAULTY = str(SCRIPTS / "faulty.py")
PRELOAD = "torch._dynamo"  # as soon as a script makes an optimizer: seconds of CPU time
SECONDS = 120

# --- comparison --------------------------------------------------------------


def state(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "starts": False,
        "rank": 0,
        "size": 1,
        "digests": {"parameter a": f"p{step}", "buffer b": f"b{step}"},
        "objects": {"training.state['best']": [f"o{step}", [1.0 + step], "r"]},
        "unsaved": {"variable count": f"{step}"},
        "values": {"loss": 1 / step if step else 0.0, "accuracy": 0.5},
        "exact": ["loss"],
        **more,
    }


def trace(*lines: dict[str, Any], samples: str = "s") -> RunTrace:
    made = RunTrace(samples={(1, 0): [[[7, samples]]]})
    for number, line in enumerate(lines):
        own = {"process": number, **line}
        made.starts += [own] if own["starts"] else []
        if not own["starts"]:
            made.steps.setdefault(own["step"], []).append(own)
    return made


def reference() -> RunTrace:
    return trace(state(0, starts=True), state(1), state(2))


def test_equal_traces_have_no_difference() -> None:
    assert first_difference(reference(), reference()) is None


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"digests": {"parameter a": "x", "buffer b": "b2"}}, "step 2: parameter a"),
        ({"digests": {"parameter a": "p2", "buffer b": "x"}}, "step 2: buffer b"),
        ({"digests": {"parameter a": "p2"}}, "step 2: buffer b"),
        ({"values": {"loss": 0.5000001, "accuracy": 0.5}}, "step 2: loss (0.5, not 0.5000001)"),
        ({"values": {"loss": 0.5, "accuracy": 0.6}}, "step 2: accuracy (0.5, not 0.6)"),
        (
            {"objects": {"training.state['best']": ["x", [4.0], "r"]}},
            "step 2: training.state['best'] (3, not 4)",
        ),
        (
            {"objects": {"training.state['best']": ["x", [3.0], "x"]}},
            "step 2: training.state['best']",
        ),
    ],
)
def test_first_difference_is_named(changed: dict[str, Any], text: str) -> None:
    found = first_difference(reference(), trace(state(1), state(2, **changed)))
    assert found is not None and found.to_text() == text


def test_rank_that_differs_is_named() -> None:
    other = trace(state(1), state(1, rank=1, digests={"parameter a": "x", "buffer b": "b1"}))
    found = first_difference(reference(), other)
    assert found is not None and found.ranks == (1,)
    assert found.to_text() == "step 1, on rank 1: parameter a"


def test_run_that_ends_earlier_is_not_the_same() -> None:
    runs_of = [
        CheckRun("", 0, RunDirectory(Path()), [], trace(*lines), "", 0.0)
        for lines in ((state(1), state(2)), (state(1),))
    ]
    row = Row.of(*runs_of)
    assert not row.same and row.to_text() == "ended after step 1, not 2"


def test_numbers_of_evaluations_may_be_rounded() -> None:
    rounded = {
        "objects": {"training.state['best']": ["x", [3.0 + 1e-6], "r"]},
        "values": {"loss": 0.5, "accuracy": 0.5 + 1e-7},
    }
    assert first_difference(reference(), trace(state(1), state(2, **rounded))) is None


def test_samples_are_named_before_their_results() -> None:
    other = trace(state(1, digests={}), samples="x")
    found = first_difference(reference(), other)
    assert found is not None
    assert found.to_text() == "step 1: the contents of sample 7"
    assert found.kinds == {"sample", "parameter", "buffer"}


def test_state_of_a_process_that_begins_is_compared() -> None:
    resumed = trace(state(1, starts=True, digests={"parameter a": "x", "buffer b": "b1"}))
    found = first_difference(reference(), resumed)
    assert found is not None and found.starts
    assert found.to_text() == "at its start after step 1: parameter a"


def test_variables_that_a_new_process_has_lost_are_named() -> None:
    lost = {"variable count": "0", "variable loss": "y"}
    start = state(1, starts=True, unsaved={"variable count": "0"})
    resumed = trace(start, state(2, values={"loss": 9.0}, unsaved=lost))
    found = first_difference(reference(), resumed)
    assert found is not None and found.unsaved == ("variable count",)


# --- causes ------------------------------------------------------------------


def difference(kind: str, name: str = "", *values: float, **more: Any) -> Difference:
    pair = (values[0], values[1]) if values else None
    return Difference(5, False, (Name(kind, name or kind, pair),), (0,), **more)


@pytest.mark.parametrize(
    ("differences", "cause"),
    [
        ({"repeat": difference("value", "loss", 1.0, 1.5)}, "unseeded random numbers, or the time"),
        ({"repeat": difference("value", "loss", 1.0, 1.0000001)}, "a non-deterministic kernel"),
        ({"hashes": difference("value")}, "hash order"),
        ({"ranks": difference("buffer", "buffer 1.running_mean")}, "BatchNorm"),
        ({"ranks": difference("buffer", "buffer codes")}, "buffer codes: changed outside"),
        ({"ranks": difference("object", "training.state['a']")}, "training.state['a']: computed"),
        ({"ranks": difference("logged", "accuracy")}, "accuracy: an evaluation that depends"),
        ({"ranks": difference("options")}, "the learning rate depends on the rank"),
        ({"ranks": difference("value", "loss", 1.0, 2.0)}, "the loss or the gradient depends"),
        ({"ranks": difference("sample"), "workers": difference("sample")}, "a dataset that returns "
         "different contents in data workers"),
        ({"ranks": difference("sample"), "elastic": difference("sample")}, "a dataset that returns "
         "different contents for a number"),
        ({"ranks": difference("sample")}, "a dataset whose contents depend on the rank"),
        ({"resumed": difference("options")}, "an unregistered scheduler"),
        ({"resumed": replace(difference("other", "loss_scale"), starts=True)}, "loss_scale: "
         "load_state_dict() does not restore"),
        ({"resumed": difference("value", unsaved=("buffer m (persistent=False)",))}, "buffer m"),
        ({"resumed": difference("parameter", unsaved=("attribute k of SGD",))}, "state outside"),
        ({"elastic": difference("value")}, "state outside training.state that the script changes"),
        ({"elastic": difference("options", OPTIONS)}, "an unregistered scheduler"),
    ],
)  # fmt: skip
def test_cause_follows_from_what_differs(differences: dict[str, Difference], cause: str) -> None:
    again = {"repeated": reference()} if "repeat" in differences else {}
    [first, *_] = likely_causes(CheckEvidence(reference(), **differences, **again))  # type: ignore[arg-type]
    assert first.startswith(cause)


def test_samples_under_other_numbers_are_an_unseeded_split() -> None:
    moved = RunTrace(samples={(1, 0): [[[8, "s"]]]})
    for repeated, cause in ((moved, "unseeded split"), (trace(samples="x"), "unseeded random")):
        evidence = CheckEvidence(reference(), repeat=difference("sample"), repeated=repeated)
        assert likely_causes(evidence)[0].startswith(cause)


# --- digests -----------------------------------------------------------------


class Own:
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ([1, [2]], [[1], 2]),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.arange(100), torch.arange(100) + 1),
        (np.zeros(2), np.ones(2)),
        (Own([1]), Own([2])),
        (np.random.default_rng(0), np.random.default_rng(1)),
        (random.Random(0), random.Random(1)),
        (torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    ],
)
def test_contents_of_unequal_values_differ(one: object, other: object) -> None:
    assert content_of(one).digest != content_of(other).digest
    assert content_of(one) == content_of(one)


def test_contents_depend_neither_on_addresses_nor_on_orders_of_sets() -> None:
    words = [f"word {number}" for number in range(50)]
    one, other = {*words}, {*reversed(words)}
    assert content_of(one) == content_of(other)
    assert content_of({"a": 1, "b": 2}) == content_of({"b": 2, "a": 1})
    assert content_of(Own(object())) == content_of(Own(object()))
    cyclic: list[object] = []
    cyclic.append(cyclic)
    assert content_of(cyclic) == content_of(cyclic)


def test_numbers_of_a_content_are_separate() -> None:
    one, other = content_of({"a": [1.5, 2]}), content_of({"a": [1.25, 2]})
    assert (one.numbers, other.numbers) == ([1.5], [1.25])
    assert one.rest == other.rest != content_of({"a": [1.25, 3]}).rest


def test_large_values_are_left_out() -> None:
    for large in (torch.zeros(256 * 100 + 1), [0] * 101):
        with pytest.raises(TooLargeError):
            content_of(large, most=100)


def test_one_process_kills_itself_once(tmp_path: Path) -> None:
    files = DigestFiles(tmp_path)
    assert not files.claim_kill(3)
    files.plan_failure(3, ranks=2)
    assert not files.claim_kill(2) and files.ranks_to_wait_for == 0
    assert files.claim_kill(3) and not files.claim_kill(3)
    assert files.ranks_to_wait_for == 2
    files.stop_waiting()
    assert files.ranks_to_wait_for == 0


# --- runs --------------------------------------------------------------------


def test_run_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    orphan = f"setsid sh -c 'echo $$ > {shlex.quote(str(pid))}; exec sleep 600' & wait"
    assert finish(["sh", "-c", orphan], os.environ, tmp_path / "output", 0.5) is None
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command"),
        (["--"], "no command"),
        (["--", "python", "missing.py"], "missing.py does not exist"),
        (["--", "sleep", "1"], "does not start training"),
        (["--", sys.executable, str(SCRIPTS / "plain_horovod.py")], "hvdtrain.training"),
        (["--out", "/", "--", sys.executable, FAULTY], "--out / cannot be created"),
    ],
)
def test_bad_input_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 2
    assert message in capsys.readouterr().err


# Of scripts in tests/support/scripts.
VALUES = {"HVDTRAIN_TEST_CALLS": "one", "HVDTRAIN_TEST_MODEL": "codebook"}


def checked(directory: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], steps: int = 8,
            python: str = "") -> Certificate:  # fmt: skip
    """Check a script, or a task."""
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    for name, value in runs.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(directory)
    own = python or warm.python(2, PRELOAD)
    keys = [own, *command]
    return check(RunStarter(keys, steps, directory / "check", SECONDS, lambda title: None))


@pytest.mark.slow
def test_script_without_fault_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(tmp_path, monkeypatch, [str(SCRIPTS / "regression.py")])
    text = found.to_text()
    assert found.same and not found.causes, text
    assert found.total == 28 and "note: equal within a rounding error" in text
    assert found.rows[2].run.trace.sizes() == [2, 1, 2], "a rank was killed, and another joined"


def test_script_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "failing.py"
    script.write_text("import hvdtrain  # training\nraise SystemExit('hvdtrain: error: no data')")
    with pytest.raises(Exception, match=r"the run on 1 rank ended with exit code 1: no data"):
        checked(tmp_path, monkeypatch, [str(script)])


# Fault of faulty.py -> first words of its cause; the first one is checked in the gate.
FAULTS = {
    "carried": "the loss or the gradient depends on the rank",
    "scheduler": "an unregistered scheduler",
    "weights": "unseeded initial weights",
    "unseeded": "unseeded random numbers in the dataset",
    "random": "unseeded random numbers, or the time",
    "kernel": "a non-deterministic kernel",
    "hash": "hash order",
    "file": "a dataset that returns different contents in data workers: a file handle",
    "worker": "a dataset that returns different contents in data workers",
    "dataset": "a dataset that returns different contents for a number",
    "state": "state outside training.state and state_dict(): a variable",
    "optimizer": "state outside training.state and state_dict(): an attribute of the optimizer",
    "buffer": "buffer 1.mean (persistent=False)",
    "batchnorm": "BatchNorm (buffer 1.running_mean",
    "rank": "training.state['best']: computed from a rank's own values",
    "evaluation": "validation_loss: an evaluation that depends on the ranks",
    "size": "the loss or the gradient depends on the rank",
    "block": "state outside training.state and state_dict(): a variable",
}  # fmt: skip
VARIABLES = {"carried": "variable seen", "state": "variable momentum", "block": "variable factor",
             "optimizer": "attribute calls of WarmUp"}  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, marks=pytest.mark.slow if f == "carried" else pytest.mark.soak)
        for f in FAULTS
    ],
)
def test_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    # A forked process has the hash seed of its parent.
    python = "" if fault == "carried" else sys.executable
    steps = 8 if fault == "carried" else 20
    found = checked(tmp_path, monkeypatch, [FAULTY, fault], steps, python)
    assert not found.same
    assert found.causes[0].startswith(FAULTS[fault]), found.to_text()
    assert VARIABLES.get(fault, "") in found.causes[0]


@pytest.mark.soak
def test_unseeded_split_is_named_by_the_runs_that_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checked(tmp_path, monkeypatch, [FAULTY, "split"], 20, sys.executable)
    assert not found.same
    assert "give random_split a generator with a seed" in found.to_text(), found.to_text()


@pytest.mark.soak
@pytest.mark.parametrize("how", ["sum", "rows"])
def test_collective_whose_result_follows_the_ranks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    command = [str(SCRIPTS / "gathered.py"), how]
    found = checked(tmp_path, monkeypatch, command, 20, sys.executable)
    assert found.same is (how == "rows"), found.to_text()
    assert found.same or found.causes[0].startswith("comm.all_reduce: "), found.to_text()


OF_PAGES = {"README.md": "with hvdtrain.training(model, optimizer, dataset)",
            "docs/own-loops.md": "with hvdtrain.training(model, optimizer, dataset)"}  # fmt: skip
PORTED = ["digits", "elastic", "imagenet", "benchmark", "policy", "ddp", "trainer", "gan"]
OWN = ["regression", "muon", "changing_buffers"]


@pytest.mark.soak
@pytest.mark.parametrize("name", [*OF_PAGES, *PORTED, *OWN, "task"])
def test_correct_script_causes_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    command, steps = [str(SCRIPTS / f"{name}.py")], 20
    if name in OF_PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (runs.REPOSITORY / name).read_text(), re.DOTALL)
        command = [str(tmp_path / "loop.py")]
        text = next(block for block in blocks if OF_PAGES[name] in block)
        (tmp_path / "loop.py").write_text(text)
    elif name in PORTED:
        command = [str(DOCS / f"porting/{name}.py")]
        if name == "imagenet":
            command, steps = [*command, "--images", str(tmp_path / "images")], 8
    elif name == "task":
        command = ["-m", "hvdtrain.train", *runs.TINY]
    found = checked(tmp_path, monkeypatch, command, steps, sys.executable)
    assert found.same and not found.causes, found.to_text()
    assert found.total <= 4 * steps
