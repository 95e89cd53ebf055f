"""An import-linter contract for direct imports by pattern, with exceptions.

Patterns name a module and everything below it; a trailing `*` also matches names with that prefix. Modules that are
added later are covered without being listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class DirectImports(Contract):
    """Forbids `importers`, except `except_importers`, to import `imported`, except `except_imported`."""

    type_name = "direct"

    importers: Any = fields.ListField(subfield=fields.StringField())
    except_importers: Any = fields.ListField(subfield=fields.StringField(), required=False, default=[])
    imported: Any = fields.ListField(subfield=fields.StringField())
    except_imported: Any = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        """List the imports that break the rule, with their lines."""
        broken = []
        for importer in sorted(graph.modules):
            if not covered(importer, self.importers, self.except_importers):
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if covered(imported, self.imported, self.except_imported):
                    details = graph.get_import_details(importer=importer, imported=imported)
                    broken.append((importer, imported, [detail["line_number"] for detail in details]))
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print one line per import."""
        for importer, imported, lines in check.metadata["broken"]:
            output.print_error(f"{importer} imports {imported} (line {', '.join(map(str, lines))})")


def covered(module: str, patterns: Sequence[str], exceptions: Sequence[str]) -> bool:
    """Return whether a pattern matches the module and no exception does."""
    return _named(module, patterns) and not _named(module, exceptions)


def _named(module: str, patterns: Sequence[str]) -> bool:
    parents = [module.rsplit(".", depth)[0] for depth in range(module.count(".") + 1)]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in parents)
