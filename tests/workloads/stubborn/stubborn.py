"""Run forever, ignore TERM and INT, and start an equal child in its own session."""

import os
import signal
import subprocess
import sys
import time

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
    print(f"rank {os.environ['RANK']} does not listen", flush=True)
time.sleep(600)
