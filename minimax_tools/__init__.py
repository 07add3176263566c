"""What every host needs."""
