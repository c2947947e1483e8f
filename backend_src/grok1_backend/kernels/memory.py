"""How the memory that weights lie in is asked for."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment of a process whose large arrays lie in pages of 2 MB, where Linux gives them to who
asks (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise`). A decode step reads all of its
weights once, and with pages of 4 KB much of the time goes into finding them. glibc reads it when a
process starts, so the process that starts the server gives it."""
