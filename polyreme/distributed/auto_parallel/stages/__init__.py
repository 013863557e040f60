"""Plain models cut into pipeline stages.

Floor: 5.
"""
