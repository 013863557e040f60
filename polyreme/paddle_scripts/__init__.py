"""Running scripts written for PaddlePaddle: `import paddle` gives polyreme, in one process and in those it starts."""

from polyreme.paddle_scripts.finder import as_paddle

__all__ = ["as_paddle"]
