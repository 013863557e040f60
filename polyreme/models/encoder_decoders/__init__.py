"""Families that write a text about another text or a sound, a file each."""
