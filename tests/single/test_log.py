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
