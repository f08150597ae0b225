"""MONAI 1.6.1: an engine whose network is the wrapper.

- Build the net with `norm="batch"`: by default `UNet` has instance norms, and `SegResNet` group norms.
- Batches may be of `MetaTensor`. `"pred"` in `trainer.state.output` is a plain tensor; give a transform that needs meta
  data `MetaTensor(pred).copy_meta_from(image)`.
- Give `CheckpointSaver` the net, as in `{"net": network.module}`: its keys then fit a net without a wrapper.
"""

import torch
from monai.data import DataLoader, MetaTensor
from monai.engines import SupervisedTrainer
from monai.losses import DiceLoss
from monai.networks.nets import UNet

from sync_batchnorm import DataParallelWithCallback, assert_synchronized, convert_model

device, devices = ("cuda", None) if torch.cuda.is_available() else ("cpu", ["cpu"] * 2)  # None: all GPUs


def train(network, items, device):
    trainer = SupervisedTrainer(
        device=torch.device(device),
        max_epochs=2,
        train_data_loader=DataLoader(items, batch_size=4),
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss_function=DiceLoss(sigmoid=True),
    )
    trainer.run()
    return trainer


net = convert_model(UNet(2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,), norm="batch")).to(device)
network = DataParallelWithCallback(net, devices)
assert_synchronized(network)
items = [{"image": MetaTensor(torch.randn(1, 16, 16)), "label": MetaTensor(torch.ones(1, 16, 16))} for _ in range(7)]
trainer = train(network, items, device)
