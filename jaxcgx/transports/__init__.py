"""Transports, which move the bytes. A transport has a size and a rank, and moves rows of bytes. It reads no codec."""
