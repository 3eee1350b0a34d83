"""Figures as pure functions of recordings: what they show is decided here, before a browser sees anything."""
