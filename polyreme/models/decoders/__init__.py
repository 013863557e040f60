"""Families that write the next token, a file each."""
