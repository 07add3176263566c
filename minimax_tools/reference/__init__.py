"""The reference layer."""
