"""Mixtures of experts: routing, what experts compute, and how tokens reach experts on other devices."""
