"""The checks of doctor, by what they look at. Each is a function of a CheckContext that yields findings."""
