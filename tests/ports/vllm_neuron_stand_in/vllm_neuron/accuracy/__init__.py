"""Stand-in for the plugin's accuracy tools."""
