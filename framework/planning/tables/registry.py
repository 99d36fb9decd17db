"""Every table by its id: what the modules of this package have in their TABLES."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from counterflow.framework.planning import tables
from counterflow.framework.planning.tables.table import PublishedTable


@cache
def all_tables() -> Mapping[str, PublishedTable]:
    modules = [
        import_module(f"{tables.__name__}.{each.name}") for each in pkgutil.iter_modules(tables.__path__)
    ]
    found = [table for module in modules for table in getattr(module, "TABLES", ())]
    return MappingProxyType({table.id: table for table in found})


def tables_named(name: str) -> tuple[PublishedTable, ...]:
    """The table `name`, or with `all` every one.

    Raises ValueError: there is none.
    """
    known = all_tables()
    if name == "all":
        return tuple(known.values())
    if name not in known:
        raise ValueError(f"table={name}: no such table; choose all or one of {', '.join(known)}")
    return (known[name],)
