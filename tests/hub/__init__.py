"""Tests of polyreme.hub."""
