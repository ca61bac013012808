"""Reports of runs and validations: HTML pages in one file each, which need no network."""
