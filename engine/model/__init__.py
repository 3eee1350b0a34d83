"""Models: shapes, layers, weights and how they are loaded."""
