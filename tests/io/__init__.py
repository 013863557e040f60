"""Tests of polyreme.io."""
