"""Several LoRAs beside one linear map, of which each row of a batch takes one or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Linear
from polyreme.nn.layers.quantized import QuantizedLinear
from polyreme.ops import creation


class AdapterRows:
    """Which of several adapters each row of a batch takes, shared by all layers of a model.

    names: of the adapters, whose numbers are 1, 2, ...; 0 is none. Raises ConfigError for a name that comes twice.
    """

    numbers: dict[str, int]

    def __init__(self, names: Sequence[str]) -> None:
        self.numbers = {name: number for number, name in enumerate(names, 1)}
        if len(self.numbers) < len(names):
            raise ConfigError(f"adapters {', '.join(names)}: give each a name of its own")
        self._rows: dict[int, Tensor] = {}

    def check(self, name: str | None) -> None:
        """Raises ConfigError for the name of no adapter."""
        if name is not None and name not in self.numbers:
            known = ", ".join(self.numbers)
            raise ConfigError(f"no adapter {name!r}{did_you_mean(name, self.numbers)}; there are {known}")

    def of(self, batch: int) -> Tensor:
        """The numbers of a batch of so many rows, int32 [batch]; always the same Tensor, which programs read."""
        if batch not in self._rows:
            self._rows[batch] = creation.zeros([batch], "int32")
        return self._rows[batch]

    def choose(self, names: Sequence[str | None]) -> None:
        """Say which adapter each row takes of the next batch of so many rows."""
        numbers = [0 if name is None else self.numbers[name] for name in names]
        self.of(len(numbers)).set_value(np.array(numbers, np.int32))


class RowwiseLoRALinear(Layer):
    """base(x) + (x A) B for x [batch, seq, in], A and B those of the row's adapter; base(x) to the bit without one.

    a: [1 + adapters, in, rank], the scale in it. b: [1 + adapters, rank, out]. factors: [1 + adapters, out], what the
    columns of W + A B are multiplied by (DoRA, LoRALinear's magnitude over their lengths); None where no adapter has
    any. The first of each is that of rows without an adapter: zeros and ones. Adapters of a smaller rank have zeros
    beside them, so that one program serves any rows. Source: S-LoRA, arXiv:2311.03285, section 5.
    """

    base: Linear | QuantizedLinear
    rows: AdapterRows

    def __init__(
        self,
        base: Linear | QuantizedLinear,
        rows: AdapterRows,
        a: np.ndarray,
        b: np.ndarray,
        factors: np.ndarray | None = None,
    ) -> None:
        super().__init__(dtype=base._dtype)
        self.base, self.rows = base, rows
        self.register_buffer("lora_a", to_tensor(a, self._dtype))
        self.register_buffer("lora_b", to_tensor(b, self._dtype))
        self.register_buffer("factors", None if factors is None else to_tensor(factors, self._dtype))

    def forward(self, input: Any) -> Any:
        numbers = self.rows.of(input.shape[0])
        out = self.base(input)
        change = input.matmul(self.lora_a[numbers]).matmul(self.lora_b[numbers])
        if self.factors is None:
            return out + change
        factor = self.factors[numbers].unsqueeze(1)
        product = out if self.base.bias is None else out - self.base.bias
        return out + (factor - 1) * product + factor * change

    def extra_repr(self) -> str:
        return f"adapters={len(self.rows.numbers)}, rank={self.lora_a.shape[-1]}"
