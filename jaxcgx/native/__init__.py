"""The interface to C++: the primitives, their registration, and the same arithmetic in jnp."""
