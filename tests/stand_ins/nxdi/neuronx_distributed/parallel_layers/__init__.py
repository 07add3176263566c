"""Layers that ranks divide."""
