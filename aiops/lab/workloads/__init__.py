"""Real data sets and a small NumPy model: what demo, simulator, tests and experiments train.

>>> from aiops.lab.workloads import MLP, batches, load
>>> digits = load("digits").flat()
>>> model = MLP((digits.features, 32, digits.classes))
>>> params = model.init(seed=0)
>>> x, y = next(batches(digits, batch_size=16, seed=0))
>>> loss, grads = model.gradients(params, x, y)
>>> grads["layer0.weight"].shape
(64, 32)
"""

from aiops.lab.workloads.batching import batches
from aiops.lab.workloads.blobs import synthetic
from aiops.lab.workloads.catalog import DATASETS, load
from aiops.lab.workloads.dataset import Dataset
from aiops.lab.workloads.files import DamagedData, DataUnavailable
from aiops.lab.workloads.mlp import MLP
from aiops.lab.workloads.tasks import PerceptronTask, PerceptronWorkload

__all__ = [
    "DATASETS",
    "MLP",
    "DamagedData",
    "DataUnavailable",
    "Dataset",
    "PerceptronTask",
    "PerceptronWorkload",
    "batches",
    "load",
    "synthetic",
]
