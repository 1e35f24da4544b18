"""Patterns in a run's logs and their meaning, causes before consequences."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.doctor.finding import ERROR


@dataclass(frozen=True)
class Cause:
    """Meaning of a log line.

    Args:
        pattern: regular expression for the line, case-insensitive.
        mend: the key to change, or the command to run.
    """

    check: str
    pattern: str
    what: str
    why: str
    mend: str
    severity: str = ERROR


CAUSES = (
    Cause(
        "shared memory",
        r"bus error|insufficient shared memory|shm_open.*No space",
        "/dev/shm is full",
        "data workers and ranks of one host pass tensors through it",
        "mount -o remount,size=2g /dev/shm   # containers: --shm-size=2g; or fewer loader.workers",
    ),
    Cause(
        "gpu memory",
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "the memory of a GPU is not enough",
        "no step of this size fits",
        "--memory.checkpoint_activations blocks, or --memory.offload_activations true, or a "
        "smaller --batch.micro_size (the curve stays), or --memory.fit true",
    ),
    Cause(
        "memory",
        r"DefaultCPUAllocator|MemoryError|Cannot allocate memory|worker .*killed by signal: Killed",
        "the memory of a host is not enough",
        "the kernel or the allocator ends a rank",
        "--memory.checkpoint_activations blocks, or a smaller --batch.micro_size (the curve "
        "stays), or fewer loader.workers, or fewer slots on that host",
    ),
    Cause(
        "gpu",
        r"uncorrectable ECC|device-side assert|illegal memory access|CUDA error|has fallen off",
        "a GPU failed",
        "a fault of the board or of a kernel; the others lose this rank",
        "hvdtrain doctor --hosts HOST:1   # ECC, clocks, PCIe; leave the host out of the list",
    ),
    Cause(
        "nccl",
        r"ncclUnhandled|NCCL error|nccl\w+ failed|unhandled (?:system|cuda) error|NCCL WARN",
        "NCCL could not communicate",
        "an interface, /dev/shm or a port between the ranks is not what it expects",
        "hvdtrain doctor --hosts LIST; then NCCL_DEBUG=INFO, and NCCL_SOCKET_IFNAME names the "
        "interface",
    ),
    Cause(
        "disk",
        r"No space left on device|Disk quota exceeded|Read-only file system|Errno (?:28|30|122)\b",
        "the disk of the run could not be written",
        "checkpoints, metrics and logs were lost or late",
        "make room, or --run.root on another disk, or a smaller --checkpoint.keep",
    ),
    Cause(
        "not finite",
        r"gradient (?:is|was) not finite",
        "the gradient was not finite",
        "training diverged, or 16 bits overflowed: trying again ends in the same way",
        "a lower --optim.lr, a longer --schedule.warmup_steps, --optim.clip_norm 1, or "
        "--precision.name bf16 in place of fp16; then look at the data",
    ),
    Cause(
        "replicas",
        r"parameters or optimizer state .*differ",
        "ranks no longer had the same parameters",
        "memory or a processor of that host flips bits, or the task is not deterministic",
        "leave the named host out; hvdtrain audit RUN",
    ),
    Cause(
        "network",
        r"rendezvous failed|cannot be reached|no route to host|connection (?:refused|timed out)"
        r"|launcher does not answer",
        "ranks could not reach each other, or their launcher",
        "a port, a name or a link between the hosts",
        "hvdtrain doctor --hosts LIST   # ports, names, MTU",
    ),
    Cause(
        "owner",
        r"was taken over by process",
        "another process was started on this run",
        "one process at a time writes a run",
        "end one of the two; another --run.id for the other",
    ),
    Cause(
        "rank lost",
        r"lost the other ranks|HorovodInternalError|step \d+ failed",
        "a rank was gone",
        "the others cannot go on without it; it wrote no reason itself: it was killed, or its host "
        "or link died",
        "dmesg -T | grep -i -E 'killed process|xid|link'   # on the host whose log ends first",
    ),
)
