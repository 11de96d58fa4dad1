"""Training steps: how every rank's gradients are found, exchanged and applied."""
