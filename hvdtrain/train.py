"""`python -m hvdtrain.train`: reads the configuration, trains, ends with the right exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.runtime.environment import launched_rank

# Every rank finds the same mistake; rank 0 says so. The others give it time to: a launcher
# takes the first rank that ends for a reason to end all.
_LET_RANK_0_SPEAK = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs with the given flags (default: those of the process); returns the exit code."""
    try:
        # --help and --print_config print: once.
        with nullcontext() if launched_rank() == 0 else redirect_stdout(StringIO()):
            settings = parse(sys.argv[1:] if argv is None else argv)
        from hvdtrain.session import run  # imports torch and Horovod: only when all is well

        return run(settings)
    except UserError as error:
        if launched_rank() == 0:
            print(f"hvdtrain: error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_LET_RANK_0_SPEAK)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
