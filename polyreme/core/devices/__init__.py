"""Devices: places, those that are absent, memory by part, and arrays on their way to a device."""
