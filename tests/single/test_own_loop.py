"""Scripts with their own loops (hvdtrain.training): the same curve as ever, and clear mistakes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from textwrap import indent

import pytest

from hvdtrain.api.flags import unread_words
from hvdtrain.config import parse
from tests.support import own_loops, runs, warm
from tests.support.scripts import misuse

PRELOAD = "torch._dynamo"  # as soon as a script makes an optimizer: seconds of CPU time
SCRIPTS = Path(misuse.__file__).parent
FLAGS = [
    *("--train.duration", "12", "--batch.global_size", "12", "--batch.micro_size", "2"),
    *("--telemetry.port", "0"),
]
EXACT = ["--exchange.name", "exact", "--runtime.threads", "1"]
SECONDS = 90


def train(
    root: Path,
    run: str,
    script: str,
    launcher: str = "",
    *more: str,
    env: dict[str, str] | None = None,
) -> str:
    """Run a script; return the last line that rank 0 has printed."""
    argv = [*FLAGS, *more, "--run.root", str(root), "--run.id", run]
    ranks = int([*launcher.split(":"), "1"][1])
    command = [warm.python(ranks, PRELOAD), str(SCRIPTS / script)]
    done = runs.start(root / "output", argv, launcher, env, command).wait(SECONDS)
    assert done.returncode == 0, done
    found = re.findall(r"END (.*)", done.stdout)
    return found[0] if found else ""


def curve(directory: Path) -> list[tuple[object, ...]]:
    names = ("step", "loss", "grad_norm", "mae", "generator_loss", "lr")
    return [tuple(line.get(name) for name in names) for line in runs.metrics(directory)]


@pytest.mark.parametrize(
    ("script", "launcher"), [("regression.py", "mpirun:3"), ("gan.py", "gloo:2")]
)
def test_exact_curve_of_a_script_does_not_depend_on_ranks(
    tmp_path: Path, script: str, launcher: str
) -> None:
    ends = [train(tmp_path, "one", script, "", *EXACT)]
    ends.append(train(tmp_path, "more", script, launcher, *EXACT))
    assert curve(tmp_path / "one") == curve(tmp_path / "more")
    assert len(curve(tmp_path / "one")) == 12
    if script == "regression.py":
        one, more = (float(end.split()[0]) for end in ends)
        assert one == pytest.approx(more)


def test_resumed_script_continues_as_if_it_had_not_ended(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "regression.py", "", *EXACT)
    train(tmp_path, "parts", "regression.py", "gloo:2", *EXACT, "--train.duration", "7")
    ended = train(tmp_path, "parts", "regression.py", "", *EXACT)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert ended == whole, "the scheduler, the best loss and the number of evaluations"


def test_wrapping_optimizer_schedule_and_extra_state_are_resumed(tmp_path: Path) -> None:
    script = "other_parts.py"
    whole = train(tmp_path, "whole", script, "", *EXACT)
    train(tmp_path, "parts", script, "gloo:2", *EXACT, "--train.duration", "7")
    ended = train(tmp_path, "parts", script, "", *EXACT)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "whole")) == 12 and ended == whole


@pytest.mark.parametrize("register", [False, True])
def test_scheduler_that_is_not_registered_causes_one_warning(
    tmp_path: Path, register: bool
) -> None:
    argv = [*FLAGS, "--run.root", str(tmp_path), *(["--register"] if register else [])]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / "unregistered.py")]
    done = runs.start(tmp_path / "output", argv, "gloo:2", command=command).wait(SECONDS)
    assert done.returncode == 0, done
    assert done.stderr.count("a scheduler that is not in training.state") == (not register), done


def test_one_rank_can_end_the_run_of_all(tmp_path: Path) -> None:
    train(tmp_path, "a", "regression.py", "gloo:2", env={"HVDTRAIN_TEST_FINISH": "4"})
    assert [line["step"] for line in runs.metrics(tmp_path / "a")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "a/checkpoints/step_00000006").exists()


def test_script_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    train(tmp_path, "a", "regression.py")
    found = [line["loss"] for line in runs.metrics(tmp_path / "a")]
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    from hvdtrain.data.order import sample_order

    expected = []
    for step in range(12):
        order = sample_order(12 * step, 12 * (step + 1), 256, 1234).reshape(6, 2)
        optimizer.zero_grad()
        total = 0.0
        for own in order.tolist():
            loss = (model(x[own]) - y[own]).square().mean() / 6
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        expected.append(total)
    assert found == pytest.approx(expected, rel=1e-5)


def _clipped_by_torch(pairs: bool) -> list[tuple[float, float, float]]:
    """Loss, norm before and after clipping of each step of clipping.py as a plain loop."""
    torch = pytest.importorskip("torch")
    from hvdtrain.data.order import sample_order

    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    y = 0.5 * x.sum(1, keepdim=True)
    found = []
    for step in range(12):
        batch = sample_order(12 * step, 12 * (step + 1), 256, 1234)
        weights = (x[batch, :1] > 0).float() + 0.5 if pairs else torch.ones(12, 1)
        errors = (model(x[batch]) - y[batch]).square()
        loss = (errors * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        model[0].weight.grad.mul_(0.5)
        model[2].bias.grad = None
        after = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        found.append((loss.item(), norm.item(), after.item()))
    return found


def _clipped(directory: Path) -> list[tuple[float, float, float]]:
    lines = runs.metrics(directory)
    return [(line["loss"], line["own_norm"], line["grad_norm"]) for line in lines]


@pytest.mark.parametrize(
    ("launcher", "pairs", "flags"),
    [
        ("", False, ""),
        ("", True, "--exchange.name exact --runtime.threads 1"),
        ("gloo:2", True, ""),
        ("mpirun:3", False, ""),
        ("gloo:3", True, "--exchange.name exact --runtime.threads 1"),
        ("gloo:2", False, "--exchange.wire float16"),
        ("gloo:2", False, "--exchange.compression topk --exchange.ratio 1.0"),
        ("gloo:2", False, "--precision.name fp16"),
    ],
)
def test_gradients_that_a_script_clips_in_the_block_are_applied(
    tmp_path: Path, launcher: str, pairs: bool, flags: str
) -> None:
    env = {"HVDTRAIN_TEST_PAIRS": str(int(pairs))}
    end = train(tmp_path, "a", "clipping.py", launcher, *flags.split(), env=env)
    found, expected = _clipped(tmp_path / "a"), _clipped_by_torch(pairs)
    most = 0.05 if "16" in flags else 1e-4
    assert sum(found, ()) == pytest.approx(sum(expected, ()), rel=most)
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    torch.nn.Linear(4, 8)
    assert float(end.split()[0]) == torch.nn.Linear(8, 1).bias.item(), "its gradient was deleted"


def test_clipped_step_is_repeated_after_rank_is_killed(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:3\n")
    launcher = shlex.split(
        "horovodrun --gloo -np 3 --min-np 1 --max-np 3 --network-interfaces lo"
        f" --host-discovery-script 'cat {tmp_path}/hosts'"
    )
    command = [warm.python(3, PRELOAD), str(SCRIPTS / "clipping.py")]
    flags = [*FLAGS, "--run.root", str(tmp_path), "--run.id", "a"]
    env = {"HVDTRAIN_TEST_KILL": "5", "HVDTRAIN_TEST_KILLED": str(tmp_path / "killed")}
    done = runs.start(tmp_path / "output", flags, "", env, [*launcher, *command]).wait(180)
    assert done.returncode == 0, done
    events = map(json.loads, (tmp_path / "a/events.jsonl").read_text().splitlines())
    assert "failure" in [event["cause"] for event in events if event["event"] == "start"], done
    expected = _clipped_by_torch(pairs=False)
    assert sum(_clipped(tmp_path / "a"), ()) == pytest.approx(sum(expected, ()), rel=1e-4)


def test_each_mistake_ends_the_run_with_one_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", misuse.__name__]
    done = runs.start(tmp_path / "output", [str(tmp_path)], command=command).wait(SECONDS)
    assert done.returncode == 0, done
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    expected = {
        "optimizer_stepped_by_hand": "optimizer.step() was called by the script",
        "stepped_by_a_gradient_scaler": "perhaps by GradScaler.step",
        "gradients_cleared_in_the_block": "SGD.zero_grad() was called inside a step's block",
        "gradients_of_the_model_cleared": "Linear.zero_grad() was called inside a step's block",
        "gradient_deleted_between_micro_batches": "was changed between the micro-batches",
        "clipped_between_micro_batches": "was changed between the micro-batches",
        "clipped_after_the_block": "was changed after a step's block",
        "loss_of_a_gradient_scaler": "GradScaler.scale was called inside a step's block",
        "own_loader": "loss.backward() was called by the script",
        "block_without_micro_batches": "the block ended before step.backward was called",
        "auxiliary_backward": "loss.backward() was called by the script",
        "backward_by_hand_after_the_block": "loss.backward() was called by the script",
        "accumulation_hook": "the parameter weight has a hook of register_post_accumulate",
        "loss_that_is_no_scalar": "step.backward got a tensor of shape (2, 1)",
        "loss_that_is_detached": "step.backward got a tensor without gradient",
        "loss_that_is_a_number": "step.backward got a float",
        "samples_without_collate": "micro-batch of samples of type NoneType",
        "optimizer_with_closure": "LBFGS evaluates the loss several times in each step",
        "step_used_after_its_turn": "step 1 was entered again",
        "block_left_out": "left out the block of step 2",
        "break_inside_the_block": "the block ended before step.backward was called",
        "exception_swallowed": "step.backward was not called for a micro-batch",
        "backward_twice": "step.backward was called twice for a micro-batch",
        "backward_after_the_block": "step.backward is called inside the step's block",
        "collective_outside_the_block": "called outside the block of a step",
        "loop_left_early": "call training.finish()",
        "unknown_metric": "got the metrics ['accuracy']",
        "state_that_cannot_be_saved": "training.state['file'] has a TextIOWrapper",
        "state_set_inside_the_loop": "training.state['best'] was set for the first time inside",
    }
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert found[name].startswith("2 hvdtrain: error: ") and text in found[name], found[name]


INTERACTIVE = """
import copy, os, pickle, signal, sys, tempfile
import torch
import hvdtrain

