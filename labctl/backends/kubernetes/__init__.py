"""A lab's job as Kubernetes objects: the same workload, launcher and image as on Docker hosts."""
