"""A run that another trainer began is continued, with its optimizer: run.takeover."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvdtrain import cli
from hvdtrain.checkpoint.format import read
from hvdtrain.checkpoint.interchange.other_run import OtherRun
from hvdtrain.checkpoint.interchange.readers import read_other_run
from hvdtrain.checkpoint.interchange.transformers_runs import read_trainer
from hvdtrain.checkpoint.weights import Weights
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.errors import UserError
from hvdtrain.process.other_optimizer import placed_state
from tests.support.job import Finished
from tests.support.other_trainers import SAVED_AT, STEPS, llama
from tests.support.runs import REPOSITORY, environment, metrics, run, start

_MODULE = "tests.support.other_trainers"


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that other trainers have written, by their names, and losses.json."""
    directory = tmp_path_factory.mktemp("sources")
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = {**environment(world), "DS_ACCELERATOR": "cpu", "MASTER_PORT": _free_port()}
    words = [sys.executable, "-m", _MODULE, "train", str(directory)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["", "gloo:2", "gloo:3"])
def test_losses_continue_as_the_other_trainers_own(
    sources: Path, tmp_path: Path, launcher: str
) -> None:
    words = [sys.executable, "-m", _MODULE, "continue", str(sources)]
    job = start(tmp_path / "output", ["--run.root", str(tmp_path)], launcher, command=words)
    done = job.wait(240)
    assert done.returncode == 0, done
    for name, losses in json.loads((sources / "losses.json").read_text()).items():
        lines = metrics(tmp_path / name)
        assert [line["step"] for line in lines] == [*range(SAVED_AT + 1, STEPS + 1)], name
        assert len(losses) == STEPS
        own = [line["loss"] for line in lines]
        assert own == pytest.approx(losses[SAVED_AT:], rel=0, abs=1e-6), name
        assert cli.main(["audit", str(tmp_path / name)]) == 0, name


def test_started_again_a_run_continues_from_its_own_checkpoint(
    sources: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.support import other_trainers as trainers\n"
        "trainers.TRAINERS['script.pt'][1]('script.pt', Path(sys.argv[2]))\n"
    )
    words = [sys.executable, str(script), "continue", str(sources), "--run.root", str(tmp_path)]
    first = start(tmp_path / "output", ["--train.duration", "13"], command=words).wait(60)
    assert first.returncode == 0 and "took over step 10 of a PyTorch script" in first.stderr, first
    again = start(tmp_path / "output", [], command=words).wait(60)
    assert again.returncode == 0 and "resumed from the checkpoint of step 13" in again.stderr
    assert "took over" not in again.stderr
    losses = json.loads((sources / "losses.json").read_text())["script.pt"]
    own = [line["loss"] for line in metrics(tmp_path / "script.pt")]
    assert own == pytest.approx(losses[SAVED_AT:], rel=0, abs=1e-6)


