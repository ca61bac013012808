"""Print rank, arguments and environment; `--answer` sets the number."""

import os
import sys

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
print(f"rank {os.environ['RANK']} arguments {sys.argv[1:]!r} uid {os.getuid()}")
for name in filter(None, arguments.get("--print", "").split(",")):
    print(f"{name}={os.environ.get(name)!r}")
print(f"answer {arguments.get('--answer', '42')}")
