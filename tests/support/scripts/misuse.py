"""Mistakes in a script's own loop: each in a process of its own; prints "NAME CODE MESSAGE"."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvdtrain
import hvdtrain.process.generation  # in the parent: it takes a second
from hvdtrain import comm
from hvdtrain.engine.loop import Step

Loop = Callable[[hvdtrain.Training, nn.Module, torch.optim.Optimizer], None]


def _train(step: Step, model: nn.Module) -> None:
    for batch in step:
        step.backward(model(batch).square().mean())


def optimizer_stepped_by_hand(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            _train(step, model)
            optimizer.step()


def stepped_by_a_gradient_scaler(training: Any, model: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for step in training:
        with step:
            _train(step, model)
            scaler.step(optimizer)


def gradients_cleared_in_the_block(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                optimizer.zero_grad()
                step.backward(model(batch).square().mean())


def gradients_of_the_model_cleared(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        model.zero_grad()
        with step:
            for batch in step:
                step.backward(model(batch).square().mean())
                model.zero_grad()


def gradient_deleted_between_micro_batches(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                for parameter in model.parameters():
                    parameter.grad = None
                step.backward(model(batch).square().mean())


def clipped_between_micro_batches(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square().mean())
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clipped_after_the_block(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            _train(step, model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def loss_of_a_gradient_scaler(training: Any, model: nn.Module, optimizer: Any) -> None:
    unused, scaler = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    for step in training:
        with step:
            for batch in step:
                loss = model(batch).square().mean()
                step.backward(scaler.scale(loss) if step.index else unused.scale(loss))


def own_loader(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            model(torch.ones(8, 4)).square().mean().backward()


def block_without_micro_batches(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            if step.index == 1:
                continue
            _train(step, model)


def auxiliary_backward(training: Any, model: nn.Module, optimizer: Any) -> None:
    other = nn.Linear(4, 1)
    for step in training:
        with step:
            for batch in step:
                inputs = batch.clone().requires_grad_()
                torch.autograd.grad(model(inputs).sum(), inputs)
                model(inputs).sum().backward(inputs=[inputs])
                other(batch).sum().backward()  # of another model
                step.backward(model(batch).square().mean())
                if step.index == 2:
                    model(batch).abs().mean().backward()


def backward_by_hand_after_the_block(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            _train(step, model)
        model(torch.ones(8, 4)).square().mean().backward()


def accumulation_hook(training: Any, model: nn.Module, optimizer: Any) -> None:
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    for step in training:
        with step:
            _train(step, model)


def loss_that_is_no_scalar(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square())


def loss_that_is_detached(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                step.backward((model(batch).detach().square().sum(), 2))


def loss_that_is_a_number(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square().mean().item())


def samples_without_collate(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            _train(step, model)


def step_used_after_its_turn(training: Any, model: nn.Module, optimizer: Any) -> None:
    kept = []
    for step in training:
        kept.append(step)
        with kept[0]:
            _train(kept[0], model)


def block_left_out(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        if step.index != 1:
            with step:
                _train(step, model)


def break_inside_the_block(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square().mean())
                break


def exception_swallowed(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                try:
                    raise ValueError("of a batch")
                    step.backward(model(batch).square().mean())
                except ValueError:
                    pass


def backward_twice(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square().mean())
                step.backward(model(batch).abs().mean())


def backward_after_the_block(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            _train(step, model)
        step.backward(model(torch.ones(2, 4)).mean())


def collective_outside_the_block(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            _train(step, model)
        comm.all_reduce(torch.ones(1))


def loop_left_early(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            _train(step, model)
        break


def unknown_metric(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square().mean(), accuracy=torch.ones(()))


def state_that_cannot_be_saved(training: Any, model: nn.Module, optimizer: Any) -> None:
    training.state["file"] = sys.stdin
    for step in training:
        with step:
            _train(step, model)


def state_set_inside_the_loop(training: Any, model: nn.Module, optimizer: Any) -> None:
    for step in training:
        with step:
            _train(step, model)
        training.state["best"] = step.result["loss"]


def optimizer_with_closure(training: Any, model: nn.Module, optimizer: Any) -> None:
    raise AssertionError("training was given an optimizer that it cannot use")


MISTAKES: list[Loop] = [
    optimizer_stepped_by_hand,
    stepped_by_a_gradient_scaler,
    gradients_cleared_in_the_block,
    gradients_of_the_model_cleared,
    gradient_deleted_between_micro_batches,
    clipped_between_micro_batches,
    clipped_after_the_block,
    loss_of_a_gradient_scaler,
    own_loader,
    block_without_micro_batches,
    auxiliary_backward,
    backward_by_hand_after_the_block,
    accumulation_hook,
    loss_that_is_no_scalar,
    loss_that_is_detached,
    loss_that_is_a_number,
    samples_without_collate,
    optimizer_with_closure,
    step_used_after_its_turn,
    block_left_out,
    break_inside_the_block,
    exception_swallowed,
    backward_twice,
    backward_after_the_block,
    collective_outside_the_block,
    loop_left_early,
    unknown_metric,
    state_that_cannot_be_saved,
    state_set_inside_the_loop,
]


def _run(mistake: Loop, root: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if mistake is optimizer_with_closure:
        optimizer = torch.optim.LBFGS(model.parameters())
    keys = {"train.duration": 3, "batch.global_size": 8, "batch.micro_size": 2, "telemetry.port": 0}
    keys |= {"run.root": root, "run.id": mistake.__name__}
    data: Any = [None] * 64 if mistake is samples_without_collate else [*torch.ones(64, 4)]
    with hvdtrain.training(model, optimizer, data, config=keys) as training:
        mistake(training, model, optimizer)


def main(root: Path) -> None:
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # imports torch._dynamo, in the parent
    pids = []
    for mistake in MISTAKES:
        output = root / f"{mistake.__name__}.txt"
        sys.stdout.flush()
        pids.append(os.fork())  # imports take seconds
        if pids[-1] == 0:
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
            code = 0
            try:
                _run(mistake, root)
            except SystemExit as end:
                code = int(str(end.code))
            os._exit(code)
    for mistake, pid in zip(MISTAKES, pids, strict=True):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        last = (root / f"{mistake.__name__}.txt").read_text().splitlines()[-1:]
        print(mistake.__name__, code, *last)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
