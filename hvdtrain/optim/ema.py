"""Exponential moving average of the weights, as a part of the run's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import UserError
from hvdtrain.optim.optimizer import parameter_names
from hvdtrain.runtime.device import widened
from hvdtrain.runtime.state_part import Scope
from hvdtrain.runtime.tensor_shards import local


class Ema:
    """The replicated part "ema": an average of each trained parameter, by its name.

    After the first step the average equals the parameter; each further applied step moves it
    towards the parameter by 1 - decay, as torch.optim.swa_utils.AveragedModel does with
    get_ema_multi_avg_fn. Averages of half-precision parameters are float32, computed from the
    master weights if the optimizer has them. Empty before the first step.

    For a model that spans ranks it averages this rank's shards; parallel/spanned.py
    determines which rank saves them.

    Args:
        decay: in (0, 1).

    Attributes:
        parameters: the averaged parameters, by name.
    """

    name = "ema"
    scope: Scope = "replicated"

    def __init__(self, optimizer: Optimizer, model: nn.Module, decay: float) -> None:
        self._optimizer = optimizer
        self._model = model
        self.parameters = {n: p for p, n in parameter_names(optimizer, model).items()}
        self._decay = decay
        self._averages: dict[str, Tensor] = {}
        # Part of the step: a rank has done both updates, or neither.
        optimizer.register_step_post_hook(lambda *_: self.update())

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step of the optimizer."""
        state = self._optimizer.state
        now = {
            name: widened(local(state.get(p, {}).get("master", p)))
            for name, p in self.parameters.items()
        }
        if not self._averages:
            self._averages = {name: tensor.clone() for name, tensor in now.items()}
            return
        averages = [self._averages[name] for name in now]
        torch._foreach_lerp_(averages, list(now.values()), 1 - self._decay)

    @property
    def started(self) -> bool:
        """Whether a step was done."""
        return bool(self._averages)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the context."""
        kept = {name: local(p).clone() for name, p in self.parameters.items()}
        try:
            self._set(self._averages)
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            local(parameter).copy_(values[name])
        for module in self._model.modules():
            # FSDP: parameters that it has gathered are out of date.
            reshard = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._averages)

    def compared(self) -> dict[str, Tensor]:
        return self.tensors()

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        tensors = dict(saved[0]) if saved else {}
        if tensors and tensors.keys() != self.parameters.keys():
            differing = sorted(tensors.keys() ^ self.parameters.keys())
            raise UserError(
                f"the checkpoint's averages are of other parameters ({differing[0]} and others)"
            )
        self._averages = {n: t.to(self.parameters[n].device) for n, t in tensors.items()}
