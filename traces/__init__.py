"""Where requests come from, and what a run leaves behind."""
