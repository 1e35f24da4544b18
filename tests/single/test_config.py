"""The configuration: precedence of its sources, and the content and time of its errors."""

from __future__ import annotations

import re
import resource
import subprocess
from pathlib import Path

import pytest
import yaml

from hvdtrain.config import Config, parse, presets
from hvdtrain.config_tiers import tiers_of
from hvdtrain.errors import UserError
from hvdtrain.tasks import BUILT_IN
from hvdtrain.tasks.language_model import LanguageModelConfig
from tests.support.runs import TRAIN, environment


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text("train: {duration: 70}\noptim: {lr: 0.5}\nmodel: {layers: 2}\n")
    return path


def _run(
    *arguments: str, python: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TRAIN[0], *python, *TRAIN[1:], *arguments],
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_task_defaults_override_global_defaults() -> None:
    assert parse([]).config.train.steps == 400
    assert parse(["--task", "tests.support.tasks:Regression"]).config.train.steps == 10
    assert parse(["--task=tests.support.tasks:Regression"]).config.optim.lr == 0.01


def test_file_overrides_task_defaults_only_for_its_own_keys(file: Path) -> None:
    settings = parse(["--config", str(file)])
    assert (settings.config.train.steps, settings.config.optim.lr) == (70, 0.5)
    assert settings.task_config.model.layers == 2
    assert settings.task_config.model.heads == 4 and settings.config.optim.weight_decay == 0.1


def test_flag_overrides_the_file_in_any_order(file: Path) -> None:
    for argv in (
        ["--train.duration", "9", "--config", str(file)],
        [f"--config={file}", "--train.duration=9"],
    ):
        settings = parse(argv)
        assert (settings.config.train.steps, settings.config.optim.lr) == (9, 0.5)


def test_later_file_overrides_the_earlier_one(file: Path) -> None:
    settings = parse(["--config", "gpt-small", "--config", str(file)])
    assert (settings.config.train.steps, settings.task_config.model.layers) == (70, 2)
    assert settings.task_config.model.width == 768


def test_file_can_choose_the_task(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("task: tests.support.tasks:Regression\nseed: 3\n")
    settings = parse(["--config", str(tmp_path / "t.yaml")])
    assert settings.task_class.__name__ == "Regression" and settings.config.train.steps == 10


@pytest.mark.parametrize("name", presets())
def test_every_preset_parses_to_its_own_values(name: str) -> None:
    content = yaml.safe_load(presets()[name].read_text())
    resolved = yaml.safe_load(parse(["--config", name]).resolved)
    for group, keys in content.items():
        values = keys.items() if isinstance(keys, dict) else []
        assert all(resolved[group][key] == value for key, value in values)


def test_task_config_accepts_a_mapping_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weighted.py").write_text(
        "from dataclasses import dataclass, field\n"
        "@dataclass\n"
        "class Settings:\n"
        "    shares: dict[str, float] = field(default_factory=dict)\n"
        "class Task:\n"
        "    Config = Settings\n"
        "    def __init__(self, config): ...\n"
        "    def datasets(self): ...\n"
        "    def model(self): ...\n"
        "    def loss(self, model, batch): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "w.yaml").write_text("task: weighted:Task\nshares: {books: 0.5, web: 2}\n")
    settings = parse(["--config", str(tmp_path / "w.yaml")])
    assert settings.task_config.shares == {"books": 0.5, "web": 2.0}
    (tmp_path / "again.yaml").write_text(settings.resolved)
    assert parse(["--config", str(tmp_path / "again.yaml")]) == settings


def test_gpt_nano_is_the_default() -> None:
    assert parse(["--config", "gpt-nano"]).resolved == parse([]).resolved


def test_printed_configuration_round_trips(tmp_path: Path) -> None:
    flags = ["--optim.betas", "[0.8, 0.9]", "--data.train", '["a*", "b"]', "--run.id", "x"]
    done = _run("--config", "gpt-small", *flags, "--print_config")
    assert done.returncode == 0, done
    (tmp_path / "printed.yaml").write_text(done.stdout)
    again = parse(["--config", str(tmp_path / "printed.yaml")])
    settings = parse(["--config", "gpt-small", *flags])
    assert again == settings and again.config.optim.betas == (0.8, 0.9)
    (tmp_path / "resolved.yaml").write_text(settings.resolved)
    assert parse(["--config", str(tmp_path / "resolved.yaml")]) == settings


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--optim.lrr", "1"], "unknown key optim.lrr on the command line; .*mean optim.lr?"),
        (
            ["--train.duratio=1"],
            "unknown key train.duratio .*mean train.duration?",
        ),
        (["--modle.layers", "1"], "unknown key modle.layers .*mean model.layers?"),
        (["--xyzzy", "1"], "unknown key xyzzy .*--help"),
        (["train.duration=3"], "train.duration=3"),
        (["--train.duration", "many"], "train.duration must be a number of steps .*many"),
        (["--optim.lr", "fast"], "optim.lr: expected float, not .*fast"),
        (["--optim.name", "adm"], "optim.name: expected .*adamw.*sgd.*, not .*adm"),
        (["--optim.betas", "[0.9]"], "optim.betas: expected tuple with 2 elements, not .*0.9"),
        (["--seed", ""], "seed: expected int, not nothing"),
        (["--model.vocab_size", "big"], "model.vocab_size: expected int or null, not big"),
        (["--optim.lr", "-1"], "optim.lr must be > 0, not -1"),
        (["--train.duration", "0"], "train.duration must be .*not 0"),
        (["--seed", "-1"], "seed must be >= 0, not -1"),
        (["--schedule.final_ratio", "2"], "schedule.final_ratio .*not 2"),
        (["--checkpoint.keep", "0"], "checkpoint.keep must be >= 1, not 0"),
        (["--telemetry.port", "70000"], "telemetry.port .*65535.*70000"),
        (["--telemetry.tls_cert_file", "x.pem"], "requires telemetry.tls_key_file"),
        (["--telemetry.exchange_every", "-1"], "telemetry.exchange_every must be >= 0, not -1"),
        (["--run.id", "../x"], r"run.id .*\.\./x"),
        (["--model.heads", "3"], "model.width 128 .*model.heads 3"),
        (["--data.source", "tokens"], "data.source tokens needs data.train"),
        (
            ["--batch.global_size", "30"],
            "batch.global_size 30 is not a multiple of batch.micro_size 4; .*fits: 3 or 5",
        ),
        (["--config", "gpt-nona"], "gpt-nona: no such file, and no preset .*gpt-nano"),
        (["--config"], "--config"),
        (["--task", "language_modle"], "no task is called 'language_modle'; .*language_model"),
        (["--task", "no_module:Task"], "no module 'no_module'"),
        (["--task", "tests.support.tasks:Regresion"], "no class 'Regresion'"),
        (["--task", "pathlib:Path"], "has no method datasets, model, loss"),
        (
            ["--task", "tests.support.tasks:NeedsConfig"],
            r"NeedsConfig has no Config, .*__init__\(config: .*required argument: 'config'\); ",
        ),
        (
            ["--task", "tests.support.tasks:IgnoresConfig"],
            r"IgnoresConfig has a Config, .*__init__\(\) .*; write `def __init__\(self, config\)`",
        ),
    ],
)
def test_invalid_flag_is_rejected_with_a_one_line_explanation(
    argv: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse(argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("optim: {lrr: 1}", "unknown key optim.lrr in .*my.yaml; did you mean optim.lr?"),
        (
            "trian: {log_every: 1}",
            "unknown key trian.log_every in .*mean train.log_every?",
        ),
        ("optim.lrr: 1", "unknown key optim.lrr in .*mean optim.lr?"),
        ("train: {duration: many}", "train.duration must be .*not many"),
        ("train: 3", "train is a group of keys, not 3"),
        ("train: {duration: -3}", "train.duration must be .*not -3"),
        ("batch: {micro_size: 5}", "global_size 32 .*micro_size 5"),
        ("- 1\n- 2", "keys and values"),
        ("train: {duration: 3", "is not YAML"),
        ("\0", "is not YAML"),
    ],
)
def test_invalid_file_is_rejected_with_an_explanation(
    file: Path, content: str, message: str
) -> None:
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        parse(["--config", str(file)])


