"""Checks of single operations on one GPU, in one process: `python -m tests.gpu.ops --out DIR`.

Part of tests/gpu/check.py. Each check prints its result as soon as it has one; a failure does not
prevent the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HOROVOD_CONTROLLER", "gloo")
os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PACKAGE = Path(__file__).resolve().parents[2] / "hvdtrain"
Look = Callable[[torch.device], str]
# Checks that run on any device, and checks that need a GPU.
ANYWHERE: list[Look] = []
ON_GPU: list[Look] = []


def anywhere(look: Look) -> Look:
    ANYWHERE.append(look)
    return look


def on_gpu(look: Look) -> Look:
    ON_GPU.append(look)
    return look


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _qkv(device: torch.device, dtype: torch.dtype, time_: int = 512, size: int = 64) -> Any:
    """Gradient, q, k and v of 4 heads."""
    shape = (2, 4, time_, size)
    return [_random(shape, seed).to(device, dtype) for seed in range(4)]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _distance(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


@on_gpu
def flash_kernels_equal_products(device: torch.device) -> str:
    """The private operators, as context parallelism and the attention patterns call them."""
    from hvdtrain.models import attention_kernels as kernels

    seen = []
    cases = (torch.bfloat16, 4, 64), (torch.float16, 4, 64), (torch.bfloat16, 2, 128)
    for dtype, heads, size in (*cases, (torch.bfloat16, 4, 256)):
        gradient, q, *keys = _qkv(device, dtype, size=size)
        k, v = (x[:, :heads].contiguous() for x in keys)
        assert kernels.has_flash(q)
        y, denominators = kernels.attend(q, k, v, True, None)
        wide = q.float(), k.float(), v.float()
        right, right_denominators = kernels._products(*wide, True, None)
        forward = max(_distance(y, right), _distance(denominators, right_denominators))
        results = gradient, y, denominators[..., None]
        found = kernels.attend_backward(results, (q, k, v), True, None)
        rights = kernels._products_backward(
            (gradient.float(), right, right_denominators), wide, True, None
        )
        backward = max(_distance(a, b) for a, b in zip(found, rights, strict=True))
        case = f"{dtype}, {heads} of 4 heads, size {size}"
        seen.append(f"{case}: forward {forward:.1e}, backward {backward:.1e}")
        assert forward < 1e-2 and backward < 2e-2, seen
    return "; ".join(seen)


def _results(device: torch.device, dtype: torch.dtype, times: int = 12) -> int:
    """Number of different gradients of attention in several backward passes."""
    gradient, *qkv = _qkv(device, dtype, time_=1024)
    found = set()
    for _ in range(times):
        q, k, v = (x.detach().requires_grad_() for x in qkv)
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)
        found.add(tuple(float(leaf.grad.double().sum()) for leaf in (q, k, v)))
    return len(found)


@on_gpu
def attention_backward_is_reproducible(device: torch.device) -> str:
    from hvdtrain.runtime.device import use_deterministic_kernels

    dtypes = torch.bfloat16, torch.float32
    without = [_results(device, dtype) for dtype in dtypes]
    use_deterministic_kernels(device)
    try:
        found = [_results(device, dtype) for dtype in dtypes]
    finally:
        torch.use_deterministic_algorithms(False)
    seen = f"{found} results in 12 of bfloat16 and float32; by default {without}"
    assert found == [1, 1], seen
    return seen


class _OfModel:
    """A task whose samples are tensors, for a model and its loss."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self._loss = loss

    def loss(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": self._loss(model, *batch)}


@on_gpu
def exact_models_have_the_same_gradient_each_time(device: torch.device) -> str:
    """The check before an exact run, with operations that have deterministic kernels only."""
    from torch.utils.data import TensorDataset

    from hvdtrain.models.gpt import GPT
    from hvdtrain.models.gpt_config import AttentionConfig, GPTConfig
    from hvdtrain.models.vision import ResNet
    from hvdtrain.optim.config import PrecisionConfig
    from hvdtrain.optim.precision import build_precision
    from hvdtrain.process.repeatable import FirstMicroBatch
    from hvdtrain.runtime.device import use_deterministic_kernels, without_kernel
    from hvdtrain.tasks import Datasets

    tokens = torch.randint(0, 256, (4, 1025), generator=torch.Generator().manual_seed(0))
    texts = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    images = TensorDataset(_random((4, 3, 224, 224), 1), torch.arange(4))
    patterns = {
        "all": AttentionConfig(),
        "dilated": AttentionConfig(
            pattern="dilated", segment_lengths=[256, 1024], dilation_rates=[1, 4]
        ),
        "block_sparse": AttentionConfig(
            pattern="block_sparse", block_size=128, local_blocks=2, global_blocks=1
        ),
    }
    of_text = _OfModel(lambda model, *batch: model.loss(*batch))
    of_image = _OfModel(lambda model, x, y: F.cross_entropy(model(x), y))
    cases: dict[str, Any] = {"resnet50": (of_image, ResNet("resnet50", 224, 3, 10), images)}
    for name, pattern in patterns.items():
        config = GPTConfig(
            layers=2, heads=8, kv_heads=2, width=512, context=1024, vocab_size=256,
            attention=pattern,
        )  # fmt: skip
        cases[f"gpt, {name}"] = of_text, GPT(config), texts
    use_deterministic_kernels(device)
    seen = []
    try:
        for name, (task, model, samples) in cases.items():
            for kind in ("float32", "bf16"):
                precision = build_precision(PrecisionConfig(kind), device)
                first = FirstMicroBatch(
                    task, model.to(device), Datasets(samples), precision, range(4), seed=1
                )
                differing = [name for _ in range(3) for name in first.differing()]
                seen.append(f"{name}, {kind}: {len({*differing})} differ")
                assert not differing, seen
        pooled = F.adaptive_max_pool2d(_random((1, 1, 8, 8), 2).to(device).requires_grad_(), 3)
        try:
            pooled.sum().backward()
        except RuntimeError as error:
            seen.append(str(without_kernel(error)))
        assert "adaptive_max_pool2d" in seen[-1], seen
    finally:
        torch.use_deterministic_algorithms(False)
    return "; ".join(seen)


@on_gpu
def grouped_query_attention_needs_no_square_memory(device: torch.device) -> str:
    from hvdtrain.models.attention import causal_attention

    time_, seen = 4096, []
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(1, 8, time_, 64, device=device, dtype=dtype, requires_grad=True)
        k, v = (torch.randn(1, 2, time_, 64, device=device, dtype=dtype) for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        causal_attention(q, k, v, 0.0, None).sum().backward()
        used = torch.cuda.max_memory_allocated() - before
        scores = 8 * time_ * time_ * q.element_size()
        seen.append(f"{dtype}: {used >> 20} MiB (scores would need {scores >> 20} MiB)")
        assert used < scores / 2, seen
    return "; ".join(seen)


@anywhere
def exact_sums_equal_those_of_the_cpu(device: torch.device) -> str:
    from hvdtrain.exchange.exact import ExactBucket

    sums = []
    for where in (torch.device("cpu"), device):
        model = nn.Linear(300, 200).to(where)
        bucket = ExactBucket("ops.exact", [*model.parameters()], 2.0**18 / 4)
        bucket.begin()
        for number, scale in enumerate((1e-7, 1e-3, 1.0, 3e3)):
            for p in model.parameters():
                bucket.arrived(p, (_random(tuple(p.shape), number) * scale).to(where))
        bucket.send(alone=True)
        bucket.receive()
        sums.append([_gradient(p).cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))
    return "bitwise identical gradients"


@anywhere
def hashes_equal_those_of_the_cpu(device: torch.device) -> str:
    from hvdtrain.engine.integrity import TensorHash

    of = TensorHash()
    tensors: dict[str, Tensor] = {"empty": torch.empty(0), "scalar": torch.tensor(3.5)}
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        tensors[str(dtype)] = _random((1_000_003 + number,), 3).to(dtype)
    tensors["int64"] = torch.arange(385).view(77, 5)
    for name, tensor in tensors.items():
        assert of.sums(tensor).tolist() == of.sums(tensor.to(device)).tolist(), name
    big = torch.randn(124_000_000 if device.type == "cuda" else 1000, device=device)
    of({"w": big})
    began = time.perf_counter()
    of({"w": big})
    took = time.perf_counter() - began
    return f"{len(tensors)} dtypes and shapes; {len(big)} floats in {took:.3f} s"


@anywhere
def powersgd_equals_that_of_the_cpu(device: torch.device) -> str:
    from hvdtrain.exchange.powersgd import orthonormal, product

    matrices = [_random((700, 4), 4), _random((64, 4), 5)]
    here = orthonormal(matrices)
    there = orthonormal([matrix.to(device) for matrix in matrices])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True)), "orthonormal"
    right = _random((500, 4), 6)
    out = [torch.empty(700, 500, device=where) for where in ("cpu", device)]
    product(here[0], right, out[0])
    product(there[0], right.to(device), out[1])
    assert torch.equal(out[0], out[1].cpu()), "product"
    return "bitwise identical"


