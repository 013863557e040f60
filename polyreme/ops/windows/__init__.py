"""Ops over sliding windows: convolution and pooling."""
