"""Loop forever on rank 1 after the fifth step; the other ranks wait."""

import os
import time


def lose_count() -> None:
    """Loop for ever."""
    while True:
        pass


def wait_for_others() -> None:
    time.sleep(600)


for step in range(1, 6):
    print(f"step {step}/50", flush=True)
    time.sleep(0.1)
lose_count() if os.environ["RANK"] == "1" else wait_for_others()
