"""Tables of refused combinations, and the ranks' agreement at the start."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from hvdtrain.config import parse
from hvdtrain.config_checks import CHECKS, RANK_CHECKS, Ranks, check_ranks
from hvdtrain.errors import EXIT_USER, UserError
from hvdtrain.parallel.config import AXES
from hvdtrain.process import start_checks
from hvdtrain.process.start_checks import raise_first
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.collectives import AgreedError
from hvdtrain.runtime.mesh import key_of_degree

DOCS = Path(__file__).resolve().parents[2] / "docs"

# A value that enables a key, or that a check names, for each term of the tables.
TERM = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)*)(?: ([^`]+))?`( above 1| other than `(\S+)`)?")
ON = {
    "run.takeover": "directory",
    "run.init_from": "directory",
    "train.patience": "2",
    "checkpoint.keep_best": "true",
    "checkpoint.memory.every": "5",
    "batch.max_tokens": "64",
    "batch.per_rank_size": "4",
    "optim.scale_lr": "linear",
    "optim.fused": "true",
    "optim.ema_decay": "0.9",
    "exchange.wire": "float16",
    "exchange.compression": "topk",
    "exchange.sync_every": "4",
    "exchange.outer": "nesterov",
    "integrity.replay_every": "100",
    "compile": "true",
    "precision.cudnn_benchmark": "true",
    "parallel.shard.offload": "cpu",
    "telemetry.tls_cert_file": "cert.pem",
    "telemetry.tls_key_file": "key.pem",
}
# A value other than those that a check requires.
OTHER = {"optim.name": "lion"}
EXCLUSIONS = [check for check in CHECKS if " excludes " in check.combination]
REQUIREMENTS = [check for check in CHECKS if " requires " in check.combination]


def _flags(text: str, axis: str = AXES[0]) -> list[str]:
    """Return flags that make all terms in a combination's text true."""
    if text.startswith("a degree of `parallel`"):
        return [f"--{key_of_degree(axis)}=2"]
    match = TERM.match(text)
    assert match is not None, text
    key, value, above, _ = match.groups()
    return [f"--{key}={value or ('2' if above == ' above 1' else ON[key])}"]


@pytest.mark.parametrize("check", EXCLUSIONS, ids=lambda check: check.combination)
def test_each_excluded_combination_is_refused_with_its_reason(check: object) -> None:
    combination, why = check.combination, check.why  # type: ignore[attr-defined]
    first, second = combination.split(" excludes ")
    for axis in AXES if first.startswith("a degree of") else AXES[:1]:
        flags = [*_flags(first, axis), *_flags(second)]
        if "exchange.name exact" in combination:
            flags.append("--runtime.threads=1")
        with pytest.raises(UserError) as refused:
            parse(["--task", "tests.support.tasks:Regression", *flags])
        assert str(refused.value).endswith(why) and " excludes " in str(refused.value)


@pytest.mark.parametrize("check", REQUIREMENTS, ids=lambda check: check.combination)
def test_each_missing_requirement_is_reported_with_its_reason(check: object) -> None:
    combination, why = check.combination, check.why  # type: ignore[attr-defined]
    first, second = combination.split(" requires ")
    flags = _flags(first)
    if second.startswith("`optim.name"):
        flags.append("--optim.name=muon")
    with pytest.raises(UserError) as refused:
        parse(["--task", "tests.support.tasks:Regression", *flags])
    assert str(refused.value).endswith(why) and " requires " in str(refused.value)


def test_combinations_are_listed_once() -> None:
    listed = [check.combination for check in (*CHECKS, *RANK_CHECKS)]
    assert len(listed) == len(set(listed))
    for a, b in itertools.combinations([c.combination for c in EXCLUSIONS], 2):
        assert a.split(" excludes ") != b.split(" excludes ")[::-1]


