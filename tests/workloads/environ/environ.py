"""Write a digest of each variable and of the hub's token; `--tell A,B` prints some, as careless scripts do.

`--end crash` ends with a traceback that holds them, `--end hang` not at all.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
seen = {os.fsdecode(name): value for name, value in os.environb.items()}
if "HF_TOKEN_PATH" in os.environ:
    seen["the file at HF_TOKEN_PATH"] = Path(os.environ["HF_TOKEN_PATH"]).read_bytes()
told = {name: os.fsdecode(seen[name]) for name in filter(None, arguments.get("--tell", "").split(","))}
for name, value in told.items():
    print(f"{name} is {value}")
    if "://" in value:
        print(f"its password is {unquote(urlsplit(value).password or '')}")
digests = {name: hashlib.sha256(value).hexdigest() for name, value in seen.items()}
run = Path(os.environ["LABCTL_RUN_DIR"])
Path(run, f"environ-{os.environ['RANK']}.json").write_text(json.dumps(digests), encoding="utf-8")
if arguments.get("--end") == "crash":
    raise RuntimeError(f"refused: {' '.join(told.values())}")
if arguments.get("--end") == "hang":
    print("it goes on", flush=True)
    time.sleep(600)
