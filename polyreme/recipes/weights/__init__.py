"""Models that runs begin with and leave: fresh, published, trained, tuned, merged."""
