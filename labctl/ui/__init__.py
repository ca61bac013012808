"""Pages of a lab in the browser, served on 127.0.0.1 while `labctl ui` runs: runs, comparisons and the cluster."""
