"""Block-native KV-cache compaction: plan, move and retain KV blocks, per layer, exactly.

The public names are those of `api.py`, loaded at the first use of one of them: what needs no JAX,
as most of the command line, does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # A checker knows the names, and no others.
    from .api import *  # noqa: F403  # the one list of names
else:

    def __getattr__(name: str) -> Any:
        is_private = name.startswith("_") and name != "__all__"  # `import *` asks for `__all__`
        if not is_private:
            api = import_module(".api", __name__)
            if name == "__all__" or name in api.__all__:
                return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module(".api", __name__).__all__})
