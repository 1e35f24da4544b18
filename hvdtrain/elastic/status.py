"""Status that a process reports when it requests ranks, and counts of failed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.data.sample_facts import SampleFacts

# Properties that all processes of a run must share, so that replicas stay bitwise identical.


@dataclass(frozen=True)
class Identity:
    """Configuration, data and device of a process.

    Args:
        device: device type, such as "cuda".
        configuration: digest of the configuration.
        samples, fingerprint: of the training data.
        precision: in which the model is computed.
        rounding: how this device rounds an optimizer step, see `runtime.device.rounding`.
        read: facts of training samples, as JSON, see data/samples.py; "": none.
    """

    device: str
    configuration: str
    samples: int
    fingerprint: str | None
    precision: str = "float32"
    rounding: str = ""
    read: str = ""

    def differs_from(self, other: Identity, host: str) -> str:
        """Why this process cannot join the run of `other`, a rank on `host`; "": it can."""
        if self.device != other.device:
            return f"the device here is {self.device}, but the ranks on {host} use {other.device}"
        if self.configuration != other.configuration:
            return other_configuration(host)
        if (self.samples, self.fingerprint) != (other.samples, other.fingerprint):
            return (
                f"the training data here ({self.samples} samples, fingerprint "
                f"{self.fingerprint}) is not the data of {host} ({other.samples} samples, "
                f"fingerprint {other.fingerprint})"
            )
        if self.read != other.read and (place := _differing(self.read, other.read)):
            return (
                f"the training data here is not the data of {host}: {place} differs. Every rank "
                "must build the same dataset: sort what comes from a set, give random_split a "
                "generator with a seed, and let no sampler divide the samples among ranks. If the "
                "difference is intended, give the dataset an attribute fingerprint, which is "
                "compared instead"
            )
        if self.precision != other.precision:
            return (
                f"precision.name auto is {self.precision} on the device here and {other.precision} "
                f"on {host}: name one that both devices support"
            )
        if self.rounding != other.rounding and self.device == "cuda":
            return (
                f"the GPU here is {self.rounding}, but the GPU of {host} is {other.rounding}: with "
                "this optim.name they round a step differently, so the ranks' parameters would "
                "drift apart. Use one model of GPU, or optim.name adamw"
            )
        if self.rounding != other.rounding:
            return (
                f"the processor here differs from the processor of {host}: it rounds a step "
                "differently, so the ranks' parameters would drift apart. Use hosts with one "
                "kind of processor, or try MKL_CBWR=COMPATIBLE and ATEN_CPU_CAPABILITY=default in "
                "the environment of all ranks"
            )
        return ""


def without_unseeded(identities: Sequence[Identity]) -> list[Identity]:
    """The same identities, in which what differs each time that one of them reads it is ignored.

    A process may have drawn the same random number each time.
    """
    facts = {text: SampleFacts.from_json(text) for text in {one.read for one in identities} if text}
    unseeded = sorted({place for one in facts.values() for place in one.unseeded})
    read = {text: replace(one, unseeded=unseeded).to_json() for text, one in facts.items()}
    return [replace(one, read=read.get(one.read, "")) for one in identities]


def _differing(own: str, other: str) -> str:
    if not own or not other:
        return ""
    return SampleFacts.from_json(own).differs_from(SampleFacts.from_json(other))


def other_configuration(host: str) -> str:
    return (
        f"the configuration here differs from the configuration of rank 0 on {host}: compare the "
        "files that --config names, and hvdtrain's version, on the two hosts"
    )


def same_gpu(other: str, gpu: str) -> str:
    """Return the problem of a process that uses the GPU of another one."""
    return (
        f"the GPU here ({gpu}) is the GPU of {other}: start one rank for each GPU, and show each "
        "process all GPUs of its host, or only its own"
    )


# Limits of StepFailures.
_ERRORS_OF_A_STEP = 3
_FAILURES_OF_A_STEP = 5
# Phases of a generation, as reported in `failed`.
RENDEZVOUS, STATE_TRANSFER, TRAINING = "rendezvous", "state transfer", "training"


@dataclass(frozen=True)
class ProcessStatus:
    """Status of a process when it requests its next ranks.

    Args:
        identity: what it would train.
        trained: it holds the state of the run; a new process does not.
        step: optimizer steps done.
        verdict_seconds: the longest that a watchdog needs to classify a process as hung.
        failed: the phase in which its last generation failed, or None.
        message: the reason of that failure.
        replica_size: ranks that hold one model together.
        shard: index of the model's shard that it holds, 0 to replica_size - 1; None: no shard.
        reachable_step: the latest step as of which it can provide that shard: `step`, or one more
            if a pending step can still be applied because another process has done it.
        gpu: see `runtime.device.gpu_of`.
        works_on: after the run, it may work on for any time: a script with its own loop.
        place: address and port at which it listens during the rendezvous, see reach.py.
        unreachable: hosts to which its host cannot connect, if the rendezvous has failed twice.
    """

    identity: Identity
    trained: bool = False
    step: int = 0
    verdict_seconds: float = 0.0
    failed: str | None = None
    message: str = ""
    replica_size: int = 1
    shard: int | None = None
    reachable_step: int = 0
    gpu: str = ""
    works_on: bool = False
    place: tuple[str, int] | None = None
    unreachable: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> ProcessStatus:
        """Build a status from the output of dataclasses.asdict."""
        return cls(**fields | {"identity": Identity(**fields["identity"])})


@dataclass
class StepFailures:
    """Counts failures of each step, over all processes of a job, to end a job that cannot succeed.

    A process that dies reports the reason if it can. The surviving processes report the phase in
    which their generation failed when they request their next ranks. There are three causes:

        observation                                     cause
        an error that a process raises itself           the step's data or code: other processes
                                                        will raise it, too
        a generation with newcomers that fails before   the newcomers, or the connection to them
        its first step, although no process died
        any other repeated failure of a step            the network, or the machines

    Args:
        errors: step -> errors that processes raised in it.
        step, times: number of generations in a row that failed after this step.
        reason: why the job has to end; "": it does not.
    """

    errors: dict[int, int] = field(default_factory=dict)
    step: int = -1
    times: int = 0
    reason: str = ""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> StepFailures:
        """Build the counts from the output of dataclasses.asdict, also after JSON."""
        errors = {int(step): times for step, times in fields["errors"].items()}
        return cls(**fields | {"errors": errors})

    def count_error(self, step: int, message: str) -> None:
        """Count an error that a process raised in this step."""
        times = self.errors[step] = self.errors.get(step, 0) + 1
        if times >= _ERRORS_OF_A_STEP:
            self.reason = (
                f"step {step} failed in {times} processes with an error of their own: {message}"
            )

    def count_generation(self, step: int, message: str, what: str = "") -> None:
        """Count a failed generation whose most advanced rank had done `step` steps.

        Args:
            what: name of the step that failed; default: its number.
        """
        self.times = self.times + 1 if step == self.step else 1
        self.step = step
        if self.times >= _FAILURES_OF_A_STEP:
            self.reason = f"{what or f'step {step + 1}'} failed {self.times} times: {message}"