@anywhere
def norm_and_adamw_are_repeatable(device: torch.device) -> str:
    from torch.nn.utils import get_total_norm

    shapes = [(5030, 768), (768,), (1024, 768)]
    results = []
    for _ in range(3):
        parameters = [nn.Parameter(_random(shape, 7).to(device)) for shape in shapes]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        for step in range(3):
            for p in parameters:
                p.grad = _random(tuple(p.shape), step).to(device)
            gradients = [_gradient(p) for p in parameters]
            norm = get_total_norm(gradients)
            torch._foreach_mul_(gradients, (1 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
        results.append([norm.cpu(), *(p.detach().cpu() for p in parameters)])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))
    return "3 repetitions are bitwise identical"


@anywhere
def horovod_sums_alone(device: torch.device) -> str:
    """One rank: NCCL, in place, grouped, and int64 beyond 2**53 in a group."""
    import horovod.torch as hvd

    hvd.init()
    assert hvd.size() == 1
    names = ("int32", "int64", "float16", "bfloat16", "float32", "float64")
    for name in names:
        x = (torch.arange(1000, device=device) % 100).to(getattr(torch, name))
        for found in (
            hvd.allreduce(x, op=hvd.Sum, name=f"one.{name}"),
            hvd.broadcast(x, 0, name=f"b.{name}"),
            hvd.allgather(x, name=f"g.{name}"),
            hvd.grouped_allreduce([x, x[:7]], op=hvd.Sum, name=f"group.{name}")[0],
        ):
            assert torch.equal(found, x), name
    big = torch.tensor([2**60 + 1, -(2**60) - 1, 2**53 + 1], device=device)
    assert torch.equal(hvd.allreduce(big, op=hvd.Sum, name="big"), big)
    for found in hvd.grouped_allreduce([big, big.clone()], op=hvd.Sum, name="bigs"):
        assert torch.equal(found, big), f"{found.tolist()} for {big.tolist()}"
    took = []
    for size in (1 << 10, 8 << 20, 64 << 20):
        y = torch.ones(size // 4, device=device)
        hvd.allreduce_(y, op=hvd.Sum, name=f"t{size}")
        began = time.perf_counter()
        for _ in range(20):
            hvd.allreduce_(y, op=hvd.Sum, name=f"t{size}")
        took.append(f"{size >> 10} KiB {(time.perf_counter() - began) / 20 * 1e6:.0f} us")
    return f"{', '.join(names)}; an all-reduce: {', '.join(took)}"


@on_gpu
def device_has_metrics_and_a_peak(device: torch.device) -> str:
    from hvdtrain.telemetry.gpu import peak_of, readings

    found = {name: read() for name, read in readings(device).items()}
    peak = peak_of(device, torch.bfloat16)
    name = torch.cuda.get_device_name()
    assert peak, name
    if all(map(math.isnan, found.values())):
        return f"{name}: peak {peak:.3g}; no NVML package here"
    assert all(map(math.isfinite, found.values())), found
    return f"{name}: peak {peak:.3g}; {found}"


@on_gpu
def phases_are_measured_on_the_device(device: torch.device) -> str:
    from hvdtrain.runtime.phases import PhaseTimer, cuda_event

    a = torch.randn(4096, 4096, device=device)
    a @ a
    torch.cuda.synchronize()
    began = time.perf_counter()
    timer = PhaseTimer(began)
    timer.use_events(cuda_event)
    for _ in range(5):
        for phase, products in (("forward", 10), ("backward", 20), ("optimizer", 2)):
            timer.enter(phase)
            for _ in range(products):
                a @ a
    timer.enter("other")
    torch.cuda.synchronize()
    timer.enter("other")
    wall, found = time.perf_counter() - began, timer.seconds()
    ratio = found["backward"] / found["forward"]
    seen = f"together {sum(found.values()):.3f} of {wall:.3f} s, backward / forward {ratio:.2f}"
    assert abs(sum(found.values()) - wall) < 0.1 * wall + 0.01 and 1.7 < ratio < 2.3, seen
    return seen


@on_gpu
def checkpoint_copies_are_pinned(device: torch.device) -> str:
    """Staging memory is allocated by the writer's thread; the loop only waits for the copy."""
    from hvdtrain.checkpoint.format import Checkpoint
    from hvdtrain.checkpoint.writer import CheckpointWriter

    kept: dict[str, Tensor] = {}

    class Store:
        def has(self, step: int) -> bool:
            return False

        def save(self, checkpoint: Checkpoint) -> None:
            for tensors in checkpoint.parts.values():
                kept.update({name: tensor.clone() for name, tensor in tensors.items()})

    tensors = {f"w{n}": torch.randn(1 << 22, device=device) for n in range(90)}  # 1.5 GB
    tensors |= {f"small{n}": torch.randn(100 + n, device=device) for n in range(300)}
    tensors["step"] = torch.tensor(3.0)
    checkpoint = Checkpoint({"model": tensors}, {"step": 1})
    writer: Any = CheckpointWriter(Store())
    began = time.perf_counter()
    writer.prepare(checkpoint)
    assert writer.wait()
    prepared = time.perf_counter() - began
    staging = writer._staging.parts["model"]
    assert all(t.is_pinned() for name, t in staging.items() if name != "step")
    storages = {t.untyped_storage().data_ptr() for t in staging.values()}
    writer.start(checkpoint, before=lambda: None)
    stall = writer.stall_seconds
    for tensor in tensors.values():
        tensor.zero_()  # must not change what is written
    assert writer.wait() and writer.error is None, writer.error
    assert 0.9 < float(kept["w0"].std()) < 1.1 and not tensors["w0"].any()
    size = sum(t.nbytes for t in tensors.values()) / 1e9
    seen = f"{size:.2f} GB in {len(storages)} blocks, allocated in {prepared:.2f} s"
    return f"{seen}; stall {stall:.3f} s ({size / stall:.0f} GB/s)"


@on_gpu
def memory_options_keep_the_gradients(device: torch.device) -> str:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from hvdtrain.engine.config import MemoryConfig
    from hvdtrain.engine.memory import arrange_activations, check_compiler
    from hvdtrain.models.gpt import GPT
    from hvdtrain.models.gpt_config import GPTConfig

    config = GPTConfig(layers=3, heads=4, width=256, context=256, vocab_size=512)
    tokens = (torch.arange(4 * 257).view(4, 257) % 500).to(device)

    def gradients(compiled: bool, memory: MemoryConfig) -> tuple[list[Tensor], int]:
        torch.manual_seed(7)
        model = GPT(config).to(device)
        arrange_activations(memory, object(), model, device)
        if compiled:
            for block in model.blocks:
                block.compile()
        torch.cuda.reset_peak_memory_stats()
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cuda", torch.bfloat16):
            # Backward in the context, too: it computes activations again.
            model.loss(tokens[:, :-1], tokens[:, 1:], None).backward()
        found = [_gradient(p).clone() for p in model.parameters()]
        return found, torch.cuda.max_memory_allocated()

    plain, most = gradients(False, MemoryConfig())
    seen = [f"plain {most >> 20} MiB"]
    for memory in (
        MemoryConfig(checkpoint_activations="blocks"),
        MemoryConfig(checkpoint_activations="selective"),
        MemoryConfig(offload_activations=True),
    ):
        found, peak = gradients(False, memory)
        name = "offloaded" if memory.offload_activations else memory.checkpoint_activations
        seen.append(f"{name} {peak >> 20} MiB")
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), seen
    check_compiler(device)
    began = time.perf_counter()
    found, _ = gradients(True, MemoryConfig())
    worst = max(_distance(a, b) for a, b in zip(found, plain, strict=True) if b.any())
    seen.append(f"compiled in {time.perf_counter() - began:.0f} s: {worst:.1e} apart")
    assert worst < 0.05, seen
    return "; ".join(seen)


