"""The interface to C++: the primitives, their registration, and the same arithmetic in jnp."""

import pathlib
import sys

# Whether this process is the command line: `python -m jaxcgx`, whose import of the package comes while Python still
# looks for the module, or the script `jaxcgx`. Its help needs no JAX, and its doctor no native module.
_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "jaxcgx"
COMMAND: bool = _module or pathlib.Path(*sys.argv[:1]).name == "jaxcgx"
