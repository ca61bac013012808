"""Pages of a lab in the browser: runs, a run, comparisons and the cluster, served on 127.0.0.1 while `labctl ui` runs."""
