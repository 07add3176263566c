"""Models on their way to a device."""
