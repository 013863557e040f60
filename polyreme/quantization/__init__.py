"""Models that compute as if in few bits: trained so, or measured and converted afterwards."""

from polyreme.module_names import suggest_names
from polyreme.quantization import observers, quanters
from polyreme.quantization.config import QuantConfig
from polyreme.quantization.factory import quanter
from polyreme.quantization.quanter import BaseObserver, BaseQuanter
from polyreme.quantization.quantize import PTQ, QAT

__all__ = ["PTQ", "QAT", "BaseObserver", "BaseQuanter", "QuantConfig", "observers", "quanter", "quanters"]

suggest_names(__name__)
