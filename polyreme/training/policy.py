"""StepPolicy: how a training step computes, beside what its model and optimizer say."""

from __future__ import annotations

from dataclasses import dataclass

from polyreme.errors import ConfigError
from polyreme.training.precision import FULL_PRECISION, MixedPrecision
from polyreme.training.spikes import SpikePolicy

NON_FINITE = ("apply", "skip", "halt")


@dataclass(frozen=True)
class StepPolicy:
    """The policy of a training step. Clipping is the optimizer's setting (grad_clip), as everywhere.

    precision: what is cast, and whether the loss is scaled. non_finite: what a step does whose loss or gradients are
    not finite: "apply" updates as ever; "skip" changes nothing; "halt" changes nothing, nor does any step that follows,
    so that what went wrong can be looked at. A loss scaler skips by itself what it has made overflow, so with one there
    is nothing to halt. spikes: what is done with losses and gradient norms far above what they have been; not with a
    loss scaler. accumulates: a microbatch draws random numbers from a branch of the stream, so that they are the
    same in whatever order and on whatever device it runs; if not, a batch that is one piece draws from the stream
    itself, as the same lines outside a step do, and only one of several microbatches from branches.

    Raises ConfigError for an unknown non_finite, and for "halt" or spikes with a loss scaler.

    >>> StepPolicy(non_finite="halt").guards
    True
    """

    precision: MixedPrecision = FULL_PRECISION
    non_finite: str = "apply"
    spikes: SpikePolicy | None = None
    accumulates: bool = True

    def __post_init__(self) -> None:
        if self.non_finite not in NON_FINITE:
            raise ConfigError(f"StepPolicy: non_finite={self.non_finite!r}; give one of {', '.join(NON_FINITE)}")
        if self.non_finite == "halt" and self.precision.is_on and self.precision.scaler is not None:
            raise ConfigError(
                "StepPolicy: non_finite='halt' with a loss scaler, which tries scales until gradients overflow; give "
                "'skip', or bfloat16, which needs no scaler"
            )

        if self.spikes is not None and self.precision.is_on and self.precision.scaler is not None:
            raise ConfigError(
                "StepPolicy: spikes with a loss scaler, whose gradients overflow by design; use bfloat16, or no spikes"
            )

    def branches(self, count: int) -> bool:
        """True if each of this many microbatches draws from a branch of the stream, not from the stream itself."""
        return self.accumulates or count > 1

    @property
    def guards(self) -> bool:
        """True if a step looks at its loss and gradients before it updates."""
        return self.non_finite != "apply" or self.spikes is not None
