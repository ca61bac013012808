"""The job of a run: its options, its code and inputs, its launch command, and what its ranks execute."""
