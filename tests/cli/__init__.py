"""Tests of polyreme.cli."""
