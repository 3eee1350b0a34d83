"""The mechanism every policy steers: no clock, no loop, no tensor, no I/O."""
