"""Engine, DistModel and Strategy: a model with its loss and optimizer over all devices."""
