"""What a run is made of while it trains, and how it moves: to a checkpoint, to other ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.engine.loop import Progress
from hvdtrain.errors import UserError
from hvdtrain.optim.optimizer import parameter_names, set_state_tensors, state_tensors
from hvdtrain.runtime.collectives import broadcast_json, broadcast_tensors

FORMAT = 1


@dataclass
class RunState:
    """The model, its optimizer, and where the run is.

    Args:
        identity: what the run's curve follows from, by the name that a message gives it: seed,
            data, global batch, ...; a checkpoint of another identity is refused.
    """

    model: nn.Module
    optimizer: Optimizer
    progress: Progress
    identity: dict[str, Any]

    def capture(self) -> Checkpoint:
        """The state now; its tensors are the live ones."""
        return Checkpoint(
            model=model_tensors(self.model),
            optimizer=state_tensors(self.optimizer, self.model),
            state={
                "format": FORMAT,
                **self.progress.state_dict(),
                "identity": self.identity,
            },
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Takes over a checkpoint's content.

        Raises:
            UserError: it belongs to another model, or another identity.
        """
        state = dict(checkpoint.state)
        if state.pop("format", None) != FORMAT:
            raise UserError("the checkpoint was written by another version of hvdtrain")
        theirs = state.pop("identity")
        for name, own in self.identity.items():
            if theirs.get(name) != own:
                raise UserError(
                    f"{name} was {theirs.get(name)} at the checkpoint of step {state['step']} and "
                    f"is {own} now: the curve could not be continued; use another run.id"
                )
        # A model of ours may have had other names once.
        upgrade = getattr(self.model, "upgrade_checkpoint", dict)
        tensors = upgrade(checkpoint.optimizer)
        _copy(upgrade(checkpoint.model), model_tensors(self.model))
        names = set(parameter_names(self.optimizer, self.model).values())
        unknown = {key.rpartition("/")[0] for key in tensors} - names
        if unknown:
            raise UserError(f"the checkpoint's optimizer knows parameters {sorted(unknown)}")
        set_state_tensors(self.optimizer, self.model, tensors)
        self.progress = Progress(**state)

    def start_over(self, model: nn.Module) -> None:
        """Takes over the weights and buffers of a fresh model; nothing else is left.

        Args:
            model: another one of the same shapes.
        """
        with torch.no_grad():
            for own, fresh in zip(_all_tensors(self.model), _all_tensors(model), strict=True):
                own.copy_(fresh)
        self.optimizer.state.clear()
        vars(self.progress).update(vars(Progress()))

    def broadcast(self, root: int = 0) -> None:
        """Gives the state of rank `root` to all ranks, as it is.

        After HorovodInternalError the state is neither this nor that.

        Horovod's own broadcast_optimizer_state fills an empty optimizer by a step with zero
        gradients, whereby weight decay changes the weights; here an empty one stays empty.
        """
        broadcast_tensors(model_tensors(self.model), "model", root)
        tensors = state_tensors(self.optimizer, self.model)
        kept: dict[str, Any] = {
            "progress": asdict(self.progress),
            "optimizer": {k: [list(t.shape), str(t.dtype)[6:]] for k, t in tensors.items()},
        }
        theirs = broadcast_json(kept, "state", root)
        if theirs["optimizer"] != kept["optimizer"]:
            empty = {
                key: torch.empty(shape, dtype=getattr(torch, dtype))
                for key, (shape, dtype) in theirs["optimizer"].items()
            }
            set_state_tensors(self.optimizer, self.model, empty)
        broadcast_tensors(state_tensors(self.optimizer, self.model), "optimizer", root)
        vars(self.progress).update(theirs["progress"])  # the loop holds this object


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name (not copies); a tied parameter has one name."""
    saved = model.state_dict()
    tensors = {name: p.data for name, p in model.named_parameters()}
    tensors.update({name: b for name, b in model.named_buffers() if name in saved})
    return tensors


def _all_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    if source.keys() != target.keys() or any(source[k].shape != t.shape for k, t in target.items()):
        differing = sorted(
            key
            for key in source.keys() | target.keys()
            if key not in source or key not in target or source[key].shape != target[key].shape
        )
        raise UserError(
            f"the checkpoint is of another model: {len(differing)} tensors differ, such as "
            f"{differing[0]}; use the configuration it was made with, or another run.id"
        )
    for key, tensor in target.items():
        tensor.copy_(source[key])
