"""Tensor parallelism: layers split over `mp`, their random streams, and sequences split between them."""
