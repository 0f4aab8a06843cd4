"""Writes to machines' disks over NBD until it is ended: traffic.py SOCKET... One block to each disk in each round of a second.

Prints "writing" when every disk has been written to once.
"""
import sys
import time

import nbd

BLOCK = 4096

disks = []
for socket in sys.argv[1:]:
    disk = nbd.NBD()
    disk.connect_uri(f"nbd+unix:///?socket={socket}")
    disks.append(disk)

turn = 0
while True:
    started = time.monotonic()
    for number, disk in enumerate(disks):
        # Every disk has its own place, so that their figures differ.
        at = (turn * (1 + number % 7)) % (disk.get_size() // BLOCK) * BLOCK
        disk.pwrite(bytes([turn % 256]) * BLOCK, at)
    if turn == 0:
        print("writing", flush=True)
    turn += 1
    time.sleep(max(0.0, 1 - (time.monotonic() - started)))
