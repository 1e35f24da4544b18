"""Imports what the installed parts need, for a process that forks ranks (tests/support/warm.py)."""

from contextlib import suppress

from tests.support.third_parties.part import package

for _name in (
    *("bitsandbytes", "heavyball", "peft", "pytorch_optimizer", "schedulefree", "timm.optim"),
    *("timm.scheduler", "timm.utils", "torchmetrics", "transformers.optimization"),
    *("vector_quantize_pytorch", "x_transformers", "performer_pytorch", "torch_optimizer"),
):
    with suppress(ImportError):
        package(_name)
