"""Worker processes of a rank, which load its micro-batches: their start, signals, errors and end.

They are forked, whatever start method the script has chosen: a spawned process would run a script
without `if __name__ == "__main__"` again, as a run of its own. They survive the signals by which a
process group or a cgroup is asked to end, because the rank then needs them for its last step; the
rank ends them by SIGKILL, and so does the kernel when the rank has ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from multiprocessing import context, popen_fork, process, queues, reduction, util
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.runtime.signals import blocked, survive

# Sending a tensor takes less time than sharing its memory up to about 400 KiB.
_SENT_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
# Tensors are passed through sockets in the directory of temporary files. Longest path of a socket,
# in bytes (unix(7)), and what multiprocessing appends to the directory's path.
_SOCKET_PATH = 107
_SOCKET_NAME = len("/pymp-12345678/listener-12345678")


class _ForkedWorker(popen_fork.Popen):
    def _launch(self, process_obj: process.BaseProcess) -> None:
        with blocked():  # in the worker until `begin`
            super()._launch(process_obj)  # type: ignore[misc]

    def terminate(self) -> None:
        self.kill()


class _WorkerProcess(context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> _ForkedWorker:
        return _ForkedWorker(process_obj)


class _WorkerQueue(queues.Queue):
    """Queue of (number, what a worker has loaded); what cannot be sent becomes a UserError.

    Python prints the error and sends nothing, and the rank would wait for it.
    """

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        if not isinstance(item, tuple):  # already encoded: the rank has gone
            os._exit(EXIT_CRASH)
        what = "".join(traceback.format_exception_only(error)).strip()
        self.put(
            (
                item[0],
                UserError(
                    f"a process of loader.workers cannot send a micro-batch to its rank ({what}): "
                    "let the dataset return what pickle can send, allow more open files "
                    "(ulimit -n) if they are the reason, or set loader.workers to 0"
                ),
            )
        )


class WorkerContext(context.ForkContext):
    """Start method of worker processes, for a DataLoader."""

    Process = _WorkerProcess

    def Queue(self, maxsize: int = 0) -> _WorkerQueue:
        return _WorkerQueue(maxsize, ctx=self)


def check_socket_paths() -> None:
    """Check that workers can send tensors.

    Raises:
        UserError: the path of the directory of temporary files is too long.
    """
    if hasattr(util, "_get_base_temp_dir"):  # of newer Pythons, which choose another directory
        return
    directory = tempfile.gettempdir()
    length, longest = len(os.fsencode(directory)), _SOCKET_PATH - _SOCKET_NAME
    if length > longest:
        raise UserError(
            f"loader.workers: the path of the directory of temporary files has {length} bytes, and "
            f"sockets in it allow {longest}: set TMPDIR to a shorter path, or loader.workers to 0 "
            f"({directory})"
        )


def begin(number: int) -> None:
    """Make this worker end with its rank, however the rank ends, and survive the rank's signals.

    Otherwise it would hold the lock on the run directory and the exporter's port for seconds.
    """
    rank = multiprocessing.parent_process()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if rank is None or os.getppid() != rank.pid:
        os._exit(EXIT_CRASH)
    survive()
    reduction.ForkingPickler.register(torch.Tensor, _reduce)
    sys.excepthook = _end  # the thread that passes tensors reports its errors to it


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor is sent: a small one in the message with its micro-batch.

    torch shares memory instead, for which the rank opens a connection to the worker per tensor.
    """
    dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not dense or tensor.device.type != "cpu":
        return reduce_tensor(tensor)
    if tensor.is_leaf and (tensor.is_conj() or tensor.is_neg()):  # torch loses the sign
        resolved = tensor.detach().resolve_conj().resolve_neg()
        tensor = resolved.requires_grad_(tensor.requires_grad)
    small = tensor.is_contiguous() and 0 < tensor.nbytes <= _SENT_BYTES
    if not small or tensor.requires_grad:
        return reduce_tensor(tensor)
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _tensor_of, (content, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _tensor_of(
    content: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    memory = torch.empty(len(content), dtype=torch.uint8)  # aligned as all of torch's
    memory.numpy()[:] = np.frombuffer(content, np.uint8)
    return memory.view(dtype).as_strided(shape, stride)


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End this worker by an error that leaves the rank without an answer."""
    sys.__excepthook__(kind, error, trace)
    os._exit(EXIT_CRASH)
