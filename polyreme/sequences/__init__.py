"""Sequences of different lengths in one array with offsets beside it: LoDTensor, how they travel through a Program,
and layer functions on them."""
