"""Decoupled: centers that are programs of their own, and exchange outer gradients without waiting for a slow one."""
