"""Wording of prose in code, tests and documentation, and uniqueness of names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Phrase (a regular expression) and what to write instead.
BANNED = {
    # Literal translations
    "anew": "again, from the start",
    "in vain": "without success",
    "so many": "N, that many",
    "of now": "current",
    "go(es)? on": "continue",
    "leave away|left away": "omit",
    "will play": "accepts",
    "learnt": "learned",
    "likeliest": "most likely",
    "alike": "identical, the same, both",
    "mend(?:s|ed)?": "fix, repair",
    "the like": "similar, and so on",
    "everybody": "all ranks",
    "nobody": "no rank",
    "somebody|anybody": "a rank, a process",
    "beside": "in addition to, next to",
    "of one's own": "of your own",
    "stays? (?:non-finite|not finite)": "remains non-finite",
    "to the bit": "bitwise",
    "takes (?:mpi|gloo|horovodrun|a gpu)": "requires",
    "(ms|seconds|bytes|gib|gb) a (step|rank|device|second|token)": "ms/step, per step",
    "times? of a step": "step time",
    # Headless and inverted sentences
    "not measured was": "was not measured",
    "what was (seen|tried)": "results",
    "as what": "name the noun",
    "(?<!there )(?:are|is) no (?!longer|more)[a-z]+": "is not a",
    "where there (is|are)": "if, when",
    # Pronouns without a noun
    "(that|those) of the (other|others)": "repeat the noun",
    # Ranks and programs as people
    "(a|the|each|every|any|no|other) (rank|host|worker|driver)s? (hears?|owes?|speaks?|judges?)": (
        "receives, is notified, classifies"
    ),
    "(?:is|are|was|were|be|been|not|as) told": "is notified, receives, distinguished",
    "hears?|heard": "receives, is notified",
    # Private words for standard terms
    "signs? of life": "heartbeat",
    "data sets?": "dataset",
    "same bits": "bitwise identical",
    "folders?": "directory",
    "figures (?:of|in|for)": "metrics",
    "owe[ds]": "residual",
    "hand[- ]over": "state transfer",
    "travels?|travelled": "is sent",
    # British spelling
    "(?:initialis|normalis|synchronis|utilis)[a-z]+": "-ize",
    "(?:behaviour|colour|neighbour)[a-z]*": "-or",
    "labelled|travelling": "a single l",
}
PHRASES = re.compile(rf"\b(?:{'|'.join(BANNED)})\b")
# File and matched text that stay, with the reason.
EXCEPTIONS = {
    ("docs/doctor.md", "folder"): "the name of a check",
    ("hvdtrain/doctor/findings.py", "mend"): "a key of the JSON output",
    ("hvdtrain/doctor/hosts.py", "folder"): "the name of a check",
    ("tests/support/doctored.py", "folder"): "the name of a check",
}
MOST_CHARACTERS_OF_A_TEST_NAME = 70


def _may_have_a_phrase(source: str) -> bool:
    """Whether the text of a file, with its line breaks in strings and comments, has a phrase."""
    return bool(PHRASES.search(re.sub(r"""['"]\s*f?['"]|[\s#]+""", " ", source).lower()))


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings and other string literals of several words, f-strings as one text."""
    inside_f_string = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside_f_string |= {id(part) for part in node.values}
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in inside_f_string
        ):
            yield node.lineno, node.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments; adjacent lines are joined, so that a phrase may cross a line break."""
    lines: list[str] = []
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != previous + 1 and lines:
            yield previous - len(lines) + 1, " ".join(lines)
            lines = []
        lines.append(token.string.lstrip("# "))
        previous = token.start[0]
    if lines:
        yield previous - len(lines) + 1, " ".join(lines)


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string and comment of a Python file, or of each paragraph of a page."""
    source = path.read_text()
    if not _may_have_a_phrase(source):
        return
    if path.suffix == ".py":
        yield from _strings(ast.parse(source))
        yield from _comments(source)
        return
    line = 1
    for paragraph in source.split("\n\n"):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def _definitions(directory: str, pattern: str) -> Iterator[tuple[str, str]]:
    """Name that `pattern` captures, and its file, for each match in a directory's modules."""
    for path in sorted((ROOT / directory).rglob("*.py")):
        for name in re.findall(pattern, path.read_text(), re.MULTILINE):
            yield name, path.relative_to(ROOT).as_posix()


def test_prose_has_no_banned_phrase() -> None:
    found = []
    used = set()
    modules = {*(ROOT / "hvdtrain").rglob("*.py"), *(ROOT / "tests").rglob("*.py")}
    places = (".", "docs", "docker", "packaging", "slurm")
    pages = [page for place in places for page in (ROOT / place).glob("*.md")]
    for path in sorted([*modules - {Path(__file__)}, *pages]):
        file = path.relative_to(ROOT).as_posix()
        for line, text in _prose(path):
            for match in PHRASES.finditer(" ".join(text.lower().split())):
                if (file, match[0]) in EXCEPTIONS:
                    used.add((file, match[0]))
                    continue
                advice = next(BANNED[banned] for banned in BANNED if re.search(banned, match[0]))
                found.append(f"{file}:{line}: {match[0]!r}: write {advice}")
    assert not found, "\n".join(found)
    assert not EXCEPTIONS.keys() - used, "these exceptions are no longer needed"


def test_class_names_are_unique_in_the_package() -> None:
    files = defaultdict(list)
    for name, file in _definitions("hvdtrain", r"^\s*class (\w+)[(:]"):
        files[name].append(file)
    assert not {name: where for name, where in files.items() if len(where) > 1}


def test_names_of_tests_are_short() -> None:
    tests = _definitions("tests", r"^\s*def (test_\w+)")
    assert not [test for test in tests if len(test[0]) > MOST_CHARACTERS_OF_A_TEST_NAME]
