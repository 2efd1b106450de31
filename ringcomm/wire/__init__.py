"""Bytes on the wire, without any I/O: handshake, control frames, message headers."""
