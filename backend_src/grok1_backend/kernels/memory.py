"""How the memory that weights lie in is asked for."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment of a process whose large arrays lie in pages of 2 MB from the start, where Linux
gives them to who asks (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise`) and glibc is
2.35 or newer. The bench gives it to every engine; ours moves its weights and pages of KV there in
any case (`engine/huge_pages.py`)."""
