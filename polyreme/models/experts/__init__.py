"""Families of decoders whose feed-forward is a choice of experts, a file each."""
