"""Tests of polyreme.compat."""