def test_table_of_parallel_axes_lists_every_exclusion() -> None:
    """A key that excludes models that span ranks has "no" in the columns of all axes."""
    refused = ""
    for line in (DOCS / "parallel.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[2:] == ["no"] * 4:
            refused += cells[0]
    for check in EXCLUSIONS:
        first, _, second = check.combination.partition(" excludes ")
        if first.startswith("a degree of `parallel`"):
            key, value, *_ = TERM.match(second).groups()  # type: ignore[union-attr]
            assert key in refused and (value or "") in refused, second


def test_rank_checks_pass_default_configuration_on_any_ranks() -> None:
    config = parse([]).config
    for size, elastic in itertools.product((1, 2, 3, 64), (False, True)):
        check_ranks(config, Ranks(size, elastic, mpi=False, patched=False))


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("--exchange.wire=bfloat16", Ranks(2, False, patched=False), "requires its patches"),
        ("--precision.name=bf16-params", Ranks(2, False, patched=False), "requires its patches"),
        ("--parallel.tensor=2", Ranks(2, False, torch="2.8.0+cu128"), "requires torch 2.9"),
        ("--exchange.reduce=adasum", Ranks(2, False, mpi=False), "requires MPI"),
        ("--exchange.reduce=adasum", Ranks(1, True, mpi=True), "cannot be elastic"),
        ("--exchange.reduce=adasum", Ranks(3, False, mpi=True), "2, 4, 8, ... ranks, not 3"),
        ("--exchange.reduce=adasum", Ranks(64, False, mpi=True), "multiple of the 64 ranks"),
        (
            "--parallel.shard.stage=1 --parallel.shard.copies=3",
            Ranks(2, False),
            "exceeds the 2 ranks",
        ),
        ("--batch.micro_size=auto", Ranks(1, True), "set a number"),
        (
            "--parallel.tensor=2 --checkpoint.memory.every=5",
            Ranks(2, False),
            "requires an elastic run",
        ),
        ("--batch.per_rank_size=4", Ranks(1, True), "set batch.global_size"),
        ("--profile.steps=1:2 --profile.ranks=0,3", Ranks(2, False), "ranks are 0 to 1"),
    ],
)
def test_configuration_that_excludes_the_ranks_is_refused(
    flags: str, ranks: Ranks, message: str
) -> None:
    config = parse(["--task", "tests.support.tasks:Regression", *flags.split()]).config
    with pytest.raises(UserError, match=re.escape(message)):
        check_ranks(config, ranks)


def test_first_rank_that_differs_speaks_and_names_the_others() -> None:
    raise_first(["", "", ""])
    with pytest.raises(AgreedError, match=r"^other data \(also on ranks 2, 4\)$") as error:
        raise_first(["", "other data", "other data", "other device", "other data"])
    assert (error.value.rank, error.value.exit_code) == (1, EXIT_USER)
    with pytest.raises(AgreedError, match=r"^other data$"):
        raise_first(["", "", "other data"])


def test_only_number_0_of_a_run_new_to_the_mirror_contacts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when an earlier mirror's address begins with this one's."""
    checked: list[str] = []
    monkeypatch.setattr(start_checks, "check_mirror", lambda url, _: checked.append(url))
    words = [
        "--task",
        "tests.support.tasks:Regression",
        "--run.root",
        str(tmp_path),
        "--run.id",
        "run",
    ]
    for name in ("run-10", "run-1"):
        url = f"file://{tmp_path}/{name}"
        settings = parse([*words, "--checkpoint.mirror", url])
        for number in (1, 0):
            start_checks._check_mirror(settings.config, number, elastic=False)
            assert checked == ([] if number else [url]), name
        checked.clear()
        directory = RunDirectory(tmp_path / "run")
        directory.path.mkdir(exist_ok=True)
        directory.write_manifest({"starts": [{"time": 1.0, "config": settings.resolved}]})
        start_checks._check_mirror(settings.config, 0, elastic=False)
        assert not checked, name
    monkeypatch.setattr(RunDirectory, "starts", lambda _: pytest.fail("number 1 needs no manifest"))
    start_checks._check_mirror(settings.config, 1, elastic=False)
