"""ultralytics 8.4.190: a training loop of your own; the trainer of ultralytics starts a process for each GPU.

The forward of a `DetectionModel` returns predictions, and its `loss` takes them.

- Convert the finished model. Inside `patch_sync_batchnorm` it would have the wrong `eps` and `momentum`, which
  `DetectionModel` sets only in layers whose class is exactly `nn.BatchNorm2d`.
- Call the wrapper with the images alone. The batch as a dict cannot be split: its boxes name images by number.
- `model.fuse()` works on converted layers.
"""

import torch
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

from sync_batchnorm import DataParallelWithCallback, assert_synchronized, convert_model

device, devices = ("cuda", None) if torch.cuda.is_available() else ("cpu", ["cpu"] * 2)  # None: all GPUs


def train(parallel, model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        losses, _ = model.loss(batch, parallel(batch["img"]))
        losses.sum().backward()
        optimizer.step()
    return losses


def random_batch(images, device):
    boxes = {"cls": torch.randint(2, (images, 1)).float(), "bboxes": torch.rand(images, 4) / 2 + 0.25}
    batch = {"img": torch.randn(images, 3, 64, 64), "batch_idx": torch.arange(images).float(), **boxes}
    return {key: value.to(device) for key, value in batch.items()}


model = DetectionModel("yolo11n.yaml", nc=2, verbose=False)
model.args = get_cfg()  # the weights of the losses
parallel = DataParallelWithCallback(convert_model(model).to(device), devices)
assert_synchronized(parallel)
train(parallel, model, [random_batch(4, device)])