def test_command_describes_a_checkpoint(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["takeover", str(sources / "transformers")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "checkpoint-10: step 10 of transformers' Trainer" in shown[0]
    assert shown[2].startswith("optimizer: weight_decay 0.1 and 0.0, lr ")
    assert shown[-3:] == [
        "batch: 8 samples in a step (batch.global_size)",
        "gradients: clipped to 1 (optim.clip_norm; 0: not)",
        "order of samples: --loader.order torch --seed 42",
    ]


@pytest.mark.parametrize("source", ["torchtitan-0.3.0/run", "megatron-core-0.16.1"])
def test_description_does_not_read_the_tensors_of_a_sharded_checkpoint(source: str) -> None:
    path = REPOSITORY / "tests/data" / source
    whole, described = read_other_run(path), read_other_run(path, values=False)
    for name, tensor in whole.weights.tensors.items():
        other = described.weights.tensors[name]
        assert (other.is_meta, other.shape, other.dtype) == (True, tensor.shape, tensor.dtype)
    assert described.step == whole.step and described.groups() == whole.groups()


@pytest.mark.parametrize(
    ("kind", "prefix", "last"),
    [("transformers", "checkpoint-", "trainer_state.json"), ("torchtitan", "step-", ".metadata")],
)
def test_newest_complete_checkpoint_is_taken_over(
    sources: Path, tmp_path: Path, kind: str, prefix: str, last: str
) -> None:
    source = sources / kind
    if kind == "torchtitan":
        source = REPOSITORY / "tests/data/torchtitan-0.3.0/run"
    shutil.copytree(source, tmp_path / "run")
    (tmp_path / "run" / f"{prefix}11").mkdir()
    found = read_other_run(tmp_path / "run")
    assert found.path.name == f"{prefix}10"
    assert f"{prefix}11: it is not complete (no {last})" in found.left


def test_trainers_optimizer_numbers_parameters_as_expected(
    sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    model = llama()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], weight_decay=0.1)
    optimizer = Trainer(model, arguments).create_optimizer()
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    found = read_trainer(sources / "transformers")
    assert found is not None and found.numbering is not None
    assert found.numbering() == expected


# --- built-in tasks, whose models have other names ----------------------------
#
# The moments of these optimizers are the weights themselves: wherever a weight goes, its moment
# must go, too.

_LLAMA = ["--model.positions", "rotary", "--model.norm", "rms", "--model.mlp", "swiglu"]
_LLAMA += ["--model.bias", "false", "--model.layers", "2", "--model.heads", "2"]
_LLAMA += ["--model.width", "16", "--model.mlp_width", "24", "--model.tied_embeddings", "false"]
_LLAMA += ["--model.vocab_size", "31", "--model.context", "8", "--model.norm_eps", "1e-6"]


def _tokens(directory: Path) -> list[str]:
    """Write tokens, on which a language model of 31 of them trains; return the keys."""
    torch.randint(0, 31, (4000,), dtype=torch.int32).to(torch.uint16).numpy().tofile(
        directory / "train.u16"
    )
    (directory / "tokens.json").write_text(json.dumps({"vocab_size": 31, "tokenizer": "random"}))
    return ["--task", "language_model", "--data.source", "tokens", "--data.train",
            str(directory / "train.u16"), "--batch.global_size", "8", "--batch.micro_size", "2",
            "--eval.every", "0", "--telemetry.port", "0"]  # fmt: skip


def _of_trainer(directory: Path) -> Path:
    """A checkpoint of the Trainer of transformers whose moments are the weights."""
    from transformers import Trainer, TrainingArguments

    path = directory / "checkpoint-10"
    model = llama()
    model.save_pretrained(path)
    arguments = TrainingArguments(str(directory), use_cpu=True, report_to=[], weight_decay=0.1)
    optimizer = Trainer(model, arguments).create_optimizer()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _moments(parameter)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 10}))
    return path


def _moments(weight: Tensor) -> dict[str, Tensor]:
    weight = weight.detach().clone()
    return {"step": torch.tensor(10.0), "exp_avg": weight, "exp_avg_sq": weight.square()}


def test_optimizer_gets_the_names_and_layouts_of_a_built_in_model(tmp_path: Path) -> None:
    source, keys = _of_trainer(tmp_path / "trainer"), [*_tokens(tmp_path), *_LLAMA]
    out = tmp_path / "runs/taken"
    words = [sys.executable, "-m", "hvdtrain.cli", "takeover", str(source), "--out", str(out)]
    done = start(tmp_path / "output", ["--", *keys], command=words).wait(60)
    assert done.returncode == 0 and "took over step 10" in done.stderr, done
    [directory] = (out / "checkpoints").iterdir()
    checkpoint = read(directory)
    model, optimizer = checkpoint.parts["model"], checkpoint.parts["optimizer"]
    assert checkpoint.state["step"] == 10 and checkpoint.state["samples"] == 80
    assert {key.rpartition("/")[0] for key in optimizer} == model.keys()
    for name, weight in model.items():
        assert torch.equal(optimizer[f"{name}/exp_avg"], weight), name
        assert torch.equal(optimizer[f"{name}/exp_avg_sq"], weight.square()), name
        assert optimizer[f"{name}/step"] == 10
    # Such a checkpoint can be resumed with any layout of the ranks.
    where = ["--run.root", str(tmp_path / "runs"), "--run.id", "taken", "--parallel.tensor", "2"]
    more = [*keys, *where, "--train.duration", "12"]
    done = run(tmp_path / "output", more, "gloo:2")
    assert done.returncode == 0 and "resumed from the checkpoint of step 10" in done.stderr, done
    again = start(tmp_path / "output", ["--", *keys], command=words).wait(60)
    assert again.returncode == 2 and "already contains a run" in again.stderr


