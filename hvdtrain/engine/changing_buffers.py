"""Buffers that a script's forward passes change, other than BatchNorm's running statistics.

Codebooks, observers of quantizers, the vectors of a spectral norm, running means, counters, and
frozen parameters that follow trained ones, such as MoCo's key encoder: their changes cannot be
averaged in general, so each step keeps those of one micro-batch, the last of the global batch. Each
micro-batch begins with the values before the step, and after the exchange the rank of the last
micro-batch sends its values to the others. The values are therefore the same on all ranks, and for
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py

from hvdtrain.errors import EXIT_USER, UserError
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import AgreedError, broadcast_tensors, gather_json
from hvdtrain.runtime.mesh import Topology

Place = tuple[nn.Module, str]
_ROUNDING = 1e-6  # relative: a constraint that is applied again may round


class ChangingBuffers:
    """Find the buffers that change, and give all ranks the same values after each step.

    In its first step a rank compares the values of all buffers, of tensors that are plain
    attributes of modules, and of frozen parameters (unless these are larger than the trained ones,
    as a frozen base model is: then a change is an error). The ranks agree on those that have
    changed. From then on only these are sent. If another buffer is written later, torch's version
    counters tell, without waiting for the device. A saved buffer is sent from that step on, even if
    it gets the same values: it may change once in a thousand steps. Any other tensor, of which
    there is no copy from before the step, is compared from the next step on.

    Args:
        model: what is trained.
        saved: returns copies of the saved buffers from before the step.
        restore: called with the place, the tensor and a copy of its values before the step, so that
            a failed step restores them.
    """

    def __init__(
        self,
        model: nn.Module,
        saved: Callable[[], Mapping[Place, Tensor]],
        restore: Callable[[Place, Tensor, Tensor], None],
    ) -> None:
        self._model, self._saved, self._restore = model, saved, restore
        self._places: dict[str, Place] | None = None  # by name, from the first step on
        self._frozen: set[str] = set()  # names of parameters among them
        self._large = False  # they are larger than the trained ones
        self._shared: dict[str, list[Any]] = {}  # agreed: shapes and dtypes
        self._found: dict[str, list[Any]] = {}  # by this rank, since the ranks have agreed
        self._suspects: set[str] = set()  # written, perhaps with the same values
        # Tensors, and copies of their values before the step.
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._unwritten: dict[str, tuple[Tensor, Tensor]] = {}  # saved buffers, not yet compared
        self._versions: dict[str, tuple[Tensor, int, int]] = {}
        self._agreed = False
        # In the first step only: norms of the trained parameters before it and after each of its
        # micro-batches, and numbers that are attributes.
        self._norms: dict[str, Tensor] = {}
        self._seen: list[dict[str, Tensor]] = []
        self._numbers: dict[str, float] = {}

    @property
    def news(self) -> bool:
        """Whether this rank wants the ranks to `agree` in this step."""
        return (self._places is not None and not self._agreed) or bool(self._found)

    @torch.no_grad()
    def begin(self) -> None:
        """Note the values before the micro-batches of a step."""
        if self._places is None:
            self._find_places()
            self._norms, self._numbers = _norms_of(self._model), _numbers_of(self._model)
        else:
            self._norms, self._numbers, self._seen = {}, {}, []
        if not self._places:
            return
        now = {name: getattr(*place, None) for name, place in self._places.items()}
        first = now.keys() - (self._frozen if self._large else set())
        compared = {*self._shared, *self._suspects} if self._agreed else first
        saved = self._saved()
        self._before, self._unwritten, self._versions = {}, {}, {}
        for name, tensor in now.items():
            if not isinstance(tensor, Tensor):
                continue
            if name in compared:
                self._before[name] = tensor, tensor.detach().clone()
            else:
                self._versions[name] = tensor, tensor._version, tensor.data_ptr()
                if (place := self._places[name]) in saved:
                    self._unwritten[name] = tensor, saved[place]

    def reset(self) -> None:
        """Return to the values before the step, between two micro-batches."""
        if self._places or self._norms:
            self._reset()

    @torch.no_grad()
    def _reset(self) -> None:
        self.look()
        if self._norms:
            self._seen.append(_norms_of(self._model))
        for name in (*self._shared, *self._found):
            if name in self._before:
                self._set(name, *self._before[name])

    def look(self) -> None:
        """Find what a micro-batch has changed."""
        if self._places:
            self._look(self._places)

    @torch.no_grad()
    def _look(self, places: Mapping[str, Place]) -> None:
        written = {name for name, seen in self._versions.items() if self._is_written(name, *seen)}
        for name in sorted(written & self._frozen):
            raise UserError(
                f"forward passes change the frozen parameter {name} of a model whose frozen "
                "parameters are larger than the trained ones, so they are not copied in each "
                "step: change it after the step's block, or make it a buffer"
            )
        new = written & self._unwritten.keys()
        self._before |= {name: self._unwritten.pop(name) for name in new}
        for name, (tensor, value) in self._before.items():
            if name in self._shared or name in self._found:
                continue
            now = getattr(*places[name], None)
            if not isinstance(now, Tensor) or now.requires_grad or now.shape != value.shape:
                continue  # each forward pass computes it
            if name in new or not _same(now, value):
                self._found[name] = [list(now.shape), str(now.dtype).removeprefix("torch.")]
                self._restore(places[name], tensor, value)
        self._suspects |= written - self._before.keys()

    @torch.no_grad()
    def end(self) -> None:
        """Look after the last micro-batch."""
        self.look()
        if self._norms:
            self._seen.append(_norms_of(self._model))
        numbers, self._numbers = self._numbers, {}
        found = _numbers_of(self._model) if numbers else {}
        changed = [name for name, number in numbers.items() if found.get(name) != number]
        if changed:
            logger.warning(
                "forward passes change %s, numbers or lists of Python. If later passes read them, "
                "the result depends on the number of ranks, and a resumed run begins with the "
                "initial ones: make them buffers, module.register_buffer(name, torch.tensor(0))",
                ", ".join(changed),
            )

    def _is_written(self, name: str, tensor: Tensor, version: int, address: int) -> bool:
        assert self._places is not None
        now = getattr(*self._places[name], None)
        return now is not tensor or tensor._version != version or tensor.data_ptr() != address

    def _find_places(self) -> None:
        model = self._model
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        frozen = _places(model, _frozen_of)
        self._frozen = {*frozen}
        self._large = sum(getattr(*place).numel() for place in frozen.values()) > trained
        self._places = {**_places(model, _tensors_of), **frozen}

    def agree(self, topology: Topology) -> None:
        """Agree with the other ranks on the buffers that change; all ranks call it.

        Raises:
            AgreedError: in the first step, micro-batches have given a trained parameter different
                values.
            RankLostError: another rank is gone.
        """
        if not self._agreed:
            self._check_trained()
        new: dict[str, list[Any]] = {}
        for found in gather_json(self._found, "buffers.changing"):
            new |= {name: found[name] for name in found.keys() - self._shared.keys() - new.keys()}
        if self._places is None:
            self._find_places()
        assert self._places is not None
        # An attribute that a forward pass makes: a rank that has just joined does not have it yet.
        for absent in gather_json([n for n in new if n not in self._places], "buffers.absent"):
            for name in absent:
                new.pop(name, None)
                self._places.pop(name, None)
        self._shared |= new
        for name in new.keys() - self._found.keys():  # only other ranks have changed it so far
            tensor = getattr(*self._places[name])
            self._restore(self._places[name], tensor, tensor.detach().clone())
        self._suspects -= self._shared.keys()
        self._found.clear()
        self._agreed = True
        # A script does the same in each step: the others stay as they are.
        for name in self._frozen - self._shared.keys():
            self._places.pop(name, None)
        if new and topology.rank == 0:
            self._tell(sorted(new))

    def _check_trained(self) -> None:
        """Require the same values of each trained parameter after each micro-batch of all ranks.

        A constraint, such as a largest norm, gives the same ones. An initialization that depends
        on the data does not, nor does a change by some of the ranks only.
        """
        seen = self._seen or [self._norms]  # this rank has no micro-batch
        own = {
            name: [float(norms[name]) for norms in seen if name in norms] for name in self._norms
        }
        self._norms, self._seen = {}, []
        ranks = gather_json(own, "parameters.changing")
        for name in ranks[0]:
            values = [value for theirs in ranks for value in theirs.get(name, ())]
            if max(values) - min(values) > _ROUNDING * max(values):  # False for NaN
                raise AgreedError(
                    f"the micro-batches of a step change the trained parameter {name}, each in "
                    "its own way, as a data-dependent initialization does: ranks would differ. Run "
                    "one forward pass of the same samples on all ranks before hvdtrain.training",
                    EXIT_USER,
                    rank=0,
                )

    def _tell(self, names: list[str]) -> None:
        saved = self._model.state_dict().keys()
        logger.info(
            "forward passes change %s: each step keeps the values after its last micro-batch, on "
            "all ranks (docs/own-loops.md)",
            ", ".join(names),
        )
        if lost := [name for name in names if name not in saved]:
            logger.warning(
                "forward passes change %s, which the model's state_dict() does not have: a resumed "
                "run begins with the initial values. To keep them, make them buffers: "
                "module.register_buffer(name, value)",
                ", ".join(lost),
            )

    @torch.no_grad()
    def share(self, root: int, topology: Topology) -> None:
        """Replace the values of the agreed buffers by those of rank `root`; all ranks call it.

        Raises:
            RankLostError: another rank is gone.
            UserError: a buffer's shape has changed on rank `root`.
        """
        if not self._shared or topology.world_size == 1:
            return
        if self._places is None:
            self._find_places()
        assert self._places is not None
        own = {name: getattr(*self._places[name]).detach() for name in sorted(self._shared)}
        device = next(iter(own.values())).device
        for name, (shape, dtype) in self._shared.items():
            known = own[name]
            if [*known.shape] == shape and known.dtype == getattr(torch, dtype):
                continue
            if topology.rank == root:
                raise UserError(
                    f"{name}: forward passes change its shape from {tuple(shape)} to "
                    f"{tuple(known.shape)}: give the buffer its final shape before the loop"
                )
            own[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=known.device)
        parts = [_bytes(tensor).to(device) for tensor in own.values()]
        values = torch.cat(parts)
        broadcast_tensors({"values": values}, "buffers", root)
        if topology.rank == root:
            return
        received = values.split([len(part) for part in parts])
        for (name, tensor), part in zip(own.items(), received, strict=True):
            current = getattr(*self._places[name])
            target = current if current.shape == tensor.shape else tensor
            self._set(name, target, part.clone().view(tensor.dtype).view(tensor.shape))

    def _set(self, name: str, tensor: Tensor, value: Tensor) -> None:
        assert self._places is not None
        tensor.copy_(value)
        setattr(*self._places[name], tensor)


def _places(
    model: nn.Module, find: Callable[[nn.Module], Iterator[tuple[str, Tensor]]]
) -> dict[str, Place]:
    """Places of the tensors of modules other than BatchNorm, see BatchStatistics."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        if not isinstance(module, _NormBase)
        for name, tensor in find(module)
        if not tensor.requires_grad and not tensor.is_inference()
    }


def _frozen_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_parameters(recurse=False)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers and plain attributes."""
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
    yield from ((name, value) for name, value in vars(module).items() if isinstance(value, Tensor))


def _norms_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    trained = {n: p for n, p in named if p.requires_grad and p.is_floating_point() and p.numel()}
    # Private, see step.py.
    norms = torch._foreach_norm([*trained.values()], 2, dtype=torch.float64) if trained else ()
    return dict(zip(trained, norms, strict=True))


def _numbers_of(model: nn.Module) -> dict[str, float]:
    """Numbers, and lengths of lists, that are attributes of modules."""
    found: dict[str, float] = {}
    for prefix, module in model.named_modules():
        for name, value in {**vars(type(module)), **vars(module)}.items():
            if name.startswith("_") or name == "training":
                continue
            if isinstance(value, int | float):
                found[f"{prefix}.{name}" if prefix else name] = value
            elif isinstance(value, list):
                found[f"{prefix}.{name}" if prefix else name] = len(value)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    # A copy: a tensor of one element may have any stride, which `view` refuses.
    return tensor.detach().reshape(-1).clone().view(torch.uint8)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether the bits are the same: equal NaNs are equal."""
    return a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b).to(a.device))
