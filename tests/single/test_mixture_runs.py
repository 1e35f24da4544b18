"""Whole runs on a mixture in sequential order: ranks, workers, a killed rank, resumed runs."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hvdtrain import cli
from hvdtrain.config import parse
from hvdtrain.data.order import MixedOrder, build_order, specification_of
from hvdtrain.process.build import build_model
from hvdtrain.process.data import build_data
from tests.support.job import Job
from tests.support.mixed import RARE, write
from tests.support.runs import environment, forked_train, metrics, run, weights

STEPS, GLOBAL = 12, 8
TINY = [
    *("--model.layers", "1", "--model.width", "32", "--model.heads", "2", "--model.context", "32"),
    *("--batch.global_size", str(GLOBAL), "--batch.micro_size", "2", "--eval.every", "6"),
    *("--telemetry.port", "0", "--train.duration", str(STEPS)),
    *("--loader.order", "sequential", "--loader.shuffle_buffer", "32"),
    *("--exchange.name", "exact", "--runtime.threads", "1", "--checkpoint.every", "4"),
]
VALUES = ("loss", "grad_norm", "loss_web", "loss_code", "loss_rare", "state_hash")


CHANGE = "--data.mixture_weights={7: {web: 0.3, code: 0.68, rare: 0.02}}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, with workers."""
    root = tmp_path_factory.mktemp("mixture")
    (root / "mixture").write_text(write(root / "data"))
    done = run(root / "output", _flags(root, "whole", CHANGE, "--loader.workers", "2"))
    assert done.returncode == 0, done
    return root


def _flags(root: Path, name: str, *more: str) -> list[str]:
    mixture = (root / "mixture").read_text()
    return [*TINY, mixture, "--run.root", str(root), "--run.id", name, *more]


def _curve(directory: Path) -> list[dict[str, Any]]:
    """The values of each step that do not depend on time, and those of its evaluation."""
    return [
        {n: v for n, v in line.items() if n in VALUES or n.startswith("validation_")}
        for line in metrics(directory)
    ]


def test_mixture_curve_is_unchanged_after_rank_is_killed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "hosts").write_text("localhost:3\n")
    launcher = shlex.split(
        "horovodrun --gloo -np 3 --min-np 1 --max-np 3 --network-interfaces lo"
        f" --host-discovery-script 'cat {root}/hosts'"
    )
    task = ["--task", "tests.support.mixed:KilledLanguageModel"]
    env = environment({"HVDTRAIN_TEST_KILL": "2:5"})
    command = [*launcher, *forked_train(3), *_flags(root, "killed", CHANGE, *task)]
    done = Job([], command, env, root / "killed-job").wait(180)
    assert done.returncode == 0, done
    events = (root / "killed/events.jsonl").read_text().splitlines()
    starts = [event for event in map(json.loads, events) if event["event"] == "start"]
    assert "failure" in [event["cause"] for event in starts], done
    assert _curve(root / "killed") == _curve(root / "whole")
    assert weights(root / "killed", STEPS) == weights(root / "whole", STEPS)
    for name in ("whole", "killed"):
        assert cli.main(["audit", str(root / name)]) == 0
        audited = capsys.readouterr().out
        for source in ("web", "code", RARE):
            assert f"samples of {source}; at every position the order was computed" in audited


def test_losses_of_sources_are_means_over_their_samples(root: Path) -> None:
    settings = parse(["--config", str(root / "whole/config.yaml")])
    task, datasets = build_data(settings)
    config, mixture = settings.config, datasets.train
    order = build_order(specification_of(mixture, config.loader), config.seed, GLOBAL)
    assert isinstance(order, MixedOrder)
    model = build_model(task, config, torch.device("cpu"))
    found: dict[str, list[float]] = {"web": [], "code": [], RARE: []}
    for index in order.samples(0, GLOBAL).tolist():
        tokens, source = mixture[index]
        logits = model(tokens[None, :-1]).flatten(0, 1)
        found[[*found][source]].append(F.cross_entropy(logits, tokens[1:]).item())
    first, *lines = metrics(root / "whole")
    assert len(found["web"]) > 1 and len(found["code"]) > 1 and not found[RARE]
    for name in ("web", "code"):
        mean = sum(found[name]) / len(found[name])
        assert first[f"loss_{name}"] == pytest.approx(mean, rel=1e-5)
    assert first[f"loss_{RARE}"] is None  # a step that has no sample of a source has no loss of it
    assert first["loss"] == pytest.approx(sum(map(sum, found.values())) / GLOBAL, rel=1e-5)
    for line in lines:
        used = [b - a for a, b in zip(*map(order.before, _positions(line)), strict=True)]
        assert [line[f"loss_{name}"] is None for name in found] == [not count for count in used]
    assert any(line[f"loss_{RARE}"] is None for line in lines)


def _positions(line: dict[str, Any]) -> tuple[int, int]:
    return line["samples"] - GLOBAL, line["samples"]


def test_resume_accepts_other_weights_of_later_steps_only(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(root / "whole/checkpoints/step_00000008")
    flags = _flags(root, "refused", "--run.resume", checkpoint)
    done = run(root / "output", flags)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    was = "of 1000 samples 600 web (sequential, shuffle_buffer 32), 380 code"
    assert f"the order of the samples was {was}" in done.stderr, done
    assert "from step 7 on of 1000 samples 300 web" in done.stderr
    shutil.copytree(root / "whole", root / "changed")
    for step in (8, 12):
        shutil.rmtree(root / f"changed/checkpoints/step_{step:08}")
    later = "--data.mixture_weights={6: {web: 0.1, code: 0.2, rare: 0.7}}"
    done = run(root / "output", _flags(root, "changed", later), "gloo:2")
    assert done.returncode == 0, done
    changed, whole = _curve(root / "changed"), _curve(root / "whole")
    assert changed[:5] == whole[:5] and changed[6:] != whole[6:]
    assert all(line[f"loss_{RARE}"] is not None for line in changed[6:])
    capsys.readouterr()
    assert cli.main(["audit", str(root / "changed")]) == 0
    assert capsys.readouterr().out.count("no epoch uses a sample twice") == 3


def test_audit_finds_an_order_that_differs_from_the_recorded_one(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(root / "killed", tmp_path / "run")
    events = tmp_path / "run/events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    last = [line for line in lines if line["event"] == "start"][-1]
    last["order"]["counts"][0][1] = [500, 480, 20]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["audit", str(tmp_path / "run")]) == 1
    assert "before which its order of samples differs" in capsys.readouterr().out


def test_report_has_samples_epochs_and_losses_of_each_source(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(root / "whole"), "--format", "json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert [source["name"] for source in sources] == ["web", "code", RARE]
    assert sum(source["samples"] for source in sources) == STEPS * GLOBAL
    last = metrics(root / "whole")[-1]
    web = sources[0]
    assert web["final_loss"] == last["loss_web"]
    assert web["final_validation_loss"] == last["validation_loss_web"]
    assert web["epochs"] == pytest.approx(web["samples"] / 185)
    assert cli.main(["report", str(root / "whole")]) == 0
    page = (root / "whole/report.html").read_text()
    assert "Sources of the mixture" in page and "The last losses of the sources are" in page
