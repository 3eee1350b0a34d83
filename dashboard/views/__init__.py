"""The views of the dashboard; each module has one function that draws it."""
