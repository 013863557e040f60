"""Data parallelism as HelixFold's scripts say it."""

from __future__ import annotations

from typing import Any

from polyreme.distributed.placement import apply_plan
from polyreme.distributed.protein_folding.groups import scg
from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer


def get_world_size() -> int:
    """1: a script has the whole batch."""
    return 1


def get_rank_in_group() -> int:
    """0: a script has the whole batch."""
    return 0


def param_sync(model: Layer, src_rank: int = 0) -> None:
    """Place model by the plan of scg; every device then has the same parameters. ConfigError before scg has one."""
    if scg.plan is None:
        raise ConfigError("dp.param_sync: scg has no plan to place a model by; call scg.init_process_group first")
    apply_plan(scg.plan, model)


def grad_sync(param_groups: Any, grad_avg: bool = True) -> None:
    """Does nothing: the loss is the mean over the whole batch, and so are its gradients. ConfigError for
    grad_avg=False."""
    if not grad_avg:
        raise ConfigError("dp.grad_sync: grad_avg=False asks for sums over devices; a mean loss has means, give True")
