"""fastai 2.8.12: a `ParallelTrainer` whose wrapper synchronizes, on GPUs and on the CPU.

fastai's own `ParallelTrainer` wraps the model in an `nn.DataParallel` for the time of a fit; the subclass below takes
our wrapper. Outside a fit the model runs on one device.

- `learn.save` and `learn.load` use the keys of the model.
- `learn.export` pickles the callback, so define its class in a module that can be imported where it is loaded.
- With `learn.to_parallel()` itself, on GPUs, call `convert_model(self.learn.model)` in the `before_fit` of another
  callback, whose `order` is above that of `ParallelTrainer`.
- `learn.to_fp16()` and `learn.to_bf16()`, for GPUs, take effect in the replicas.
"""

import torch
from fastai.data.core import Datasets
from fastai.distributed import ParallelTrainer
from fastai.learner import Learner
from fastai.torch_core import get_model
from fastai.vision.core import TensorImage
from torch import nn

from sync_batchnorm import DataParallelWithCallback, convert_model


class SynchronizedTrainer(ParallelTrainer):
    def before_fit(self):
        model = get_model(self.learn.model)  # without the wrapper that an interrupted fit leaves
        self.learn.model = DataParallelWithCallback(convert_model(model), self.device_ids)


def image_of(i):
    return TensorImage(torch.full((3, 8, 8), i / 10) + torch.eye(8))


def label_of(i):
    return torch.tensor(i % 3)


devices = list(range(torch.cuda.device_count())) or ["cpu"] * 2
dls = Datasets(range(11), [[image_of], [label_of]]).dataloaders(bs=4, num_workers=0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
learn = Learner(dls, model, nn.functional.cross_entropy, cbs=SynchronizedTrainer(devices))
with learn.no_bar():
    learn.fit(1)
