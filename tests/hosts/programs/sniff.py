"""Listens on every interface of a host, as a program on the wire would, until its stdin ends.

Usage: sniff.py WORD... ; words are hex digits. It prints how many bytes went by, and in how many packets each
word was found.
"""

import json
import select
import socket
import sys

ALL_PROTOCOLS = socket.htons(3)

words = [bytes.fromhex(word) for word in sys.argv[1:]]
found = dict.fromkeys(sys.argv[1:], 0)
total = 0
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, ALL_PROTOCOLS)
sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: so that nothing is missed
print("listening", flush=True)
while True:
    ready, _, _ = select.select([sock, sys.stdin], [], [])
    if sock in ready:
        packet = sock.recv(1 << 17)
        total += len(packet)
        for name, word in zip(found, words):
            found[name] += word in packet
    elif not sys.stdin.buffer.read(1):
        break
print(json.dumps({"bytes": total, "found": found}))
