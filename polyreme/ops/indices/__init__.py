"""Reading and writing parts of a Tensor: elements at indices or under a mask, and Python index expressions."""
