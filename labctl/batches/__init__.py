"""Many runs of a workload, each on the nodes of a hostfile: sets, scheduler, evaluation, bisect."""
