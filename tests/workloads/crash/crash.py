"""Exit with code 7 on rank 1; the other ranks sleep."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(600)
