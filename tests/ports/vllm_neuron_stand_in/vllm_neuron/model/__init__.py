"""Stand-in for the plugin's models."""
