#!/bin/bash
# What every rank runs: the program that prepare.sh made.
exec "$HOME/.cache/labctl/hello-mpi/hello_mpi"