@on_gpu
def workers_forked_after_cuda_began_draw_the_same_numbers(device: torch.device) -> str:
    from torch.utils.data import Dataset

    from hvdtrain.data.config import LoaderConfig
    from hvdtrain.data.loader import Loading, MicroBatches, Place, load, to_device

    class Numbers(Dataset[Tensor]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(3) + index

    seen = []
    for workers in (0, 2):
        loading = Loading(LoaderConfig(workers=workers), pin_memory=True)
        batches = MicroBatches(Numbers(), 1, 3, loading.collate)
        found = [*load(batches, [Place(0, j, [j, j + 1]) for j in range(8)], loading)]
        assert all(batch.is_pinned() for batch in found)
        seen.append([to_device(batch, device).cpu() for batch in found])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    return "pinned, and the same numbers with 0 and 2 workers"


@on_gpu
def out_of_memory_is_explained(device: torch.device) -> str:
    from hvdtrain.runtime.memory import explained

    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        text = explained(error)
        assert text and "GPU's memory is not enough" in text, f"{type(error).__name__}: {error}"
        return text[:120]
    raise AssertionError("1 PiB was allocated")


@on_gpu
def a_step_waits_for_the_device_at_most_twice(device: torch.device) -> str:
    """torch reports each wait; tests/single/test_foreign_device.py counts them without a GPU."""
    from hvdtrain.bench.app import AppLoop
    from hvdtrain.config import parse

    flags = "--config gpt-nano --data.train hvdtrain/*/*.py --precision.name bf16"
    flags += " --eval.every 0 --checkpoint.every 0 --telemetry.port 0 --train.duration 100"
    app = AppLoop(parse(flags.split()), Path(tempfile.mkdtemp()))
    app.run(5)
    waits: Counter[str] = Counter()

    def note(*_: Any, **__: Any) -> None:
        frames = [f for f in traceback.extract_stack() if str(PACKAGE) in f.filename]
        if frames:  # not torch's note on the mode itself
            waits[f"{frames[-1].filename.removeprefix(str(PACKAGE))}:{frames[-1].lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            app.run(2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    app.close()
    seen = ", ".join(f"{line} x{count / 2:g}" for line, count in waits.most_common())
    of_step = sum(count for line, count in waits.items() if not line.startswith("/bench/")) / 2
    assert of_step <= 2, seen
    return seen


@on_gpu
def groups_of_torch_survive_a_lost_peer(device: torch.device) -> str:
    """In two processes, see nccl_abort.py; half a minute."""
    command = [sys.executable, "-m", "tests.gpu.nccl_abort", "--device", str(device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    seen = "; ".join(done.stdout.splitlines())
    assert done.returncode == 0, f"{seen}; {done.stderr[-400:]}"
    return seen


def main() -> int:
    """Return 0: no check failed; 1: a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--only", default="", help="only checks whose name contains this")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    device = torch.device("cuda", 0) if args.gpus else torch.device("cpu")
    rows: list[dict[str, Any]] = []
    for look in [*ANYWHERE, *ON_GPU]:
        if args.only not in look.__name__:
            continue
        began = time.monotonic()
        ok: bool | None = True
        try:
            if look in ON_GPU and not args.gpus:
                ok, seen = None, "not run: no GPU here"
            else:
                assert began < until, "no time left"
                seen = look(device)
        except Exception as error:
            ok, seen = False, f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            traceback.print_exc()
        seconds = round(time.monotonic() - began, 1)
        rows.append({"check": look.__name__, "ok": ok, "seen": seen, "seconds": seconds})
        word = {True: "ok", False: "FAILED", None: "-"}[ok]
        print(f"{word} {look.__name__} ({seconds} s): {seen}", flush=True)
        (args.out / "ops.json").write_text(json.dumps(rows, indent=1))
    return int(any(row["ok"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
