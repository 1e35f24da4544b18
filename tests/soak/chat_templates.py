"""Labels of chats in all chat templates of directories: python -m tests.soak.chat_templates DIR

Official templates are files *.jinja of TRL's wheel (trl/chat_templates) and of the sdist of
llama-cpp-python (vendor/llama.cpp/models/templates). Each template renders each of CHATS. Either
the labels hold the assistant's words, nothing of the other messages, and end with a special token,
or the chat is refused with a reason. Everything else is a fault, and the exit code is 1.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from tests.support.chat_templates import CHATS, faults, tokenizer_of


def main(directories: list[str], show: bool) -> int:
    files = sorted(file for each in directories for file in Path(each).rglob("*.jinja"))
    counts: Counter[str] = Counter()
    wrong = 0
    for file in files:
        row: list[str] = []
        with tempfile.TemporaryDirectory() as root:
            template = tokenizer_of(file, Path(root))
            for name, chat in CHATS.items():
                try:
                    found = faults(template, chat)
                except UserError as error:
                    reason = re.sub(r"'[^']*'|\d+", "*", str(error).replace(str(file), "T"))
                    counts[reason[:90]] += 1
                    row.append(f"{name}: {str(error).replace(str(file), 'T')[:200]}")
                    continue
                counts["wrong" if found else "right"] += 1
                wrong += bool(found)
                row.append(f"{name}: {'WRONG ' + found if found else 'right'}")
        print(file.name, *(row if show else [r for r in row if "WRONG" in r]), sep="\n    ")
    print(f"{len(files)} templates, {len(CHATS)} chats each:")
    for reason, number in counts.most_common():
        print(f"{number:6} {reason}")
    return int(wrong > 0)


def _arguments() -> tuple[list[str], bool]:
    given: list[Any] = sys.argv[1:]
    return [one for one in given if one != "-v"], "-v" in given


if __name__ == "__main__":
    sys.exit(main(*_arguments()))
