"""Tests of polyreme.utils."""
