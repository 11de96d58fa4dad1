"""Who moves the bytes. A transport has a size, a rank, and moves rows of bytes. It asks nothing of a codec."""
