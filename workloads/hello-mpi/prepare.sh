#!/bin/bash
# Compile hello_mpi.c with this node's own MPI, unless the program that is there came of this very source and compiler.
set -euo pipefail
directory=$HOME/.cache/labctl/hello-mpi
mkdir -p "$directory"
made_of=$({ cat hello_mpi.c; command -v mpicc; mpicc -show; mpicc --version; } | sha256sum)
[[ -x $directory/hello_mpi && $(cat "$directory/made-of" 2>/dev/null) == "$made_of" ]] && exit
echo "compiling hello_mpi.c with $(command -v mpicc)"
mpicc -O2 -Wall -o "$directory/hello_mpi.new" hello_mpi.c
mv "$directory/hello_mpi.new" "$directory/hello_mpi"
echo "$made_of" > "$directory/made-of"
