"""Scorers: what a compression keeps. One file is one scorer, named as a policy names it."""
