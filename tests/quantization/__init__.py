"""Tests of polyreme.quantization."""
