"""Stand-in for vLLM's groups of ranks."""
