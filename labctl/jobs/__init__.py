"""Job of a run: its options, its code and inputs, its launch command, and the script of its ranks."""
