"""Python runs this at its start, with this folder on PYTHONPATH. It replaces a module by the file JAXCGX_MUTANT names.

It does so in the processes that tests start, too.
"""

import os
import sys

if given := os.environ.get("JAXCGX_MUTANT"):  # MODULE=PATH
    module, _, path = given.partition("=")
    for finder in sys.meta_path:  # that of the editable install
        if module in getattr(finder, "known_source_files", ()):
            finder.known_source_files = {**finder.known_source_files, module: path}
