"""Several engines behind one address."""
