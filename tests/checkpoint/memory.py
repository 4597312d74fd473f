"""How much anonymous memory a piece of code takes at its peak, measured in a process of its own."""

import os
import subprocess
import sys
import textwrap

_FRAME = """
import threading, time
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
{setup}
peak, stop = [0], threading.Event()
def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)
start = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
{body}
peak[0] = max(peak[0], anonymous())
stop.set()
watcher.join()
print(peak[0] - start)
"""


def peak_anonymous_bytes(setup: str, body: str) -> int:
    """Peak of the anonymous resident memory while ``body`` runs, above what it was after ``setup``. Linux only."""
    code = _FRAME.format(setup=textwrap.dedent(setup), body=textwrap.dedent(body))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
