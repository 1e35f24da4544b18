"""The log of a run whose script configures logging, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import environment

# Existing loggers are disabled by default, as in the templates of Hydra, Django and uvicorn.
CONFIGURED = """
import logging, logging.config, sys
from pathlib import Path
{before}
from hvdtrain import log
own = {{"version": 1, "handlers": {{"h": {{"class": "logging.NullHandler"}}}}}}
log.to_screen(None)
log.to_file(Path(sys.argv[1]), 0, "host")
logging.config.dictConfig(own)
log.logger.error("checkpoint of step 4 could not be written")
log.close()
log.logger.disabled = True
log.logger.error("after the run")
"""


@pytest.mark.parametrize("before", ["", "logging.getLogger('hvdtrain').disabled = True"])
def test_script_that_configures_logging_disables_no_line_of_a_run(
    tmp_path: Path, before: str
) -> None:
    argv = [sys.executable, "-c", CONFIGURED.format(before=before), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), check=True)
    line = "checkpoint of step 4 could not be written"
    assert done.stderr == f"hvdtrain: error: {line}\n"
    written = (tmp_path / "rank_00000.jsonl").read_text().splitlines()
    assert [json.loads(text)["message"] for text in written] == [line]


# Opening a named pipe blocks until it is read.
BLOCKED = """
import os, sys
from pathlib import Path
from hvdtrain import file_thread, log
path = Path(sys.argv[1]) / "rank_00000.jsonl"
log.to_file(path.parent, 0, "host")
path.unlink()
os.mkfifo(path)
for number in range(3):
    log.logger.error("%d", number)
forked = os.fork()
if not forked:
    log.logger.error("forked")
    file_thread.wait_for_writes(50)
    os._exit(0)
with path.open() as file:
    lines = [next(file) for _ in range(4)]
    os.waitpid(forked, 0)
    log.close()
    print(*lines, *file, sep="", end="")
"""


def test_log_file_without_response_blocks_no_rank_and_has_each_line_once(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", BLOCKED, str(tmp_path)]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=environment(), check=True, timeout=60
    )
    messages = [json.loads(line)["message"] for line in done.stdout.splitlines()]
    assert sorted(messages) == ["0", "1", "2", "forked"]
