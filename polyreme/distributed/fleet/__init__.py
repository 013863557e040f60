"""fleet: hybrid parallelism as the public API spells it."""
