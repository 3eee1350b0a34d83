"""Figures and views of recordings. The dashboard reads; it takes no scheduling decision."""
