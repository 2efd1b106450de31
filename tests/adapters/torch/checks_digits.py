"""The training that all frameworks have in common, by NumPy arrays and by PyTorch."""

from __future__ import annotations

import numpy as np
import torch

import ringcomm as rc
import ringcomm.torch as hvd
from tests.adapters import digits


def check_numpy_has_the_loss_curve_of_one_process() -> None:
    first, bias, second, bias_2 = (rc.broadcast(array, 0) for array in digits.weights(hvd.rank()))
    momenta = [np.zeros_like(array) for array in (first, bias, second, bias_2)]
    losses = []
    for step in range(digits.STEPS):
        images, labels = digits.samples(step, hvd.rank(), hvd.size())
        loss, gradients = digits.loss_and_gradients([first, bias, second, bias_2], images, labels)
        for array, momentum, gradient in zip((first, bias, second, bias_2), momenta, gradients):
            momentum *= digits.MOMENTUM
            momentum -= digits.LEARNING_RATE * rc.allreduce(gradient)
            array += momentum
        losses.append(float(rc.allreduce(loss)))
    digits.same_curve(losses)


def check_torch_has_the_loss_curve_of_one_process() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, digits.HIDDEN), torch.nn.ReLU(), torch.nn.Linear(digits.HIDDEN, 10)
    )
    for parameter, array in zip(model.parameters(), digits.weights(hvd.rank())):
        parameter.data.copy_(torch.from_numpy(array.T))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), digits.LEARNING_RATE, digits.MOMENTUM),
        named_parameters=model.named_parameters(),
    )
    losses = []
    for step in range(digits.STEPS):
        images, labels = digits.samples(step, hvd.rank(), hvd.size())
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
    digits.same_curve(losses)
