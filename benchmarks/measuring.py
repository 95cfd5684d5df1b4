"""What several benchmarks measure with."""

import os
import time


# Begins a process that measures its own anonymous memory.
WATCH = """
import json, sys, threading, time
import torch, transformers

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

start = peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
"""


def timed(job, *arguments, **options) -> float:
    os.sync()  # what an earlier repetition left to write must not be charged to this one
    started = time.perf_counter()
    job(*arguments, **options)
    return time.perf_counter() - started
