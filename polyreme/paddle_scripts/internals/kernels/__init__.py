"""What paddle._C_ops calls where a kernel's arguments come in another order than the public function's, by area.

A kernel takes its arguments by position in PaddlePaddle's order and returns as many values as PaddlePaddle's; one that
is only for its own backward is None.
"""
