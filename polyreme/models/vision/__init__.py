"""Families that see pictures, alone or beside texts, a file each."""
