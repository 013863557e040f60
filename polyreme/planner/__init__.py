"""The planner: what a model will cost under a plan on a cluster, and which plan is best."""

from polyreme.planner.cluster import Cluster, DeviceKind, Link
from polyreme.planner.devices import cluster_of_kind, device_kind, device_kinds
from polyreme.planner.graph import BlockCost, ModelGraph, OperationCost, PipelineCut, Value
from polyreme.planner.model_shape import ModelShape
from polyreme.planner.predict import predict
from polyreme.planner.prediction import Memory, Prediction, Times, Training
