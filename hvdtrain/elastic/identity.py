"""Properties that all processes of a run must share, so that replicas stay bitwise identical."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """Configuration, data and device of a process.

    Args:
        device: device type, such as "cuda".
        configuration: digest of the configuration.
        samples, fingerprint: of the training data.
        precision: in which the model is computed.
        rounding: how this processor rounds an optimizer step, see `runtime.device.rounding`.
    """

    device: str
    configuration: str
    samples: int
    fingerprint: str | None
    precision: str = "float32"
    rounding: str = ""

    def differs_from(self, other: Identity, host: str) -> str:
        """Why this process cannot join the run of `other`, a rank on `host`; "": it can."""
        if self.device != other.device:
            return (
                f"the device here is {self.device}, and that of the ranks on {host} {other.device}"
            )
        if self.configuration != other.configuration:
            return other_configuration(host)
        if (self.samples, self.fingerprint) != (other.samples, other.fingerprint):
            return (
                f"the training data here ({self.samples} samples, fingerprint "
                f"{self.fingerprint}) is not the data of {host} ({other.samples} samples, "
                f"fingerprint {other.fingerprint})"
            )
        if self.precision != other.precision:
            return (
                f"precision.name auto is {self.precision} on the device here and {other.precision} "
                f"on that of {host}: name one that both have"
            )
        if self.rounding != other.rounding:
            return (
                f"the processor here is not like that of {host}: an optimizer's step is rounded "
                "otherwise, so that the ranks' parameters would drift apart. Use hosts with one "
                "kind of processor, or try MKL_CBWR=COMPATIBLE and ATEN_CPU_CAPABILITY=default in "
                "the environment of all ranks"
            )
        return ""


def other_configuration(host: str) -> str:
    return (
        f"the configuration here is not that of rank 0 on {host}: compare the "
        "files that --config names, and hvdtrain's version, on the two hosts"
    )