def test_file_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"run: {id: \xe9}")
    with pytest.raises(UserError, match=r"latin\.yaml is not YAML"):
        parse(["--config", str(tmp_path / "latin.yaml")])


def test_configuration_error_is_reported_before_torch_is_imported() -> None:
    done = _run("--batch.micro_size", "5", python=("-X", "importtime"))
    assert done.returncode == 2 and done.stdout == ""
    imported = [
        line.rsplit("|", 1)[-1].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    ]
    assert "jsonargparse" in imported
    assert not {"torch", "horovod", "horovod.torch", "numpy"} & set(imported)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(said) == 1 and said[0].startswith("hvdtrain: error: batch.global_size 32"), said


def test_configuration_error_on_rank_1_only_is_reported() -> None:
    # No rank 0 reports it, so this rank does after waiting for it.
    done = _run("--optim.lrr", "1", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hvdtrain: error: rank 1 on ")
    assert done.stderr.count("optim.lrr") == 1


def _keys_of_help(said: str) -> set[str]:
    return {*re.findall(r"^  --([a-z_.0-9]+)", said, re.MULTILINE)} - {"config", *NO_KEYS}


NO_KEYS = {"print_config", "print_layout", "data.mixture.help"}


@pytest.mark.parametrize("which", [["--help"], ["--help", "all"]])
def test_help_lists_basic_or_all_keys_in_a_second_of_cpu_time(which: list[str]) -> None:
    took = []
    for _ in range(3):  # the best of three, because other programs may use the cores
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = _run(*which)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0 and done.stderr == ""
    tiers = dict([*tiers_of(Config), *tiers_of(LanguageModelConfig)])
    wanted = {key for key, tier in tiers.items() if tier == "basic" or "all" in which}
    assert _keys_of_help(done.stdout) == wanted and "--config" in done.stdout
    assert len(wanted) == (len(tiers) if "all" in which else 20)
    assert min(took) < 1.0


@pytest.mark.parametrize("task", BUILT_IN)
def test_help_of_each_task_shows_20_keys_and_says_how_to_see_all(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--task", task, "--help"])
    said = capsys.readouterr().out
    assert len(_keys_of_help(said)) == 20
    assert re.search(r"20 of \d+ keys; `--help all` shows all", said)


def test_help_has_a_short_usage_and_named_sections() -> None:
    said = _run("--help", COLUMNS="100").stdout
    usage, description, *_ = said.split("\n\n")
    assert usage == "usage: hvdtrain train [--config FILE_OR_PRESET] [--section.key VALUE ...]"
    assert description.startswith("Train a task")
    assert "gpt-nano, gpt-small" in said
    assert "<class" not in said and "Path to a configuration file" not in said


def test_section_can_be_read_from_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "optim.yaml").write_text("lr: 0.25\n")
    assert parse(["--optim", str(tmp_path / "optim.yaml")]).config.optim.lr == 0.25


def test_help_does_not_import_torch() -> None:
    done = _run("--help", python=("-X", "importtime"))
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and not {"torch", "horovod", "numpy"} & imported
