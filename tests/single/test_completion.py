"""Words offered by the bash and zsh completions, tested in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Each calls the completion like its shell, with the cursor at the end of the last word.
BASH = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_hvdtrain
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """\
compdef() { :; }
_files() { print FILES; }
compadd() {
    local -a fitting
    fitting=(${(M)${(P)2}:#${words[CURRENT]}*})
    print -l -- $fitting
    (( $#fitting ))
}
source "$1"; shift
words=("$@"); CURRENT=$#
_hvdtrain
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        argv = [sys.executable, "-m", "hvdtrain.cli", "completion", shell]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        (directory / shell).write_text(done.stdout)
    return {shell: directory / shell for shell in ("bash", "zsh")}


def _offered(shell: str, script: Path, words: list[str]) -> list[str]:
    if shell == "zsh" and shutil.which("zsh") is None:
        assert "CI" not in os.environ, "there is no zsh"
        pytest.skip("there is no zsh")
    flags, program = ("--norc", BASH) if shell == "bash" else ("-f", ZSH)
    argv = [shell, flags, "-c", program, shell, str(script), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return done.stdout.split()


CASES = [
    ("la", ["launch"]),
    ("ch", ["check"]),
    ("c", ["check", "ckpt", "completion"]),
    ("ckpt ", ["list", "verify", "export"]),
    ("ckpt export --fo", ["--format"]),
    ("ckpt export --format hu", ["huggingface"]),
    ("launch --hosts a:1 --controller ", ["mpi", "gloo"]),
    ("launch --hosts ckpt --max-r", ["--max-restarts"]),
    ("train --exchange.compression po", ["powersgd"]),
    ("train --optim.momen", ["--optim.momentum"]),
    ("train --config gpt-n", ["gpt-nano"]),
    ("train --tabular.objec", ["--tabular.objective"]),
    ("launch --hosts a:1 -- --run.id mine --image.fl", ["--image.flip"]),
    ("launch --hosts a:1 -- --image.flip t", ["true"]),
    ("ls --sort st", ["state", "step"]),
]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(("line", "wanted"), CASES)
def test_completion_offers_exactly_the_matching_words(
    scripts: dict[str, Path], shell: str, line: str, wanted: list[str]
) -> None:
    words = f"hvdtrain {line}".split(" ")  # if the line ends with a space, a new word begins
    assert _offered(shell, scripts[shell], words) == wanted


def test_value_after_an_equals_sign_is_completed(scripts: dict[str, Path]) -> None:
    # bash splits it into three words, zsh does not
    bash = ["hvdtrain", "train", "--optim.name", "=", "adamw8"]
    assert _offered("bash", scripts["bash"], bash) == ["adamw8bit"]
    assert "adamw" in _offered("bash", scripts["bash"], bash[:-1])
    zsh = ["hvdtrain", "train", "--optim.name=adamw8"]
    assert _offered("zsh", scripts["zsh"], zsh) == ["--optim.name=adamw8bit"]


def test_files_are_offered_when_nothing_else_matches(scripts: dict[str, Path]) -> None:
    assert _offered("bash", scripts["bash"], ["hvdtrain", "report", "runs/"]) == []
    assert "complete -o default" in scripts["bash"].read_text()
    assert _offered("zsh", scripts["zsh"], ["hvdtrain", "report", "runs/"]) == ["FILES"]


def test_zsh_script_has_no_comments_after_its_first_line(
    scripts: dict[str, Path],
) -> None:
    first, *others = scripts["zsh"].read_text().splitlines()
    assert first == "#compdef hvdtrain" and not any(line.strip()[:1] == "#" for line in others)
