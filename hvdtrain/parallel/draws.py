"""Random numbers of a pass that several ranks compute one after another."""

from __future__ import annotations

import torch
from torch import Tensor


def generators(device: torch.device) -> Tensor:
    """Return the state of torch's generators, the CPU's and the device's: bytes, on the CPU."""
    state = torch.get_rng_state()
    if device.type != "cuda":
        return state
    return torch.cat((state, torch.cuda.get_rng_state(device)))


def set_generators(state: Tensor, device: torch.device) -> None:
    """Restore the state that `generators` returned: the same numbers are drawn again."""
    state = state.cpu()
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)
