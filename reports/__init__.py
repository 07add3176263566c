"""Results drawn for people and machines."""
