"""Penalties under 1.7's names."""

from polyreme import regularizer as ours


class L1DecayRegularizer(ours.L1Decay):
    """Penalty regularization_coeff * sum |p|."""

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        super().__init__(regularization_coeff)


class L2DecayRegularizer(ours.L2Decay):
    """Penalty regularization_coeff / 2 * sum p^2."""

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        super().__init__(regularization_coeff)


WeightDecayRegularizer = ours.WeightDecayRegularizer
L1Decay = L1DecayRegularizer
L2Decay = L2DecayRegularizer

__all__ = ["L1Decay", "L1DecayRegularizer", "L2Decay", "L2DecayRegularizer", "WeightDecayRegularizer"]
