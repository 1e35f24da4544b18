"""Keys of earlier versions: replaced with one warning, refused in contradictions, kept in runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from hvdtrain import cli
from hvdtrain.config import parse, with_current_names
from hvdtrain.config_renames import DROPPED, RENAMED, TASK_SECTIONS, recorded
from hvdtrain.errors import UserError
from hvdtrain.tasks import BUILT_IN
from tests.support.runs import TINY, run

FORMAT_1 = Path(__file__).resolve().parents[1] / "data/format-1"

# Old flags, and current flags that mean the same.
SAME = [
    ("--train.steps 7", "--train.duration 7"),
    ("--train.steps=7", "--train.duration=7"),
    ("--train.epochs 1.5", "--train.duration 1.5epochs"),
    ("--memory.fit true", "--batch.micro_size auto"),
    ("--memory.fit true --batch.micro_size 8", "--batch.micro_size auto"),
    ("--memory.fit false", ""),
    ("--compile.enabled true", "--compile true"),
    ("--parallel.shard 2", "--parallel.shard.degree 2"),
    (
        "--parallel.shard 2 --parallel.reshard_after_forward false --parallel.offload cpu",
        "--parallel.shard.degree 2 --parallel.shard.stage 2 --parallel.shard.offload cpu",
    ),
    (
        "--parallel.zero 1 --parallel.reshard_after_forward true --parallel.zero_copies 3",
        "--parallel.shard.stage 1 --parallel.shard.copies 3",
    ),
    ("--parallel.zero 0", ""),
    (
        "--model.attention block_sparse --model.block_size 32 --model.local_blocks 2",
        "--model.attention.pattern block_sparse --model.attention.block_size 32"
        " --model.attention.local_blocks 2",
    ),
    ("--task image --image.data a --image.validation b", "--task image --data.train a"
     " --data.validation b"),
    (
        "--task tabular --tabular.label x --tabular.split_by y --tabular.data a --tabular.data+ b",
        "--task tabular --tabular.label x --tabular.split_by y --data.train a --data.train+ b",
    ),
    *((f"--{key} 1", "") for key in DROPPED if not key.startswith("huggingface.")),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), SAME)
def test_old_flags_mean_the_same_as_current_flags(old: str, new: str) -> None:
    found, wanted = parse(old.split()), parse(new.split())
    assert (found.config, found.task_config) == (wanted.config, wanted.task_config)
    assert found.resolved == wanted.resolved and wanted.warning == ""
    assert "\n" not in found.warning
    for word in old.split():
        key = word.removeprefix("--").partition("=")[0].rstrip("+")
        if key in DROPPED or any(key in rule.old for rule in RENAMED):
            assert key in found.warning


def test_old_keys_of_a_file_are_replaced_before_flags_override_them(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("train: {epochs: 3}\nparallel.zero: 1\ncompile:\n  enabled: true\n")
    settings = parse(["--config", str(file), "--train.steps", "9", "--parallel.zero", "0"])
    assert settings.config.train.duration == 9 and settings.config.compile
    assert settings.config.parallel.shard.stage == 3
    assert "train.epochs 3 is now train.duration" in settings.warning


@pytest.mark.parametrize(
    ("content", "flag", "key"),
    [
        ("batch.micro_size: auto", "--memory.fit=false", "batch.micro_size"),
        ("memory: {fit: true}", "--memory.fit=false", "batch.micro_size"),
        ("train: {duration: 3 epochs}", "--train.epochs=0", "train.duration"),
    ],
)
def test_old_flag_cannot_switch_off_what_a_file_sets(
    tmp_path: Path, content: str, flag: str, key: str
) -> None:
    file = tmp_path / "on.yaml"
    file.write_text(f"{content}\n")
    with pytest.raises(UserError, match=f"on the command line: {key} would remain .* set {key}"):
        parse([f"--config={file}", flag])
    file.write_text("{batch.micro_size: 8, batch.global_size: 8, train.duration: 9}\n")
    settings = parse([f"--config={file}", flag])
    assert (settings.config.batch.micro_size, settings.config.train.steps) == (8, 9)


def test_old_keys_in_a_tasks_defaults_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "older.py").write_text(
        "from tests.support.tasks import Regression\n"
        "class Older(Regression):\n"
        "    defaults = {'train.steps': 33}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = parse(["--task", "older:Older"])
    assert settings.config.train.duration == 33 and "train.steps" in settings.warning


def test_task_may_use_an_old_key_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owning.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from tests.support.tasks import Regression\n"
        "@dataclass\n"
        "class Pictures:\n"
        "    data: str = ''\n"
        "@dataclass\n"
        "class Keys:\n"
        "    image: Pictures = field(default_factory=Pictures)\n"
        "class Owning(Regression):\n"
        "    Config = Keys\n"
        "    def __init__(self, config): super().__init__()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = parse(["--task", "owning:Owning", "--image.data", "x"])
    assert settings.task_config.image.data == "x" and settings.warning == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train.steps 3 --train.duration 4", "train.steps 3 and train.duration 4, both on the"),
        ("--train.steps 3 --train.epochs 4", "train.epochs 4 excludes train.steps 3"),
        (
            "--parallel.zero 1 --parallel.shard.stage 2",
            "parallel.zero 1 and parallel.shard.stage 2",
        ),
        ("--compile.enabled true --compile false", "compile replaces the old key"),
        ("--train.steps", "train.steps: a value is expected"),
        ("--tabular.data x", "unknown key tabular.data"),
        ("--memory.fit false --batch.micro_size auto", "batch.micro_size would remain .auto.; set"),
    ],
)
def test_contradiction_of_old_and_current_key_is_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        parse(flags.split())
    assert "\n" not in str(refused.value)
    assert parse(["--train.steps", "3", "--train.duration", "3"]).config.train.steps == 3


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.durration", "did you mean train.duration?"),
        ("memory.fitt", "did you mean memory.fit, which is now batch.micro_size?"),
        ("loader.prefetc", "did you mean loader.prefetch, which has no effect now?"),
    ],
)
def test_hint_for_an_unknown_key_knows_current_and_old_keys(key: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        parse([f"--{key}=1"])
    assert str(refused.value).endswith(hint)


def test_flags_with_current_names_can_be_overridden() -> None:
    flags = with_current_names(["--config", "gpt-nano", "--train.steps", "400"])
    assert parse([*flags, "--train.duration=2"]).config.train.steps == 2


def test_recorded_configuration_is_read_without_a_task() -> None:
    content = yaml.safe_load((FORMAT_1 / "config.yaml").read_text())
    found = recorded(content)
    assert found["train"]["duration"] == 12 and "steps" not in found["train"]
    assert "straggler_threshold" not in found["telemetry"] and found["batch"] == content["batch"]
    both = {"train": {"steps": 3, "epochs": 2}}  # edited: reports show what is there
    assert recorded(both) == both


def test_recorded_sections_of_a_task_of_its_own_stay_as_they_are() -> None:
    own = {"image": {"data": "x", "cache": 3}, "model": {"attention": "mine", "block_size": 7}}
    content = {"task": "mine:Mine", "train": {"steps": 3}, **own}
    assert recorded(content) == {"task": "mine:Mine", "train": {"duration": 3}, **own}
    built_in = recorded(content | {"task": "image"})
    assert built_in["data"] == {"train": "x", "cache": 3} and "image" not in built_in
    assert TASK_SECTIONS.keys() == BUILT_IN.keys()


def test_run_of_an_older_version_resumes_with_its_own_configuration(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_1, tmp_path / "format-1")
    where = ["--run.root", str(tmp_path), "--data.train", "LICENSE"]
    flags = ["--config", str(FORMAT_1 / "config.yaml"), *where, "--train.steps", "14"]
    done = run(tmp_path / "o", flags)
    assert done.returncode == 0, done.stderr
    assert "resumed from the checkpoint of step 12" in done.stderr
    assert done.stderr.count("old keys") == 1


def test_one_rank_warns_of_old_keys_in_one_line(tmp_path: Path) -> None:
    keys = ["--train.steps", "1", "--parallel.zero", "0", "--loader.prefetch", "4"]
    done = run(tmp_path, [*TINY, "--run.root", str(tmp_path), *keys], "gloo:2")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "train.duration" in line)
    assert "hvdtrain: warning: old keys" in line and line.count("warning") == 1
    assert "train.steps 1 is now train.duration 1" in line
    assert "loader.prefetch has no effect now: each worker loads 2 micro-batches ahead" in line


def test_command_that_does_not_train_also_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["deploy", "slurm", "--", "--run.id", "x", "--train.steps", "5"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("hvdtrain: warning: ") and "train.steps 5 is now train.duration 5" in line
    )
