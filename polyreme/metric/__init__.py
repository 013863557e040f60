"""Metrics over predictions and labels, for training loops and Model."""

from polyreme.metric.metrics import Accuracy, Auc, Metric, Precision, Recall, accuracy
from polyreme.module_names import suggest_names

__all__ = ["Accuracy", "Auc", "Metric", "Precision", "Recall", "accuracy"]

suggest_names(__name__)
