"""Loss layers.

Each is one function of polyreme.nn.functional with its settings; formulas and errors are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.layers.functional_layer import FunctionalLayer


class _Loss(FunctionalLayer):
    reductions: ClassVar[tuple[str | None, ...]] = ("mean", "sum", "none")

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        reduction = settings.get("reduction", "mean")
        if reduction not in self.reductions:
            wanted = ", ".join(map(repr, self.reductions))
            raise ConfigError(f"{type(self).__name__}: reduction={reduction!r}; choose one of {wanted}")
        super().__init__(name, **settings)


class CrossEntropyLoss(_Loss):
    """-log softmax(input)[label] along axis; label holds classes, or probabilities with soft_label."""

    _function = staticmethod(F.cross_entropy)

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        soft_label: bool = False,
        axis: int = -1,
        use_softmax: bool = True,
        label_smoothing: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            soft_label=soft_label,
            axis=axis,
            use_softmax=use_softmax,
            label_smoothing=label_smoothing,
        )


class NLLLoss(_Loss):
    """-input[label], input holding log-probabilities along dim 1."""

    _function = staticmethod(F.nll_loss)
    _attribute_prefix = "_"

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, weight=weight, ignore_index=ignore_index, reduction=reduction)


class MSELoss(_Loss):
    """(input - label)^2."""

    _function = staticmethod(F.mse_loss)

    def __init__(
        self,
        reduction: str = "mean",
    ) -> None:
        super().__init__(None, reduction=reduction)


class L1Loss(_Loss):
    """|input - label|."""

    _function = staticmethod(F.l1_loss)

    def __init__(
        self,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, reduction=reduction)


class SmoothL1Loss(_Loss):
    """Squared within delta of the label, linear beyond. Source: arXiv:1504.08083."""

    _function = staticmethod(F.smooth_l1_loss)

    def __init__(
        self,
        reduction: str = "mean",
        delta: float = 1.0,
        is_huber: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(name, reduction=reduction, delta=delta, is_huber=is_huber)


class BCELoss(_Loss):
    """Cross-entropy of probabilities and labels in [0, 1]."""

    _function = staticmethod(F.binary_cross_entropy)

    def __init__(
        self,
        weight: Any = None,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, weight=weight, reduction=reduction)


class BCEWithLogitsLoss(_Loss):
    """Cross-entropy of sigmoid(logit) and labels in [0, 1]."""

    _function = staticmethod(F.binary_cross_entropy_with_logits)

    def __init__(
        self,
        weight: Any = None,
        reduction: str = "mean",
        pos_weight: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name, weight=weight, reduction=reduction, pos_weight=pos_weight)


class KLDivLoss(_Loss):
    """label * (log label - input), input holding log-probabilities; label too with log_target."""

    reductions = (*_Loss.reductions, "batchmean")
    _function = staticmethod(F.kl_div)

    def __init__(
        self,
        reduction: str = "mean",
        log_target: bool = False,
    ) -> None:
        super().__init__(None, reduction=reduction, log_target=log_target)


class CTCLoss(_Loss):
    """-log p(labels) under connectionist temporal classification, summed over all alignments."""

    _function = staticmethod(F.ctc_loss)

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> None:
        super().__init__(None, blank=blank, reduction=reduction, zero_infinity=zero_infinity)

    def forward(  # type: ignore[override]  (one setting is given at each call)
        self, log_probs: Any, labels: Any, input_lengths: Any, label_lengths: Any, norm_by_times: bool = False
    ) -> Any:
        settings = {**self.settings, "norm_by_times": norm_by_times}
        return F.ctc_loss(log_probs, labels, input_lengths, label_lengths, **settings)


class RNNTLoss(_Loss):
    """-log p(label) under an RNN transducer, summed over all alignments."""

    _function = staticmethod(F.rnnt_loss)

    def __init__(
        self, blank: int = 0, fastemit_lambda: float = 0.001, reduction: str = "mean", name: str | None = None
    ) -> None:
        super().__init__(name, blank=blank, fastemit_lambda=fastemit_lambda, reduction=reduction)


class MarginRankingLoss(_Loss):
    """max(0, -label * (input - other) + margin), label 1 or -1."""

    _function = staticmethod(F.margin_ranking_loss)

    def __init__(
        self,
        margin: float = 0.0,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, margin=margin, reduction=reduction)


class HingeEmbeddingLoss(_Loss):
    """input where label is 1, max(0, margin - input) where it is -1."""

    _function = staticmethod(F.hinge_embedding_loss)

    def __init__(
        self,
        margin: float = 1.0,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, margin=margin, reduction=reduction)


class CosineEmbeddingLoss(_Loss):
    """1 - cos(input1, input2) where label is 1, max(0, cos - margin) where it is -1."""

    _function = staticmethod(F.cosine_embedding_loss)

    def __init__(
        self,
        margin: float = 0,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, margin=margin, reduction=reduction)


class SoftMarginLoss(_Loss):
    """log(1 + exp(-label * input)), label 1 or -1."""

    _function = staticmethod(F.soft_margin_loss)

    def __init__(
        self,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, reduction=reduction)


class MultiLabelSoftMarginLoss(_Loss):
    """Mean over classes of the cross-entropy of sigmoid(input) and 0/1 labels."""

    _function = staticmethod(F.multi_label_soft_margin_loss)

    def __init__(
        self,
        weight: Any = None,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, weight=weight, reduction=reduction)


class TripletMarginLoss(_Loss):
    """max(0, d(input, positive) - d(input, negative) + margin), d the p-norm of the difference."""

    _function = staticmethod(F.triplet_margin_loss)

    def __init__(
        self,
        margin: float = 1.0,
        p: float = 2.0,
        epsilon: float = 1e-6,
        swap: bool = False,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, margin=margin, p=p, epsilon=epsilon, swap=swap, reduction=reduction)


class TripletMarginWithDistanceLoss(_Loss):
    """TripletMarginLoss with a distance of one's own."""

    _function = staticmethod(F.triplet_margin_with_distance_loss)

    def __init__(
        self,
        distance_function: Callable[[Any, Any], Any] | None = None,
        margin: float = 1.0,
        swap: bool = False,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, distance_function=distance_function, margin=margin, swap=swap, reduction=reduction)


