"""Workloads (what goes in) and recordings (what comes out)."""
