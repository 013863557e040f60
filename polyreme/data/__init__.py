"""Training data on disk: tokens in files, how they are prepared, mixed and packed. Nothing here loads jax."""
