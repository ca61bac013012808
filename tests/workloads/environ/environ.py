"""Leaves a digest of every variable and of the hub's token; `--tell A,B` prints some, as careless scripts do."""

import hashlib
import json
import os
import sys
from pathlib import Path

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
seen = {os.fsdecode(name): value for name, value in os.environb.items()}
if "HF_TOKEN_PATH" in os.environ:
    seen["the file at HF_TOKEN_PATH"] = Path(os.environ["HF_TOKEN_PATH"]).read_bytes()
for name in filter(None, arguments.get("--tell", "").split(",")):
    print(f"{name} is {os.fsdecode(seen[name])}")
digests = {name: hashlib.sha256(value).hexdigest() for name, value in seen.items()}
run = Path(os.environ["LABCTL_RUN_DIR"])
Path(run, f"environ-{os.environ['RANK']}.json").write_text(json.dumps(digests), encoding="utf-8")
