"""timm 1.0.31: `convert_model` also converts `BatchNormAct2d`, which many of its families use.

- `timm.utils.freeze(model, ["s1"])` works before and after the conversion; frozen layers are not converted. After
  `unfreeze`, which makes new plain layers, call `convert_model` again.
- Build `ModelEmaV3` from the model, not from the wrapper, after the conversion.
"""

import timm
import torch
from timm.utils import ModelEmaV3
from torch.nn.functional import cross_entropy

from sync_batchnorm import DataParallelWithCallback, assert_synchronized, convert_model

device, devices = ("cuda", None) if torch.cuda.is_available() else ("cpu", ["cpu"] * 2)  # None: all GPUs


def train(model, devices, batches):
    average, parallel = ModelEmaV3(model, decay=0.9), DataParallelWithCallback(model, devices)
    assert_synchronized(parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for images, labels in batches:
        optimizer.zero_grad()
        cross_entropy(parallel(images), labels).backward()
        optimizer.step()
        average.update(model)
    return average.module


model = convert_model(timm.create_model("regnety_002", num_classes=3)).to(device)
train(model, devices, [(torch.randn(4, 3, 32, 32, device=device), torch.randint(3, (4,), device=device))])
