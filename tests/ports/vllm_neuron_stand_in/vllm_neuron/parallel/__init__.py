"""Stand-in for the plugin's groups."""
