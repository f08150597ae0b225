"""Ignite 0.5.5: what `idist.auto_model` returns, converted; a moving average, and checkpoints.

With several GPUs in one process, `auto_model` returns an `nn.DataParallel`, which is converted. On the CPU and on one
GPU it returns the model, which is wrapped here.

- Convert and wrap before `EMAHandler`, which makes a deep copy.
- Checkpoints have keys without `module.`, and `Checkpoint.load_objects` loads them into a wrapped model too.
- In several processes `auto_model` returns a `DistributedDataParallel`: omit the `if`, and `sync_bn=True`.
"""

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler
from torch import nn

from sync_batchnorm import DataParallelWithCallback, assert_synchronized, convert_model

model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
model = convert_model(idist.auto_model(model))
if not isinstance(model, nn.DataParallel):
    model = DataParallelWithCallback(model, ["cpu"] * 2 if idist.device().type == "cpu" else None)
assert_synchronized(model)

optimizer = idist.auto_optim(torch.optim.Adam(model.parameters()))
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device=idist.device())
ema = EMAHandler(model, momentum=0.1)
ema.attach(trainer)
saved = {"model": model, "optimizer": optimizer, "trainer": trainer, "ema": ema.ema_model}
trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(saved, DiskSaver("out/checkpoints", require_empty=False)))
trainer.run([(torch.randn(size, 3, 8, 8), torch.arange(size) % 3) for size in (4, 4, 3)], max_epochs=2)
