"""Programs that PaddlePaddle saved for inference (.pdmodel with .pdiparams): read, checked, and run by the ops here."""

from polyreme.paddle_models.description import PaddleVariable
from polyreme.paddle_models.program import PaddleProgram, read_program

__all__ = ["PaddleProgram", "PaddleVariable", "read_program"]
