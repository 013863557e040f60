"""Programs that PaddlePaddle saved for inference (.pdmodel with .pdiparams): read, checked, and run by the ops here."""

from polyreme.paddle_models.description import PaddleVariable
from polyreme.paddle_models.pir import is_pir
from polyreme.paddle_models.program import PaddleProgram, read_program

__all__ = ["PaddleProgram", "PaddleVariable", "is_pir", "read_program"]