tempfile.tempdir = "."
sys.ps1 = "In: "  # as in a notebook
sys.argv = ["ipykernel_launcher.py", "-f", "kernel.json"]
handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
keys = {"train.duration": 3, "batch.global_size": 8, "telemetry.port": 0}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.ones(2), torch.ones(1))] * 64


def train(run, mistake=False, late=False, **more):
    config = keys | {"run.id": run} | more
    with hvdtrain.training(model, optimizer, data, config=config) as training:
        for step in training:
            with step:
                for x, y in step:
                    step.backward((model(x) - y).square().mean())
            if mistake:
                raise KeyError("mine")
        if late:
            raise KeyError("late")
        print("DONE", run, step.result["loss"])


with hvdtrain.training(model, optimizer, data, config=keys | {"run.id": "copied"}) as training:
    for step in training:
        with step:
            for x, y in step:
                step.backward((model(x) - y).square().mean())
                copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
                copied.zero_grad()
                loaded.zero_grad()
assert "zero_grad" not in vars(model) and copied.weight.grad is None
train("first")
keys["run.root"] = None
train("second")
for more in (
    dict(mistake=True),
    dict(late=True),
    {"train.stepz": 3},
    {"train.max_nonfinite": 1, "break_gradient": True},
):
    if more.pop("break_gradient", False):
        hook = model.weight.register_hook(lambda gradient: gradient * float("nan"))
    try:
        train("third", **more)
    except Exception as error:
        print("RAISED", type(error).__name__)
