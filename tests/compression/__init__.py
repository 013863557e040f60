"""Tests of polyreme.compression."""
