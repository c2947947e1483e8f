"""`grok1-backend plan`: prints what fits in the memory of the devices, without any."""

from __future__ import annotations

import argparse
import re

from grok1_backend.engine.build import ModelDirectory
from grok1_backend.engine.memory_plan import MemoryPlan, advice, plan_memory, shown
from grok1_backend.errors import UserError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{prefix}IB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """`80GiB`, `141GB`, `85899345920`.

    Raises:
      ValueError: it is no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match and (unit := match[2].upper()) in _UNITS:
        size = float(match[1]) * _UNITS[unit]
        if size >= 1:
            return int(size)
    raise ValueError(f"{text!r} is no size of a memory: such as 80GiB or 141GB")


def describe(plan: MemoryPlan, title: str) -> str:
    """The plan as a table."""
    rows = [(part.name, shown(part.nbytes), part.source) for part in plan.parts]
    rows.append(("left for KV", shown(plan.left), "what remains"))
    rows.append(("one page of KV", shown(plan.page.nbytes), plan.page.source))
    rows += [(f"  {step.name}", shown(step.nbytes), step.source) for step in plan.buckets]
    name_width, size_width = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{name:<{name_width}}  {size:>{size_width}}  {source}" for name, size, source in rows]
    table, steps = lines[: -len(plan.buckets)], lines[-len(plan.buckets) :]
    contexts = plan.pages // plan.context_pages
    length = plan.context_pages * plan.page_size
    return "\n".join(
        [
            title,
            "on each device:",
            *table,
            "activations of each step:",
            *steps,
            f"fits: {plan.pages} pages = {plan.pages * plan.page_size} tokens of context "
            f"= {contexts} slots with a full context of {length}",
            f"asked for: {plan.wanted_pages} pages = {plan.wanted_pages * plan.page_size} tokens "
            f"({shown(plan.wanted_pages * plan.page.nbytes)})",
        ]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a published config, or a file")
    parser.add_argument(
        "--devices", type=int, required=True, help="devices that share the parameters"
    )
    parser.add_argument("--memory", required=True, help="of each device: 80GiB, 141GB")


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan.

    Raises:
      UserError: an argument is wrong, or it does not fit: what to change.
    """
    try:
        directory = ModelDirectory.read(arguments.config)
        memory = parse_bytes(arguments.memory)
        if arguments.devices < 1:
            raise ValueError(f"--devices is {arguments.devices}: at least 1")
        plan = plan_memory(directory.config, directory.runner, arguments.devices, memory)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    title = (
        f"{arguments.config} on {arguments.devices} devices of {shown(memory)}, "
        f"{directory.runner.dtype}, weights as released"
    )
    print(describe(plan, title))
    if not plan.fits:
        raise UserError(advice(plan, directory.config, directory.runner, arguments.devices))
