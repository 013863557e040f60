"""Profiles of the steps of a run, as tables and pictures."""
