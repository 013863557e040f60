"""Bytes as text, by the name that the planner has for it."""

from polyreme.units import bytes_text

__all__ = ["bytes_text"]
