"""`hvdtrain data tokenize`: the same files from any number of ranks; a failure keeps old ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.config import DataConfig
from hvdtrain.data.files import assign_files
from hvdtrain.data.packed import read_text
from hvdtrain.data.text import Tokenizer
from hvdtrain.data.token_files import TokenMeta, read_token_files
from hvdtrain.data.tokenize import Source, Writer, tokenize
from hvdtrain.errors import UserError
from hvdtrain.launch.commands import mpirun
from hvdtrain.runtime.mpi import Alone

TOKENIZE = ["-m", "hvdtrain.cli", "data", "tokenize"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    directory = tmp_path / "text"
    for i in range(9):
        path = directory / f"{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Zeile {i}: größer als vorher\n" * (1 + 40 * i))
    (directory / "empty.txt").touch()
    return directory


def _run(
    *arguments: str | Path, np: int = 1, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command if np == 1 else mpirun(np, command),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def _content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.slow
def test_result_does_not_depend_on_the_number_of_ranks(corpus: Path, tmp_path: Path) -> None:
    for np_ in (1, 3):
        done = _run(*TOKENIZE, "--out", tmp_path / str(np_), "--input", corpus, np=np_)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("tokens") == 2  # one rank reports it
    alone, shared = _content(tmp_path / "1"), _content(tmp_path / "3")
    assert alone == shared
    assert set(alone) == {"train.u16", "validation.u16", "tokens.json"}  # no temporary files


def test_token_files_equal_the_tokens_read_from_text(tmp_path: Path) -> None:
    tokenize(Source(), tmp_path, Alone())
    expected = read_text(DataConfig(), Tokenizer(None))
    for name, tokens in zip(("train", "validation"), expected, strict=True):
        (written,), meta = read_token_files(name, [str(tmp_path / f"{name}.u16")])
        assert meta == TokenMeta(256, "bytes")
        assert np.array_equal(np.asarray(written), tokens)


def test_separated_token_files_equal_the_tokens_of_a_document_mask(
    corpus: Path, tmp_path: Path
) -> None:
    tokenize(Source([str(corpus)], separate=True), tmp_path / "out", Alone())
    config = DataConfig(train=[str(corpus)], document_mask=True)
    expected = read_text(config, Tokenizer(None))
    for name, tokens in zip(("train", "validation"), expected, strict=True):
        (written,), meta = read_token_files(name, [str(tmp_path / f"out/{name}.u16")])
        assert meta == TokenMeta(256, "bytes", separator=0)
        assert np.array_equal(np.asarray(written), tokens) and np.asarray(written)[-1] == 0
    assert sum((tokens == 0).sum() for tokens in expected) == 9


def test_single_file_is_split_at_the_validation_fraction(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_bytes(bytes(range(1, 256)) * 3)
    written = tokenize(Source([str(text)], None, 0.1), tmp_path / "out", Alone())
    assert list(written.values()) == [689, 76]
    data = np.concatenate([np.fromfile(path, dtype="<u2") for path in written])
    assert data.astype(np.uint8).tobytes() == text.read_bytes()


@pytest.fixture
def words(tmp_path: Path) -> Callable[[int], Path]:
    """Write a tokenizer.json that splits at spaces, with a vocabulary of the given size."""
    library = pytest.importorskip("tokenizers")

    def make(size: int) -> Path:
        vocabulary = {"[UNK]": 0, "Zeile": 1, "größer": 2}
        vocabulary |= {f"w{i}": i for i in range(len(vocabulary), size)}
        tokenizer = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
        path = tmp_path / f"words-{size}.json"
        tokenizer.save(str(path))
        return path

    return make


@pytest.mark.parametrize(("size", "suffix"), [(65536, ".u16"), (65537, ".u32")])
def test_token_file_type_fits_the_vocabulary_size(
    corpus: Path, tmp_path: Path, words: Callable[[int], Path], size: int, suffix: str
) -> None:
    source, out = Source([str(corpus)], str(words(size))), tmp_path / "out"
    tokenize(Source([str(corpus)]), out, Alone())
    written = tokenize(source, out, Alone())  # also replaces files with another suffix
    assert {path.name for path in out.iterdir()} == {path.name for path in written} | {
        "tokens.json"
    }
    assert {path.suffix for path in written} == {suffix}
    (tokens,), meta = read_token_files("data.train", [str(out / f"train{suffix}")])
    assert meta == TokenMeta(size, f"words-{size}.json")
    config = DataConfig(train=[str(corpus)], tokenizer=source.tokenizer)
    assert np.array_equal(np.asarray(tokens), read_text(config, Tokenizer(source.tokenizer))[0])
    assert {1, 2} <= set(np.asarray(tokens).tolist())


@pytest.mark.parametrize(
    ("source", "words_of_message"),
    [
        (Source(["/none/*.txt"]), "--input: no file matches '/none/*.txt'"),
        (Source(["empty.txt"]), "is empty"),
        (Source(["short.txt"]), "the validation data would have no tokens"),
        (Source(["short.txt"], "no.json"), "no.json"),
        (Source(["short.txt"], None, 1.5), "--validation-fraction must lie in (0, 1), not 1.5"),
    ],
)
def test_mistake_is_named_and_nothing_is_written(
    source: Source, words_of_message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("abc")
    with pytest.raises(UserError) as caught:
        tokenize(source, tmp_path / "out", Alone())
    assert words_of_message in str(caught.value)
    assert not list(tmp_path.glob("out/*"))


# Rank 2 fails on the last file that it reads, with the error %s.
_FAILS = """
import sys
import hvdtrain.data.text as module
from hvdtrain.cli import main
from hvdtrain.errors import UserError
from hvdtrain.runtime.environment import launched_rank

