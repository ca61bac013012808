"""A Docker Compose lab for distributed training."""
