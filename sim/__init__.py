"""The virtual clock: a SimPy GPU that carries out what the scheduler plans."""
