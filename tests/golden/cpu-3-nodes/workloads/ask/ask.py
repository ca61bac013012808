"""The run is only rendered."""
