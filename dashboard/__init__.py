"""What happened, seen: figures and views of recordings, and nothing else decides anything here."""
