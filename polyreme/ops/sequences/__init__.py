"""Ops on ragged rows: sequences of different lengths, one after the other in one array."""
