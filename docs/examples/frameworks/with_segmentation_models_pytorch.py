"""segmentation_models_pytorch 0.6.0: batch norms of decoders, and of encoders of torchvision or timm, are converted.

- The loss is computed outside the replicas: a Dice loss is no mean over samples, and needs the whole batch.
- One image per device is enough, even where the deepest feature map has a single pixel, which torch refuses with
  `Expected more than 1 value per channel when training`.
"""

import segmentation_models_pytorch as smp
import torch

from sync_batchnorm import DataParallelWithCallback, assert_synchronized, convert_model

device, devices = ("cuda", None) if torch.cuda.is_available() else ("cpu", ["cpu"] * 2)  # None: all GPUs


def train(parallel, batches):
    optimizer, loss = torch.optim.SGD(parallel.parameters(), lr=0.01), smp.losses.DiceLoss("multiclass")
    for images, masks in batches:
        optimizer.zero_grad()
        loss(parallel(images), masks).backward()
        optimizer.step()


model = convert_model(smp.Unet("tu-mobilenetv3_small_050", encoder_weights=None, classes=2)).to(device)
parallel = DataParallelWithCallback(model, devices)
assert_synchronized(parallel)
train(parallel, [(torch.randn(4, 3, 64, 64, device=device), torch.randint(2, (4, 64, 64), device=device))])
