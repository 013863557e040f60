"""Set-up of the engine: jax and XLA configured once, plugins loaded, compiled programs kept in bounds, forks seen."""
