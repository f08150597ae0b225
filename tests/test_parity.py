"""Replicas compute what one device computes on the whole batch."""

import torch
from helpers import assert_same_step, twins
from torch import nn


def test_conv_net_steps_are_those_of_one_device(devs):
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
    )
    plain, parallel = twins(net.double(), devs)
    for _ in range(3):
        assert_same_step(plain, parallel, torch.randn(7, 3, 9, 8, dtype=torch.float64, device=plain[0].weight.device))
