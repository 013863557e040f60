"""Optimizers and learning-rate schedules."""

from polyreme.module_names import suggest_names
from polyreme.optimizer import lr
from polyreme.optimizer.adam import Adam, Adamax, AdamW
from polyreme.optimizer.adam_corrections import NAdam, RAdam
from polyreme.optimizer.adaptive import Adadelta, Adagrad, RMSProp
from polyreme.optimizer.full_batch import ASGD, Rprop
from polyreme.optimizer.lamb import Lamb
from polyreme.optimizer.lbfgs import LBFGS
from polyreme.optimizer.optimizer import Optimizer
from polyreme.optimizer.sgd import SGD, Momentum

__all__ = [
    "ASGD",
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lamb",
    "Momentum",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSProp",
    "Rprop",
    "lr",
]

suggest_names(__name__)