def _taken(source: Path, root: Path, *more: str) -> Finished:
    out = root / f"runs/{len(list(root.glob('runs/*')))}"
    words = [sys.executable, "-m", "hvdtrain.cli", "takeover", str(source), "--out", str(out)]
    keys = ["--", *_tokens(root), *_LLAMA, *more]
    return start(root / "output", keys, command=words).wait(60)


def test_optimizer_of_another_kind_or_grouping_is_refused(tmp_path: Path) -> None:
    source = _of_trainer(tmp_path / "trainer")
    done = _taken(source, tmp_path, "--optim.name", "sgd")
    assert done.returncode == 2 and "set optim.name to the optimizer that" in done.stderr, done
    saved = torch.load(source / "optimizer.pt")
    [first, second] = saved["param_groups"]
    first["params"] += second["params"]
    torch.save({**saved, "param_groups": [first]}, source / "optimizer.pt")
    done = _taken(source, tmp_path)
    assert done.returncode == 2 and "has groups of [21] parameters, and this version" in done.stderr


# --- the place of tensors, and what is counted --------------------------------


def _other_run(**content: Any) -> OtherRun:
    return OtherRun("another", Path("source.pt"), 1, Weights({}), **content)


@pytest.mark.parametrize("fused", [False, True])
def test_state_is_placed_as_torch_places_it(fused: bool) -> None:
    """On the device and in the dtype of each parameter; `meta` stands for a GPU."""
    source = nn.Linear(3, 2)
    before = torch.optim.AdamW(source.parameters(), fused=fused)
    source(torch.ones(1, 3)).sum().backward()
    before.step()
    saved = before.state_dict()
    model = nn.Linear(3, 2, device="meta", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    state = placed_state(optimizer, saved, _other_run())["state"]
    for number, parameter in enumerate(model.parameters()):
        for entry in ("exp_avg", "exp_avg_sq"):
            tensor = state[number][entry]
            assert (tensor.device, tensor.dtype) == (parameter.device, torch.bfloat16)
        step = state[number]["step"]
        assert step.dtype == torch.float32 and step.device.type == ("meta" if fused else "cpu")
    assert saved["state"][0]["exp_avg"].device.type == "cpu"


@pytest.mark.parametrize(
    ("named", "counted", "steps"),
    [
        ({"step": 12}, 12, 12),
        ({"step": np.int64(12)}, None, 12),
        ({"step": 120, "global_step": torch.tensor(4000)}, 4000, 4000),  # in the epoch
        ({"iter_num": 12}, 11, 12),  # one was skipped
        ({}, 12, 12),
        ({"step": 48}, 12, None),  # micro-batches
        ({"step": 2}, 12, None),  # epochs
        ({"step": -5}, None, None),
        ({"step": True}, None, None),
        ({"step": "12"}, None, None),
        ({"epoch": 3}, None, None),
    ],
)
def test_steps_are_optimizer_steps_or_refused(
    tmp_path: Path, named: dict[str, Any], counted: int | None, steps: int | None
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters()) if counted is None else None
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for entries in optimizer.state.values():
        if counted is not None:
            entries["step"].fill_(counted)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **named}
    torch.save(content, tmp_path / "source.pt")
    if steps is None:
        assert "does not say how many steps were done" in _refused(tmp_path / "source.pt")
    else:
        assert read_other_run(tmp_path / "source.pt").step == steps


