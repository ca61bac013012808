"""A part of an example, and none by itself."""