def read(path, real=module.read):
    if launched_rank() == 2:
        raise %s
    return real(path)

module.read = read
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("UserError(f'{path}: Permission denied')", 2, "txt: Permission denied (rank 2 on "),
        ("RuntimeError('a defect')", 1, "RuntimeError: a defect"),
    ],
)
def test_failure_of_one_rank_ends_all_and_keeps_the_old_files(
    error: str, code: int, message: str, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tokenize(Source([str(corpus)], None, 0.3), out, Alone())
    before = _content(out)
    done = _run("-c", _FAILS % error, *TOKENIZE[2:], "--out", out, "--input", corpus, np=3)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(message) == 1
    assert {n: c for n, c in _content(out).items() if not n.startswith(".")} == before
    if code == 2:
        assert _content(out) == before


def test_second_run_into_the_same_directory_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run begins when the first has published one of its two files."""
    out, refused = tmp_path / "out", list[str]()
    rename = Path.rename

    def start_another(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if not refused:
            refused.append("")  # of the first file only
            try:
                tokenize(Source([str(corpus)], None, 0.1), out, Alone())
            except UserError as error:
                refused.append(str(error))
        return moved

    monkeypatch.setattr(Path, "rename", start_another)
    written = tokenize(Source([str(corpus)], None, 0.3), out, Alone())
    monkeypatch.undo()
    alone = tokenize(Source([str(corpus)], None, 0.3), tmp_path / "alone", Alone())
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in alone]
    assert f"(process {os.getpid()} on " in refused[1] and str(out / ".tokenize.lock") in refused[1]
    assert not list(out.glob(".*"))


def test_lock_of_a_killed_run_is_replaced_by_the_next(corpus: Path, tmp_path: Path) -> None:
    out, done = tmp_path / "out", subprocess.Popen(["true"])
    done.wait()
    out.mkdir()
    dead = replace(Writer.here("0badc0de"), pid=done.pid)
    (out / ".tokenize.lock").write_text(json.dumps(asdict(dead)))
    source = Source([str(corpus)], None, 0.3)
    tokenize(source, out, Alone())
    assert not list(out.glob(".*"))
    same_pid = replace(Writer.here("0badc0de"), started=1)  # in another container
    (out / ".tokenize.lock").write_text(json.dumps(asdict(same_pid)))
    tokenize(source, out, Alone())
    assert not list(out.glob(".*"))
    elsewhere = replace(dead, host="another-host")
    (out / ".tokenize.lock").write_text(json.dumps(asdict(elsewhere)))
    with pytest.raises(UserError, match="on another-host"):
        tokenize(source, out, Alone())


def test_gloo_ranks_are_refused(corpus: Path, tmp_path: Path) -> None:
    env = {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "localhost"}
    done = _run(*TOKENIZE, "--out", tmp_path / "out", "--input", corpus, env=env)
    assert done.returncode == 2
    assert "start it with mpirun" in done.stderr


def test_files_are_assigned_evenly_and_in_order() -> None:
    assert assign_files([10] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert assign_files([1, 1, 1, 97], 2) == [0, 0, 0, 1]
    assert assign_files([100], 3) == [1]
    owners = assign_files([7, 1, 30, 2, 2, 9, 40, 1], 5)
    assert owners == sorted(owners) and max(owners) < 5


@pytest.mark.slow
def test_token_files_train_the_same_curve_as_text(corpus: Path, tmp_path: Path) -> None:
    tokenize(Source([str(corpus)]), tmp_path / "tokens", Alone())
    sources = {
        "text": [f"--data.train={corpus}"],
        "tokens": [
            "--data.source=tokens",
            f"--data.train={tmp_path}/tokens/train.u16",
            f"--data.validation={tmp_path}/tokens/validation.u16",
        ],
    }
    small = ["--model.layers=1", "--model.width=16", "--model.context=16", "--batch.global_size=8"]
    curves = []
    for name, flags in sources.items():
        run = [f"--run.root={tmp_path}", f"--run.id={name}", "--train.duration=5"]
        done = _run("-m", "hvdtrain.train", *run, *flags, *small, "--telemetry.port=0")
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        curves.append([(line["loss"], line.get("validation_loss")) for line in lines])
    assert len(curves[0]) == 5
    assert curves[0] == curves[1]
