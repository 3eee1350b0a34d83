"""Batched sampling on the device."""
