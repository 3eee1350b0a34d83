"""Policies: the scheduler core (`zlab.policies.core`), the choices that steer it, and their
registry.
"""
