"""Tensors on a mesh: placements, what is stored, rules for what ops give, functions of one device's part."""
