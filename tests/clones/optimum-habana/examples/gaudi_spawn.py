"""A launcher: it lies in no folder, so it is no example."""

if __name__ == "__main__":
    pass
