"""Plain models cut into pipeline stages."""
