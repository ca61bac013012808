"""The record of a run: its directory, its lines, its metrics."""