def test_state_from_before_the_loop_comes_back_when_a_run_begins_again() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    script = ScriptState(optimizer)
    script.objects["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    script.begin()
    script.restore()
    for _ in range(5):
        optimizer.step()
        script.objects["scheduler"].step()
    script.keep()
    script.load(())
    script.restore()
    assert script.objects["scheduler"].last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1


# --- mistakes -----------------------------------------------------------------


def _refused(path: Path) -> str:
    with pytest.raises(UserError) as refused:
        read_other_run(path)
    [line] = str(refused.value).splitlines()
    return line


def test_checkpoints_that_cannot_be_continued_are_refused_in_a_line(
    sources: Path, tmp_path: Path
) -> None:
    whole = (sources / "nanogpt.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    assert "cut.pt is not a complete file of torch.save" in _refused(tmp_path / "cut.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    assert "text.pt is not a complete file of torch.save" in _refused(tmp_path / "text.pt")
    torch.save({"model": {}, "epoch": 3}, tmp_path / "weights.pt")
    assert "has epoch, model: the state of a model" in _refused(tmp_path / "weights.pt")
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    uncounted = {"model": nn.Linear(2, 2).state_dict(), "optimizer": sgd.state_dict()}
    torch.save(uncounted, tmp_path / "uncounted.pt")
    assert "does not say how many steps were done" in _refused(tmp_path / "uncounted.pt")
    torch.save({**uncounted, "model": nn.Linear(2, 2), "step": 3}, tmp_path / "object.pt")
    assert "a whole model, which is not read because it is code" in _refused(tmp_path / "object.pt")
    torch.save({**uncounted, "optimizer": 3, "step": 3}, tmp_path / "other.pt")
    assert "has no state of an optimizer" in _refused(tmp_path / "other.pt")
    shutil.copytree(sources / "transformers/checkpoint-10", tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-10/optimizer.pt").unlink()
    assert "saved with save_only_model" in _refused(tmp_path)
    torch.save(
        {**uncounted, "optimizer": {**sgd.state_dict(), "state": {0: {"step": "x"}}}},
        tmp_path / "odd.pt",
    )
    assert "odd.pt is not as its trainer writes it: ValueError" in _refused(tmp_path / "odd.pt")
    assert "ds_to_universal" in _refused(sources / "deepspeed_own")
    assert "expected a checkpoint with an optimizer" in _refused(REPOSITORY / "docs")
    assert "there is no such file" in _refused(tmp_path / "none")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert "expected a checkpoint with an optimizer" in _refused(tmp_path / "run")
    (tmp_path / "run/checkpoints/step_00000003").mkdir()
    assert "is hvdtrain's own: continue it with --run.resume" in _refused(tmp_path / "run")
    torch.save({**uncounted, "step": 3, "scheduler": "cosine"}, tmp_path / "named.pt")
    left = read_other_run(tmp_path / "named.pt").left
    assert left == ["'scheduler' of the file, which is not a state_dict()"]


@pytest.mark.parametrize(
    "kind", ["model", "groups", "shapes", "scheduler", "optimizers", "optimizer", "end"]
)
def test_checkpoint_of_another_script_is_refused(tmp_path: Path, kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    found: dict[str, Any] = {"model": model.state_dict(), "optimizer": saved, "step": 1}
    if kind == "model":
        found["model"] = {"0.weight": torch.ones(3, 2)}
    elif kind == "groups":
        saved["param_groups"][0]["params"] = [0, 1, 2]
    elif kind == "shapes":
        saved["state"][0], saved["state"][2] = saved["state"][2], saved["state"][0]
    elif kind == "scheduler":
        found["scheduler"] = {"last_epoch": 1}
    elif kind == "optimizer":
        other = torch.optim.RMSprop(model.parameters())
        other.step()
        found["optimizer"] = other.state_dict()
    elif kind == "end":
        found["step"] = 1000
        for entries in saved["state"].values():
            entries["step"].fill_(1000)
    else:
        found["optimizer"] = [saved, saved]
    torch.save(found, tmp_path / "source.pt")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, hvdtrain\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "keys = {'run.root': 'runs', 'telemetry.port': 0, 'train.duration': 300}\n"
        "with hvdtrain.training(model, optimizer, config=keys, takeover='source.pt') as training:\n"
        "    for step in training:\n"
        "        raise AssertionError('the run has begun')\n"
    )
    env = environment()
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    expected = {
        "model": "source.pt: the weights are not this model's: 3 missing",
        "groups": "has groups of [3] parameters, and the script's AdamW has groups of [4]",
        "shapes": "has a tensor of shape [1, 3] for parameter 0, whose shape is [3, 2] here",
        "scheduler": "has the state of 1 scheduler, and training.state has 0",
        "optimizers": "has the state of 2 optimizers, and the script has 1",
        "optimizer": "keeps square_avg and step for each parameter, and AdamW exp_avg and "
        "exp_avg_sq and step: it is another optimizer",
        "end": "is of step 1000, but the run has 300 steps: increase train.duration",
    }
    [line] = [one for one in done.stderr.splitlines() if "error:" in one]
    assert done.returncode == 2 and "run.takeover: " in line and expected[kind] in line, done
