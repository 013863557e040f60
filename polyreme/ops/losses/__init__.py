"""Losses: between arrays of one shape, over classes, and over alignments of sequences."""
