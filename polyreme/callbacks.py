"""Callbacks of Model."""

from polyreme.hapi.board import TensorBoard, VisualDL, WandbCallback
from polyreme.hapi.callback import Callback, CallbackList
from polyreme.hapi.progress_bar import ProgBarLogger
from polyreme.hapi.schedule_callbacks import EarlyStopping, LRScheduler, ModelCheckpoint, ReduceLROnPlateau
from polyreme.module_names import suggest_names

__all__ = [
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "LRScheduler",
    "ModelCheckpoint",
    "ProgBarLogger",
    "ReduceLROnPlateau",
    "TensorBoard",
    "VisualDL",
    "WandbCallback",
]

suggest_names(__name__)
