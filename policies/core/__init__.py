"""The scheduler core: no clock, no event loop, no tensors, no I/O."""
