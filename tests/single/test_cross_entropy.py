"""Cross-entropy over a large vocabulary, whose gradient reuses the memory of the logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hvdtrain.models import vocabulary


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_MANY", 0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("rows", "words"), [(1, 65), (3, 7), (64, 1001), (127, 3001)])
def test_in_place_loss_and_gradients_match_torch_exactly(
    rows: int, words: int, autocast: bool
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, 16, generator=draw)
    weight = torch.randn(words, 16, generator=draw)
    targets = torch.randint(words, (2, rows), generator=draw)

    def computed(in_place: bool) -> list[Tensor]:
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = F.linear(a, w)
            if in_place:
                loss = vocabulary.cross_entropy(logits, targets)
            else:
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss * 0.37).backward()
        assert a.grad is not None and w.grad is not None
        return [loss.detach(), a.grad, w.grad]

    torch.testing.assert_close(computed(True), computed(False), rtol=0, atol=0)


def test_second_backward_through_the_loss_is_rejected() -> None:
    logits = torch.randn(4, 9).requires_grad_()
    loss = vocabulary.cross_entropy(logits * 2, torch.arange(4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its logits are gone"):
        loss.backward()


def test_loss_under_no_grad_matches_torch_and_keeps_no_graph() -> None:
    logits, targets = torch.randn(6, 9), torch.arange(6)
    expected = F.cross_entropy(logits, targets)
    with torch.no_grad():
        loss = vocabulary.cross_entropy(logits.clone(), targets)
    assert torch.equal(loss, expected) and not loss.requires_grad


@pytest.mark.parametrize("few", [0, 1 << 22])
def test_loss_of_each_target_matches_torch_and_has_no_gradient(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "_MANY", few)
    logits, targets = torch.randn(2, 6, 9).requires_grad_(), torch.randint(9, (2, 6))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    each = torch.empty(2, 6)
    loss = vocabulary.cross_entropy(logits * 1, targets, each)
    torch.testing.assert_close(each.flatten(), expected.detach())
    torch.testing.assert_close(loss, expected.mean())
    assert not each.requires_grad
    gradient, wanted = (torch.autograd.grad(x, logits)[0] for x in (loss, expected.mean()))
    torch.testing.assert_close(gradient, wanted)


def test_flops_of_a_large_vocabulary_can_be_counted() -> None:
    logits = torch.empty(128, 50304, device="meta", requires_grad=True)
    vocabulary.cross_entropy(
        logits * 1, torch.empty(128, dtype=torch.long, device="meta")
    ).backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape
