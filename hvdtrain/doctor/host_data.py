"""On a host: the training data that a configuration finds there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_MARK = "fingerprint: "
_SECONDS = 60


def fingerprint(flags: list[str]) -> dict[str, Any]:
    """Samples and fingerprint of the training data, or {"failed": why}."""
    command = [sys.executable, "-m", "hvdtrain.doctor.host_data", *flags]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"reading the data took more than {_SECONDS} s"}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return dict(json.loads(line.removeprefix(_MARK)))
    output = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {"failed": output[-1] if output else f"the process ended with {done.returncode}"}


def main(argv: list[str]) -> int:
    """Print the result of `fingerprint`."""
    from hvdtrain.config import parse
    from hvdtrain.errors import UserError
    from hvdtrain.process.data import build_data
    from hvdtrain.process.resolve import dataset_size

    try:
        datasets = build_data(parse(argv))[1]
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    found = {"samples": dataset_size(datasets), "fingerprint": datasets.fingerprint}
    print(_MARK + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
