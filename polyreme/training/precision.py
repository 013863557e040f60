"""MixedPrecision: which dtypes a training step computes in, and whether its loss is scaled."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.amp import GradScaler, auto_cast, decorate
from polyreme.core import state


@dataclass(frozen=True)
class MixedPrecision:
    """Settings of auto_cast (level, dtype, the custom lists, use_promote), of decorate (master_weight, master_grad) and
    of GradScaler (scaler; None where the loss is not scaled). Level O0, the default, computes in what the model is in.

    >>> MixedPrecision("O1", "float16", scaler={"init_loss_scaling": 8.0}).make_scaler().get_loss_scaling().item()
    8.0
    """

    level: str = "O0"
    dtype: str = "float16"
    custom_white_list: Any = ()
    custom_black_list: Any = ()
    use_promote: bool = True
    master_weight: bool | None = None
    master_grad: bool = False
    scaler: Mapping[str, Any] | None = None

    @property
    def is_on(self) -> bool:
        """True if anything is cast."""
        return self.level != "O0"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The block that the forward runs in; at level O0 an auto_cast around it stays in force."""
        if not self.is_on:
            return contextlib.nullcontext()
        return auto_cast(
            level=self.level,
            dtype=self.dtype,
            custom_white_list=self.custom_white_list,
            custom_black_list=self.custom_black_list,
            use_promote=self.use_promote,
        )

    def decorate(self, model: Any, optimizer: Any = None) -> None:
        """Cast the model for level O2, its optimizer keeping float32 master weights; at other levels nothing."""
        if self.level == "O2":
            decorate(
                model,
                optimizer,
                level="O2",
                dtype=self.dtype,
                master_weight=self.master_weight,
                master_grad=self.master_grad,
            )

    def cast(self, model: Any) -> dict[int, Any]:
        """Cast the model for level O2 before there is an optimizer. -> by id of a parameter, the array that its master
        weight is to be made of, for Optimizer.keep_masters; empty where there are to be none."""
        before = {id(p): (p.dtype, state.read(p)) for p in model.parameters()}
        self.decorate(model)
        if self.level != "O2" or not self.master_weight:
            return {}
        return {id(p): before[id(p)][1] for p in model.parameters() if p.dtype != before[id(p)][0]}

    def make_scaler(self) -> GradScaler | None:
        """The loss scaler, None where the loss is not scaled."""
        return GradScaler(**self.scaler) if self.is_on and self.scaler is not None else None


FULL_PRECISION = MixedPrecision()
"""Nothing is cast, nothing scaled."""
