"""Many runs of a workload, each on the nodes of a hostfile: hostfile sets, scheduler, evaluation, bisection."""
