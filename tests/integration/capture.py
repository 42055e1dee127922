"""Writes all packets of a network interface to a file, each with its size, until it is ended.

python capture.py INTERFACE FILE. It imports nothing of ours, and so begins at once.
"""

import socket
import struct
import sys

SO_RCVBUFFORCE, ETH_P_ALL = 33, 3

if __name__ == "__main__":
    interface, path = sys.argv[1:]
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as tap, open(path, "wb", 0) as file:
        tap.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        tap.bind((interface, ETH_P_ALL))
        while True:
            packet = tap.recv(1 << 17)
            file.write(struct.pack("I", len(packet)) + packet)
