"""Stand-in for vLLM."""
