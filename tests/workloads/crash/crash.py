"""Rank 1 ends with code 7; the others would sleep on."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(600)
