"""Pinned memory: its size, its lifetime, and the tensors of a checkpoint within it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hvdtrain.checkpoint import writer
from hvdtrain.runtime.pinned import pinned

GPU = torch.device("cuda", 1)
Ranges = dict[int, int]  # address -> bytes


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """What CUDA has pinned. Without a GPU nothing can be pinned, so CUDA is replaced."""
    ranges: Ranges = {}
    current: list[torch.device] = []

    @contextmanager
    def device(gpu: torch.device) -> Iterator[None]:
        current.append(gpu)
        yield
        current.pop()

    def register(address: int, size: int, flags: int) -> int:
        assert current == [GPU], "CUDA would use the memory of another GPU"
        ranges[address] = size
        return 0

    monkeypatch.setattr(torch.cuda, "device", device)

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=ranges.pop,
        cudaGetErrorString={2: "out of memory"}.get,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return ranges


def test_pinned_memory_has_the_exact_size_until_its_last_view_ends(registered: Ranges) -> None:
    memory = pinned(1_000_001, GPU)
    assert registered == {memory.data_ptr(): 1_000_001}
    assert memory.nbytes == 1_000_001 and not memory.data_ptr() % os.sysconf("SC_PAGESIZE")
    view = memory[64:128].view(torch.float32)
    del memory
    gc.collect()
    assert registered
    view.fill_(3.0)
    assert view.sum() == 48
    del view
    gc.collect()
    assert not registered


def test_forked_process_shares_pinned_memory(registered: Ranges) -> None:
    """With copy-on-write the GPU could write to pages that this process no longer reads."""
    memory = pinned(10, GPU)
    child = os.fork()
    if not child:
        memory[0] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert memory[0] == 7


def test_memory_that_cannot_be_pinned_is_an_error(
    monkeypatch: pytest.MonkeyPatch, registered: Ranges
) -> None:
    runtime = torch.cuda.cudart()
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: 2)
    with pytest.raises(RuntimeError, match="cannot pin 10 bytes of host memory: out of memory"):
        pinned(10, GPU)


def test_tensors_of_a_part_share_one_block_without_gaps() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn
    shapes = (), (0,), (3,), (50304, 7), (5, 1, 6)
    tensors = {
        f"{kind}, {shape}": torch.randint(0, 2, shape, generator=generator).to(kind)
        for kind in kinds
        for shape in shapes
    }
    blocks: list[Tensor] = []

    def allocate(size: int, device: torch.device) -> Tensor:
        assert device == torch.device("cpu")
        blocks.append(torch.empty(size, dtype=torch.uint8))
        return blocks[-1]

    views = writer._in_one_block(tensors, allocate)
    assert [*views] == [*tensors]
    for name, view in views.items():
        view.copy_(tensors[name])
    for name, view in views.items():
        assert view.dtype == tensors[name].dtype and view.shape == tensors[name].shape
        content, expected = (t.reshape(-1).view(torch.uint8) for t in (view, tensors[name]))
        assert torch.equal(content, expected), name
        assert view.is_contiguous() and not (view.data_ptr() - blocks[0].data_ptr()) % 64
        assert view.untyped_storage().data_ptr() == blocks[0].data_ptr()
    size = sum(t.nbytes for t in tensors.values())
    assert len(blocks) == 1 and size <= blocks[0].nbytes < size + 64 * len(tensors)
