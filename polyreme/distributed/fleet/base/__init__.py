"""Strategy, topology and roles."""
