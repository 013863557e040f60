"""What models of several kinds are of: caches, positions, and the frames of decoders, encoders and both together."""
