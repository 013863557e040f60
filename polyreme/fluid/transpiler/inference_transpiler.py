"""InferenceTranspiler: what fused Programs for inference."""

from __future__ import annotations

from typing import Any

from polyreme.program.program import Program


class InferenceTranspiler:
    """Fused batch norms into convolutions; XLA does so where it compiles, so there is nothing to do."""

    def transpile(self, program: Program, place: Any, scope: Any = None) -> None:
        """Leave the Program as it is; its results are those of the fused one."""


__all__ = ["InferenceTranspiler"]
