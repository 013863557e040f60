"""Families that read a text, or an alignment of proteins, a file each."""