hook.remove()
optimizer.step()
train("fourth")
print("FILES", *sorted(os.listdir("runs")), *(name for name in os.listdir() if "hvdtrain" in name))
assert handlers == [
    signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
]
print("END")
"""


def test_notebook_survives_runs_and_mistakes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{INTERACTIVE}"]
    done = runs.start(tmp_path, [], command=command).wait(SECONDS)
    assert done.returncode == 0, done
    said = [line.split() for line in done.stdout.splitlines() if "DONE" in line or "RAISED" in line]
    assert [words[:2] for words in said] == [
        *(["DONE", "first"], ["DONE", "second"], ["RAISED", "KeyError"], ["RAISED", "KeyError"]),
        *(["RAISED", "UserError"], ["RAISED", "AgreedError"], ["DONE", "fourth"]),
    ], done
    assert "FILES copied first\nEND\n" in done.stdout, done
    losses = [float(words[2]) for words in said if words[0] == "DONE"]
    assert losses == sorted(losses, reverse=True), "the model continues from run to run"


def test_script_without_a_dataset_gets_the_same_numbers_on_any_ranks(tmp_path: Path) -> None:
    for run, launcher in (("one", ""), ("two", "gloo:2")):
        train(tmp_path, run, "sample_numbers.py", launcher, *EXACT)
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    assert len(curve(tmp_path / "one")) == 12


def test_branches_that_only_some_ranks_use_keep_the_curve(tmp_path: Path) -> None:
    for run, launcher in (("one", ""), ("three", "gloo:3")):
        train(tmp_path, run, "branches.py", launcher, *EXACT)
    assert curve(tmp_path / "one") == curve(tmp_path / "three")
    assert len(curve(tmp_path / "one")) == 12


def test_samples_of_different_lengths_are_collated_by_the_script(tmp_path: Path) -> None:
    for run, launcher in (("one", ""), ("two", "gloo:2")):
        train(tmp_path, run, "collated.py", launcher, *EXACT)
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    assert len(curve(tmp_path / "one")) == 12


def test_iterable_dataset_gives_one_curve_and_resumes(tmp_path: Path) -> None:
    train(tmp_path, "whole", "stream.py", "", *EXACT)
    train(tmp_path, "parts", "stream.py", "gloo:2", *EXACT, "--train.duration", "7")
    train(tmp_path, "parts", "stream.py", "gloo:3", *EXACT)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "whole")) == 12


DRAWS = "random_numbers.py"


def drawn(directory: Path) -> list[tuple[object, ...]]:
    names = ("step", "loss", "grad_norm", "validation_loss", "again", "drawn")
    return [tuple(line.get(name) for name in names) for line in runs.metrics(directory)]


@pytest.mark.parametrize("launcher", ["mpirun:2", "gloo:3"])
def test_random_numbers_of_a_step_are_the_same_on_any_ranks(tmp_path: Path, launcher: str) -> None:
    one = train(tmp_path, "one", DRAWS, "", *EXACT)
    assert train(tmp_path, "more", DRAWS, launcher, *EXACT) == one
    assert drawn(tmp_path / "more") == drawn(tmp_path / "one")
    evaluations = [line[3:] for line in drawn(tmp_path / "one") if line[3] is not None]
    assert all(loss == again for loss, again, _ in evaluations)
    assert len({number for _, _, number in evaluations}) == len(evaluations) == 4


def test_resumed_run_draws_the_numbers_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", DRAWS, "", *EXACT)
    train(tmp_path, "parts", DRAWS, "gloo:2", *EXACT, "--train.duration", "7")
    assert train(tmp_path, "parts", DRAWS, "", *EXACT) == whole
    assert drawn(tmp_path / "parts") == drawn(tmp_path / "whole")


def test_evaluation_that_draws_for_a_share_is_named_once(tmp_path: Path) -> None:
    argv = [*FLAGS, "--run.root", str(tmp_path), "--run.id", "a"]
    command = [warm.python(1, PRELOAD), str(SCRIPTS / DRAWS)]
    env = {"HVDTRAIN_TEST_WHOLE": ""}
    done = runs.start(tmp_path / "output", argv, "", env, command).wait(SECONDS)
    assert done.returncode == 0, done
    assert (done.stdout + done.stderr).count("the function draws random numbers") == 1, done


BUFFERS = "changing_buffers.py"


def buffers(directory: Path) -> list[tuple[object, ...]]:
    names = ("step", "loss", "grad_norm", "buffers")
    return [tuple(line.get(name) for name in names) for line in runs.metrics(directory)]


@pytest.mark.parametrize(
    "model", ["spectral", "observed", "mean", "counter", "codebook", "keys", "redrawn"]
)
def test_buffers_of_forward_passes_are_the_same_on_any_ranks(tmp_path: Path, model: str) -> None:
    if model == "codebook":
        pytest.importorskip("vector_quantize_pytorch")
    env = {"HVDTRAIN_TEST_MODEL": model}
    whole = train(tmp_path, "whole", BUFFERS, "", *EXACT, env=env)
    more = ["--train.replica_check_every", "3"]
    train(tmp_path, "parts", BUFFERS, "gloo:3", *EXACT, *more, "--train.duration", "7", env=env)
    assert train(tmp_path, "parts", BUFFERS, "mpirun:2", *EXACT, *more, env=env) == whole
    assert buffers(tmp_path / "parts") == buffers(tmp_path / "whole")
    assert len({line[3] for line in buffers(tmp_path / "whole")}) == 12, "they change"


@pytest.mark.parametrize("model", ["lost", "attribute"])
def test_changing_buffer_that_is_not_saved_is_named(tmp_path: Path, model: str) -> None:
    argv = [*FLAGS, *EXACT, "--run.root", str(tmp_path), "--run.id"]
    command = [warm.python(3, PRELOAD), str(SCRIPTS / BUFFERS)]
    env = {"HVDTRAIN_TEST_MODEL": model}
    for launcher in ("", "gloo:3"):
        argv_of = [*argv, launcher[:4] or "one"]
        done = runs.start(tmp_path / "output", argv_of, launcher, env, command).wait(SECONDS)
        assert done.returncode == 0, done
        text = done.stdout + done.stderr
        assert text.count("2.mean, which the model's state_dict() does not have") == 1, done
    assert buffers(tmp_path / "gloo") == buffers(tmp_path / "one")


@pytest.mark.parametrize(
    ("model", "launcher", "code", "text"),
    [
        ("initialized", "gloo:2", 2, "change the trained parameter 2.scale, each in its own way"),
        ("constrained", "gloo:2", 0, "final train loss"),
        ("counted", "", 0, "forward passes change 2.updates, numbers or lists of Python"),
    ],
)
def test_other_changes_of_forward_passes_are_refused_or_named(
    tmp_path: Path, model: str, launcher: str, code: int, text: str
) -> None:
    argv = [*FLAGS, "--run.root", str(tmp_path), "--run.id", "a"]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / BUFFERS)]
    env = {"HVDTRAIN_TEST_MODEL": model}
    done = runs.start(tmp_path / "output", argv, launcher, env, command).wait(SECONDS)
    assert done.returncode == code and (done.stdout + done.stderr).count(text) == 1, done


def test_unusable_dataset_is_refused_in_one_line(tmp_path: Path) -> None:
    argv = [*FLAGS, "--run.root", str(tmp_path)]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / "unusable_data.py")]
    done = runs.start(tmp_path / "output", argv, "gloo:2", None, command).wait(SECONDS)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert done.stderr.count("is a generator, which can be read only once") == 1, done


def test_refused_loop_ends_although_its_exporter_serves(tmp_path: Path) -> None:
    argv = [*FLAGS, "--telemetry.port", "9857", "--run.root", str(tmp_path)]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / BUFFERS)]
    env = {"HVDTRAIN_TEST_MODEL": "initialized"}
    done = runs.start(tmp_path / "output", argv, "gloo:2", env, command).wait(SECONDS)
    assert done.returncode == 2, done


def test_gradient_that_differs_between_ranks_is_refused(
    tmp_path: Path,
) -> None:
    argv = [*FLAGS, "--run.root", str(tmp_path), "--run.id", "a"]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / "different_state.py")]
    env = {"HVDTRAIN_TEST_WHAT": "gradient"}
    done = runs.start(tmp_path / "output", argv, "gloo:2", env, command).wait(SECONDS)
    assert done.returncode == 2, done
    assert "has changed p.grad differently on each rank" in done.stderr, done


@pytest.mark.parametrize(
    ("what", "named"),
    [("object", "training.state['queue']"), ("buffer", "the buffer 1.running_mean")],
)
def test_what_a_script_computes_differently_on_each_rank_is_named(
    tmp_path: Path, what: str, named: str
) -> None:
    argv = [*FLAGS, "--train.replica_check_every", "2", "--run.root", str(tmp_path)]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / "different_state.py")]
    env = {"HVDTRAIN_TEST_WHAT": what}
    done = runs.start(tmp_path / "output", argv, "gloo:2", env, command).wait(SECONDS)
    assert done.returncode == 2, done
    assert f"step 2: {named} differs between 2 groups of ranks" in done.stderr, done
    assert "the script computes it differently on each rank" in done.stderr, done


def test_second_run_of_the_same_name_in_a_process_is_refused(tmp_path: Path) -> None:
    argv = [*FLAGS, "--run.root", str(tmp_path)]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / "two_runs.py")]
    env = {"HVDTRAIN_TEST_NAMES": "fold fold"}
    done = runs.start(tmp_path / "output", argv, "gloo:2", env, command).wait(SECONDS)
    assert done.returncode == 2, done
    assert done.stderr.count("run.id fold: this script has trained it already") == 1, done
    assert len(curve(tmp_path / "fold")) == 12


@pytest.mark.parametrize("launcher", ["gloo:2", "mpirun:2"])
def test_second_run_of_a_process_trains_or_is_refused(tmp_path: Path, launcher: str) -> None:
    argv = [*FLAGS, "--run.root", str(tmp_path)]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / "two_runs.py")]
    done = runs.start(tmp_path / "output", argv, launcher, None, command).wait(SECONDS)
    assert len(curve(tmp_path / "first")) == 12
    if launcher == "gloo:2":
        assert done.returncode == 0, done
        assert curve(tmp_path / "second") == curve(tmp_path / "first")
    else:
        assert done.returncode == 2, done
        assert "MPI cannot be started twice" in done.stderr, done
        assert "MPI_FINALIZE" not in done.stderr, done


@pytest.mark.parametrize("launcher", ["gloo:2", "mpirun:2"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_block_that_one_rank_leaves_out_ends_all_ranks(
    tmp_path: Path, launcher: str, rank: str
) -> None:
    argv = [*FLAGS, "--run.root", str(tmp_path), "--run.id", "a"]
    command = [warm.python(2, PRELOAD), str(SCRIPTS / "one_rank_leaves_out.py")]
    env = {"HVDTRAIN_TEST_RANK": rank}
    done = runs.start(tmp_path / "output", argv, launcher, env, command).wait(SECONDS)
    assert done.returncode != 0 and "left out the block of step 3" in done.stderr, done
    assert done.seconds < 45, done


def test_script_leaves_out_words_that_are_its_own(tmp_path: Path) -> None:
    train(tmp_path, "a", "regression.py", "", "--verbose", "--data", "somewhere")
    assert len(curve(tmp_path / "a")) == 12


def test_keys_that_are_left_to_the_script_are_named() -> None:
    words = [
        "--config",
        "nope.yaml",
        "--seed=7",
        "--task",
        "x",
        "--verbose",
        "--train.duration",
        "5",
    ]
    assert [*unread_words(words, {})] == ["config", "seed"]
    assert [*unread_words(words, {"seed": 7})] == ["config"]
    assert not [*unread_words(words, "run.yaml")]
    settings = parse([])
    settings.unread = ("config", "seed")
    how = "to set them for hvdtrain, pass config= to hvdtrain.training"
    assert settings.warning == f"--config and --seed are left to the script; {how}"
    settings.unread = ("config",)
    how = "to set it for hvdtrain, pass config= to hvdtrain.training"
    assert settings.warning == f"--config is left to the script; {how}"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--train.step", "3"], "unknown key train.step"),
        (["--parallel.tensor", "2"], "trains a model that every rank holds completely"),
        (["--integrity.replay_every", "5"], "cannot replay its micro-batches: use 0"),
        (["--optim.lr", "5"], "optim.lr on the command line has no effect"),
        (["--schedule.name=linear"], "only optim.clip_norm and optim.ema_decay apply"),
    ],
)
def test_wrong_key_of_a_script_is_refused(tmp_path: Path, flags: list[str], problem: str) -> None:
    command = [sys.executable, str(SCRIPTS / "regression.py")]
    done = runs.start(tmp_path, flags, command=command).wait(SECONDS)
    assert done.returncode == 2 and problem in done.stderr, done
    assert done.stderr.count("\n") == 1


def loop_of(page: str) -> str:
    """Return the first script on a page."""
    return (runs.REPOSITORY / page).read_text().partition("```python\n")[2].partition("```")[0]


def test_script_that_configures_logging_sees_each_line_once(tmp_path: Path) -> None:
    lines = [
        *("import logging", "logging.basicConfig(level=logging.INFO)", "logging.info('before')"),
        "hvdtrain_logger = logging.getLogger('hvdtrain')",
        loop_of("docs/own-loops.md") + "    hvdtrain_logger.debug('debug in the run')",
        *("hvdtrain_logger.debug('debug after')", "hvdtrain_logger.info('after')"),
    ]
    script = tmp_path / "loop.py"
    script.write_text("\n".join(lines))
    argv = [*FLAGS, "--run.root", str(tmp_path), "--run.id", "a"]
    command = [warm.python(1, PRELOAD), str(script)]
    done = runs.start(tmp_path, argv, command=command).wait(SECONDS)
    assert done.returncode == 0, done
    assert "debug in the run" in (tmp_path / "a/logs/rank_00000.jsonl").read_text()
    by_root = re.findall(r"^[A-Z]+:(\w+):(.*)$", done.stderr, re.MULTILINE)
    assert by_root == [("root", "before"), ("hvdtrain", "after")], done
    assert len(re.findall(r"hvdtrain: step 12/12 ", done.stderr)) == 1, done


def test_loop_in_a_thread_trains_without_signals_and_says_so(tmp_path: Path) -> None:
    body = indent(loop_of("docs/own-loops.md"), "    ")
    start = ["import threading", f"def main():\n{body}", "threading.Thread(target=main).start()"]
    script = tmp_path / "loop.py"
    script.write_text("\n".join(start))
    done = own_loops.start(tmp_path, "a", str(script), "", "--loader.workers", "1")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done
    assert len(runs.losses(tmp_path / "a")) == 12
    assert done.stderr.count("SIGUSR1 end the process without a checkpoint") == 1, done


def test_mistake_in_a_thread_ends_the_process_with_its_code(tmp_path: Path) -> None:
    body = indent(loop_of("docs/own-loops.md"), "    ")
    end = ["thread = threading.Thread(target=main)", "thread.start()", "thread.join()", "print(1)"]
    script = tmp_path / "loop.py"
    script.write_text("\n".join(["import threading", f"def main():\n{body}", *end]))
    done = own_loops.start(tmp_path, "a", str(script), "", "--train.steps", "ten")
    assert done.returncode == 2 and done.stderr.count("hvdtrain: error: ") == 1, done


def test_script_works_on_after_its_loop_for_any_time(tmp_path: Path) -> None:
    work = "import time\nif training.rank == 0:\n    time.sleep(8)\n    print('END worked')\n"
    script = tmp_path / "loop.py"
    script.write_text(f"{loop_of('docs/own-loops.md')}\n{work}")
    limit = ["--elastic.hang_seconds", "2"]
    done = own_loops.start(tmp_path, "a", str(script), "gloo:2", *limit)
    assert done.returncode == 0 and "END worked" in done.stdout, done


@pytest.mark.parametrize("page", ["README.md", "docs/own-loops.md"])
def test_first_loop_of_a_page_trains(tmp_path: Path, page: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(loop_of(page))
    where = ["--run.root", str(tmp_path), "--run.id", "a"]
    command = [warm.python(2, PRELOAD), str(script)]
    done = runs.start(tmp_path, [*FLAGS, *where], "gloo:2", command=command).wait(SECONDS)
    assert done.returncode == 0, done
    assert len(runs.metrics(tmp_path / "a")) == 12
