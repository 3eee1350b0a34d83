"""The pages of the dashboard; each has one function that draws it."""
