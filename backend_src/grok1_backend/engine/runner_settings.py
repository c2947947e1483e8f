"""What an operator sets about the device side of the engine: slots, pages, buckets, mesh."""

from __future__ import annotations

from dataclasses import dataclass

from grok1_backend.model.config import GrokConfig


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """The `[runner]` table. Every combination of buckets is compiled before the model is ready."""

    num_slots: int = 8
    """Rows of the decode batch: requests that generate at the same time."""
    page_size: int = 64
    """KV positions in a page."""
    num_pages: int | None = None
    """Pages in the pool; None: enough for every slot's full context, and where a device tells its
    memory, all that fit."""
    prefill_tokens: tuple[int, ...] = (32, 128, 512)
    """Prefill buckets: padded lengths of a chunk, ascending."""
    prefill_rows: tuple[int, ...] = (1, 4)
    """Prefill buckets: padded numbers of prompts in one chunk, ascending, of decode_rows."""
    decode_rows: tuple[int, ...] = (1, 4, 8)
    """Decode buckets: padded numbers of active slots, ascending; the last is num_slots."""
    dtype: str = "float32"
    """Of activations and KV: float32 or bfloat16."""
    embedding: str = "float32"
    """The embedding table in memory: float32 as released, or int8 with a scale a row."""
    model_shards: int = 1
    """Devices that share one copy of the parameters; 0: all that are visible."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1")
        if self.num_pages is not None and self.num_pages < 1:
            raise ValueError(f"num_pages is {self.num_pages}: at least 1")
        for name in ("prefill_tokens", "prefill_rows", "decode_rows"):
            buckets = getattr(self, name)
            if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name} is {list(buckets)}: ascending numbers of at least 1")
        if self.decode_rows[-1] != self.num_slots:
            raise ValueError(
                f"decode_rows is {list(self.decode_rows)}: "
                f"the last one must be num_slots ({self.num_slots})"
            )
        if self.prefill_rows[0] != 1:
            raise ValueError(
                f"prefill_rows is {list(self.prefill_rows)}: "
                "the first one must be 1: prompts are scored one at a time"
            )
        if not set(self.prefill_rows) <= set(self.decode_rows):
            raise ValueError(
                f"prefill_rows is {list(self.prefill_rows)}: each one must be in "
                f"decode_rows ({list(self.decode_rows)}), which the sampler is compiled for"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}: float32 or bfloat16")
        if self.embedding not in ("float32", "int8"):
            raise ValueError(f"embedding is {self.embedding!r}: float32 or int8")
        if self.model_shards < 0:
            raise ValueError(f"model_shards is {self.model_shards}: at least 0")

    def with_slots(self, num_slots: int) -> RunnerSettings:
        """The same with another number of slots, the row buckets cut or extended to it."""
        decode_rows = (*(rows for rows in self.decode_rows if rows < num_slots), num_slots)
        prefill_rows = tuple(rows for rows in self.prefill_rows if rows in decode_rows)
        return RunnerSettings(
            **{
                **self.__dict__,
                "num_slots": num_slots,
                "decode_rows": decode_rows,
                "prefill_rows": prefill_rows or decode_rows[:1],
            }
        )

    def pages_for(self, config: GrokConfig) -> int:
        """Pages in the pool."""
        per_slot = -(-config.sequence_len // self.page_size)
        return self.num_pages if self.num_pages is not None else per_slot * self.num_slots


def bucket(value: int, buckets: tuple[int, ...]) -> int:
    """The least bucket that holds `value`.

    Raises:
      ValueError: none does.
    """
    for size in buckets:
        if value <= size:
            return size
    raise ValueError(f"{value} is more than the largest bucket ({buckets[-1]})")
