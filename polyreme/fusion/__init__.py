"""Patterns of calls that one other call replaces: the table, and how they are found. Programs and captures read it."""
