"""A Docker Compose lab for distributed training."""

__version__ = "1.0.0"
