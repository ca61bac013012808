"""Batches: runs of a workload on the nodes of hostfiles: hostfile sets, scheduler, evaluation, bisection."""
