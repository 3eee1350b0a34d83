"""Figures as pure functions of recordings; they need no browser."""
