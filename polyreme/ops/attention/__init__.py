"""Attention: of whole arrays, packed rows and caches, with gates, and over devices that split the sequence."""
