"""Every stage that touches the paged cache, three times: to read (float64), to trust (torch), to
run (Triton).
"""
