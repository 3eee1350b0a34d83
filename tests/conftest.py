"""Pytest settings shared by every room."""

from hypothesis import settings

settings.register_profile("zlab", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("zlab")