class PoissonNLLLoss(_Loss):
    """exp(input) - label * input: Poisson negative log-likelihood, of rates themselves without log_input."""

    _function = staticmethod(F.poisson_nll_loss)
    _attribute_prefix = "_"

    def __init__(
        self,
        log_input: bool = True,
        full: bool = False,
        epsilon: float = 1e-8,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, log_input=log_input, full=full, epsilon=epsilon, reduction=reduction)


class GaussianNLLLoss(_Loss):
    """Negative log-likelihood of label under Gaussian(input, variance)."""

    _function = staticmethod(F.gaussian_nll_loss)

    def __init__(
        self,
        full: bool = False,
        epsilon: float = 1e-6,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, full=full, epsilon=epsilon, reduction=reduction)


class MultiMarginLoss(_Loss):
    """Mean over other classes j of weight[label] * max(0, margin - input[label] + input[j])^p."""

    _function = staticmethod(F.multi_margin_loss)

    def __init__(
        self,
        p: int = 1,
        margin: float = 1.0,
        weight: Any = None,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(name, p=p, margin=margin, weight=weight, reduction=reduction)


class MultiLabelMarginLoss(_Loss):
    """Sum over labels y and other classes j of max(0, 1 - input[y] + input[j]), over the number of classes."""

    _function = staticmethod(F.multi_label_margin_loss)

    def __init__(self, reduction: str = "mean", name: str | None = None) -> None:
        super().__init__(name, reduction=reduction)
