"""The simulator: a virtual clock, the cost of each step, and tools that run and compare
simulations.
"""
