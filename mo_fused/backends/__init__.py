"""One module a backend: (table, rows) -> one call. Which one runs is decided in mo_fused/dispatch.py."""
