"""Agent on each host: `python -m hvdtrain.doctor.agent`, started once over ssh.

It reads requests from stdin, one JSON line each, `{"do": NAME, ...arguments}`. It answers each with
one line: `MARK` and JSON, `{"answer": ...}` or `{"error": ...}`. It ends when stdin closes, and
after LIFE_SECONDS at the latest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.doctor import host_data, host_facts, host_links

MARK = "hvdtrain-doctor: "
LIFE_SECONDS = 600

DO: dict[str, Callable[..., Any]] = {
    "clock": time.time,
    "facts": host_facts.gather,
    "folder": host_facts.directory,
    "hold": host_facts.hold_lock,
    "attempt": host_facts.attempt_lock,
    "libraries": host_facts.libraries,
    "data": host_data.fingerprint,
    "listen": host_links.listen,
    "reach": host_links.reach,
    "packet": host_links.packet,
    "stream": host_links.stream,
    "load": host_facts.import_torch,
    "speed": host_facts.measure_speed,
}


def main() -> None:
    """Answer requests until stdin closes."""
    signal.alarm(LIFE_SECONDS)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    _send(answers, "here")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = DO[request.pop("do")](**request)
        except Exception as error:  # report it; the next request may succeed
            _send(answers, f"{type(error).__name__}: {error}", "error")
        else:
            _send(answers, answer)


def _send(answers: Any, content: Any, kind: str = "answer") -> None:
    answers.write(MARK + json.dumps({kind: content}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
