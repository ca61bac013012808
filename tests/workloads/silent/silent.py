"""Print nothing that matches a metric."""
