"""skorch 1.4.0: the wrapper's class and arguments, or a function that returns one, as the module of a net.

- Which weights a fit starts from: a model passed as `module__module` is trained itself, so a second `fit`, and a
  `clone` of a fitted net, continue from there. With a function, each fit starts anew.
- Pickles of a net contain the wrapper with its device ids.
- `net.save_params` writes keys that begin with `module.`; `net.module_.module.state_dict()` has those of the model.
"""

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

from sync_batchnorm import DataParallelWithCallback, convert_model

devices = list(range(torch.cuda.device_count())) or ["cpu"] * 2
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
options = {"criterion": nn.CrossEntropyLoss, "train_split": None, "batch_size": 8, "max_epochs": 2, "verbose": 0}
options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
net = NeuralNetClassifier(
    DataParallelWithCallback, module__module=convert_model(model), module__device_ids=devices, **options
)
X = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
y = (X[:, 0] > 0).astype(np.int64)
net.fit(X, y)

# A function instead of the class makes a new model for each fit, with arguments that a grid search can try.


def parallel(width, devices):
    model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
    return DataParallelWithCallback(convert_model(model), devices)


fresh = NeuralNetClassifier(parallel, module__width=8, module__devices=devices, **options)
search = GridSearchCV(fresh, {"module__width": [4, 8]}, cv=2, scoring="accuracy").fit(X, y)
