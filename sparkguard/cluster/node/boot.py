"""The first text that a node runs: it makes modules of the texts that follow on its stdin, and starts one.

`reader` is the buffered stdin, put there by the command line that read this text. Python 3.8 and its standard library.
"""

import json
import sys
import types

if sys.version_info < (3, 8):  # noqa: UP036  a node's is its own
    sys.exit("its python3 is {}.{}, and 3.8 or newer is needed".format(*sys.version_info))
order = json.loads(reader.read(int(reader.readline())))  # type: ignore[name-defined]  # noqa: F821
secret = reader.read(order["secret_bytes"])  # type: ignore[name-defined]  # noqa: F821

for name, text in order["modules"]:
    parts = name.split(".")
    for count in range(1, len(parts)):
        parent = ".".join(parts[:count])
        if parent not in sys.modules:
            sys.modules[parent] = types.ModuleType(parent)
            sys.modules[parent].__path__ = []
    module = types.ModuleType(name)
    sys.modules[name] = module
    setattr(sys.modules[name.rpartition(".")[0]], parts[-1], module)
    exec(compile(text, name, "exec"), module.__dict__)

sys.modules["sparkguard.cluster.node.base"].begin(order, secret)
