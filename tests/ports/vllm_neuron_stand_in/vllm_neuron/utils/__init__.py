"""Stand-in for the plugin's loading of weights."""
