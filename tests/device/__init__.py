"""Tests of polyreme.device and polyreme.cuda."""
