"""distributed_scaler: the loss scaler of a hybrid-parallel job."""

from __future__ import annotations

from polyreme.amp import GradScaler
from polyreme.distributed.fleet.fleet import fleet


def distributed_scaler(scaler: GradScaler | None = None) -> GradScaler:
    """The scaler itself: gradients are global, so an overflow on any device is seen by all.

    None: one with the settings of the strategy's amp_configs, disabled where nothing is scaled. Raises TypeError for
    what is no GradScaler.
    """
    if scaler is None:
        return fleet.job.amp.make_scaler() or GradScaler(enable=False)
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"distributed_scaler takes an amp.GradScaler, got {type(scaler).__name__}")
    return scaler
