"""Tests of polyreme.recipes."""
