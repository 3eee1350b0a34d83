"""Speed, measured; nothing here is a test."""
