"""Checks of doctor, by subject. Each is a function of a CheckContext that yields findings."""
