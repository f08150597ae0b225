"""pytorch-metric-learning 2.9.0: losses and miners get the embeddings of the whole batch.

They compare samples of the whole batch, so they stay outside the replicas, even losses with weights, such as
`ArcFaceLoss`.
"""

import torch
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from torch import nn

from sync_batchnorm import DataParallelWithCallback, assert_synchronized, convert_model

device, devices = ("cuda", None) if torch.cuda.is_available() else ("cpu", ["cpu"] * 2)  # None: all GPUs


def train(trunk, batches):
    optimizer, mine, loss = torch.optim.SGD(trunk.parameters(), lr=0.1), BatchHardMiner(), TripletMarginLoss(margin=0.5)
    for images, labels in batches:
        optimizer.zero_grad()
        embeddings = trunk(images)
        loss(embeddings, labels, mine(embeddings, labels)).backward()
        optimizer.step()


def make_trunk():
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *pool, nn.Linear(8, 4), nn.BatchNorm1d(4))


trunk = DataParallelWithCallback(convert_model(make_trunk()).to(device), devices)
assert_synchronized(trunk)
train(trunk, [(torch.randn(8, 1, 8, 8, device=device), torch.arange(8, device=device) % 3)])
