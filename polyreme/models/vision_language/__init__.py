"""Families that read pictures and text and write text: a tower of vision before a decoder."""
