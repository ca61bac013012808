"""Prints nothing that anybody looks for."""
