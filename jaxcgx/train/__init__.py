"""Training steps: how every rank's gradients are found, exchanged and applied.

A step has five rooms, which loop.py makes: step.py (jit, donation, the order of the others), division.py (the part of
the batch and of the parameters that a rank has), gradient.py, exchange.py and update.py.
"""
