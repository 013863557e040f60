"""Passes: small pure functions that make another Program of a Program, and the table of them (static.passes)."""
