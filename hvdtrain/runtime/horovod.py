"""`hvd`: Horovod, or, if it is not installed, its equivalent for a process that trains alone.

Modules import Horovod from here, so that one process needs no Horovod.

Raises:
    ModuleNotFoundError: Horovod is not installed, and a launcher has started several processes.
"""

from __future__ import annotations

from hvdtrain.runtime.environment import elastic, launched_size

__all__ = ["HorovodInternalError", "ProcessSet", "hvd"]

try:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.common.process_sets import ProcessSet
except ModuleNotFoundError as error:
    if error.name != "horovod" or elastic() or (launched_size() or 1) > 1:
        raise
    from hvdtrain.runtime import alone as hvd
    from hvdtrain.runtime.alone import (
        HorovodInternalError,
        ProcessSet,
    )
