"""Tables of the record, by the name that a page's marker gives.

tables.yaml has the tables whose rows are chosen by hand.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.figures import flat, value_of
from benchmarks.layout import markdown
from benchmarks.losses import pairs, ratio
from benchmarks.pictures import LOSSES, MACHINE, NAMES
from benchmarks.record import Record
from benchmarks.speed.sizes import MODELS, work_of
from gpt2_triton import kernels
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.console import format_count
from gpt2_triton.model.arena import GIB
from gpt2_triton.model.memory_plan import plan_memory

Table = Callable[[Record], str]
Group = dict[tuple[str, str], dict[str, Any]]  # (size, arm): figures by name


# Loss per factor e of tokens, from runs with 77%, 80% or 60% of the steps; 0.26,
# 0.223, 0.511 are -ln of these
LARGE = (
    "(losses.arms.scale.L3_muon_steps_of_524k_77.val - "
    "losses.arms.scale.L3_muon_240M_steps_of_524k.val) / 0.26"
)
MUON = "(losses.arms.muon_d12.best_muon_80.val - losses.arms.muon_d12.best_muon.val) / 0.223"
HALF = "losses.arms.muon_d12.best_muon_half_the_batch"
PRICES = {  # row of the table: arm in fp8, loss per factor e of tokens if it is known
    "124M, Muon, 524k tokens a step": ("scale.L3_muon_240M_steps_of_524k_fp8", LARGE),
    "124M, Muon, 131k tokens a step": ("fp8_131k.fp8", MUON),
    "124M, Muon, 65k tokens a step, head in bf16": (
        "fp8_d12.muon_fp8",
        f"({HALF}_60.val - {HALF}.val) / 0.511",
    ),
    "124M, AdamW, 65k tokens a step, head in bf16": (
        "fp8_d12.fp8",
        "losses.pairs.fp8_d12.bf16_80.val.mean / 0.223",
    ),
    "1558M, AdamW, 16k tokens a step, head in bf16": ("fp8_d48.fp8_lr_8", ""),
    "Llama 114M, Muon, 131k tokens a step": ("llama_131k.llama_c768_fp8", ""),
    "Llama 114M, QK-norm, Muon, 131k tokens a step": ("modern.P_131k_fp8", ""),
}
SCALE = LOSSES / "scale.jsonl"
# of modded-nanogpt's GPT-2 to a loss of 3.28; what an hour of a GPU is taken to cost
ADAMW_TOKENS, DOLLARS = 6.44e9, 3.0
PACKAGES = ("torch", "triton", "tiktoken", "tokenizers", "transformers")  # in captions
COLUMNS = {  # name of a figure: head and format of its column
    "recompute": ("recompute", ""), "batch": ("B", ""), "ms": ("ms", ".1f"),
    "alone_ms": ("ms alone", ".1f"), "in_step_ms": ("ms in step", ".1f"),
    "together_ms": ("ms together", ".1f"), "tok_s": ("tokens/s", ",.0f"), "joules": ("J", ".1f"),
    "gib": ("GiB", ".1f"), "speed": ("speed", ".2f"), "of_alone": ("of alone", ".1%"),
    "cold_s": ("s, empty cache", ".1f"), "warm_s": ("s, filled cache", ".1f"),
    "compile_s": ("s of `compile`", ".1f"), "compiled_s": ("s after it", ".1f"),
}  # fmt: skip


def caption(meta: dict[str, Any]) -> str:
    gpus = "" if meta["gpus"] == 1 else f"{meta['gpus']} x "
    watts = f" at {meta['power_limit_w']:.0f} W" if meta["power_limit_w"] else ""
    return (
        f"{gpus}{meta['gpu']}{watts}, torch {meta['torch']}, "
        f"triton {meta['triton']}, commit {meta['commit']}."
    )


def group(section: dict[str, Any], kind: str) -> Group:
    """Return a kind's figures KIND.SIZE.ARM.NAME, (size, arm) in the order of NAMES;
    KIND.SIZE.NAME has the arm "".
    """
    found: Group = {}
    for key, value in section.items():
        if key.startswith(f"{kind}."):
            _, size, *rest = key.split(".", 3)
            arm, name = rest if len(rest) == 2 else ("", rest[0])
            found.setdefault((size, arm), {})[name] = value
    return dict(sorted(found.items(), key=lambda row: [*map([*NAMES].index, filter(None, row[0]))]))


def programs(section: dict[str, Any], *kinds: str) -> str:
    """Return a row for each size and program, and a column for each figure that a row has.

    `speed` is PyTorch's time divided by the program's; `of_alone` compares joint
    steps with the slowest GPU alone.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for kind in kinds:
        for (size, arm), found in group(section, kind).items():
            torch = section.get(f"{kind}.{size}.torch.ms", section.get(f"steps.{size}.torch.ms"))
            if torch and "ms" in found:
                found["speed"] = torch / found["ms"]
            together = section.get(f"{kind}.{size}.torch.together_ms")
            if together:
                found["speed"] = together / found["together_ms"]
            if "alone_ms" in found:
                found["of_alone"] = (
                    found.get("slowest_ms", found["alone_ms"]) / found["together_ms"]
                )
            if "absent" not in found:
                rows[size, arm or kind] = found
    columns = {
        name: column
        for name, column in COLUMNS.items()
        if any(name in found for found in rows.values())
    }
    cells = [
        [
            *map(NAMES.__getitem__, row),
            *shown(found, columns),
        ]
        for row, found in rows.items()
    ]
    return markdown(["model", "program", *(head for head, _ in columns.values())], cells)


def operations(section: dict[str, Any], kind: str) -> str:
    """Return a row for each operation of at least 0.05 ms, longest first, and two for the
    step: ms (floor), then ms / floor.
    """
    arms = group(section, kind)
    names = dict.fromkeys(
        n for found in arms.values() for n, ms in found.items() if n.endswith(".ms") and ms >= 0.05
    )
    rows = []
    for name in [
        *sorted(names, key=lambda name: -max(found.get(name, 0.0) for found in arms.values())),
        "ms",
    ]:
        both = [
            (found.get(name), found.get(name.removesuffix("ms") + "floor_ms"))
            for found in arms.values()
        ]
        cells = ["" if ms is None else f"{ms:.1f} ({least:.1f})" for ms, least in both]
        rows.append(["step" if name == "ms" else name.removesuffix(".ms"), *cells])
    shares = [f"{found['ms'] / found['floor_ms']:.2f}" for found in arms.values()]
    rows.append(["step / floor", *shares])
    return markdown(["ms (floor)", *(f"{NAMES[size]}, {NAMES[arm]}" for size, arm in arms)], rows)


def measured(
    table: Callable[..., str], *kinds: str, executed: bool = False, most: int | None = None
) -> Table:
    """Return a function that renders the table of each machine with figures of the first kind, or
    of the first `most` machines; `executed`: of each code of another GPU that a machine executed.
    """

    def tables(record: Record) -> str:
        of_kind = [name for name in record if name.endswith("_code") == executed]
        found = [record[name] for name in of_kind if group(record[name], kinds[0])]
        return "\n\n".join(
            f"{caption(section['meta'])}\n\n{table(section, *kinds)}" for section in found[:most]
        )

    return tables


def own_section(name: str, first: str, columns: dict[str, tuple[str, str]]) -> Table:
    """Return a function that renders the section `name`, whose keys are ROW.COLUMN; a column has
    a head and a format.
    """

    def table(record: Record) -> str:
        if name not in record:
            return ""
        section = dict(record[name])
        meta = section.pop("meta")
        rows: dict[str, dict[str, Any]] = {}
        for key, value in section.items():
            row, dot, column = key.partition(".")
            if dot:
                rows.setdefault(row, {})[column] = value
        cells = [
            [NAMES.get(row, row.replace("_", " ")), *shown(found, columns)]
            for row, found in rows.items()
        ]
        versions = [f"{key} {meta[key]}" for key in PACKAGES if key in meta]
        where = ", ".join([meta["gpu"] or f"{meta['cpus']} CPUs", *versions])
        heads = [head for head, _ in columns.values()]
        return f"{where}, commit {meta['commit']}.\n\n{markdown([first, *heads], cells)}"

    return table


def shown(found: dict[str, Any], columns: dict[str, tuple[str, str]]) -> list[str]:
    """Return a cell for each column, an empty one for a figure that is not there."""
    return [f"{found[name]:{form}}" if name in found else "" for name, (_, form) in columns.items()]


def memory(_: Record) -> str:
    """Return the planned GiB at each recompute level, for the smallest and the largest size."""
    arms = [
        (size, MODELS[size].batch, precision)
        for size in ("d12", "d48")
        for precision in ("bf16", "fp8")
    ]
    rows = []
    for level in RECOMPUTE_LEVELS:
        configs = [work_of(size, B, level, precision).config() for size, B, precision in arms]
        plans = [plan_memory(config, kernels, StepShape.of(config))[0] for config in configs]
        rows.append([f"`{level}`", *(f"{plan.total / GIB:.2f}" for plan in plans)])
    return markdown(
        ["level", *(f"{NAMES[size]}, B {B}, {precision}" for size, B, precision in arms)], rows
    )


def prices(record: Record) -> str:
    """Return a row for each pair of PRICES: what fp8 adds to losses, and the share of
    tokens that makes up for it.
    """
    figures = flat(record)
    rows = []
    for name, (arm, slope) in PRICES.items():
        train, val = (
            {k: figures.get(f"losses.pairs.{arm}.{of}.{k}") for k in ("mean", "half_width")}
            for of in ("train", "val")
        )
        if val["mean"] is not None:
            cells = [f"{loss['mean']:+.4f} ± {loss['half_width']:.4f}" for loss in (train, val)]
            share = f"{val['mean'] / value_of(slope, figures):.1%}" if slope else ""
            rows.append([name, str(figures[f"losses.pairs.{arm}.val.pairs"]), *cells, share])
    return markdown(
        ["fp8 minus bf16", "pairs", "training loss", "validation loss", "of the tokens"], rows
    )


def hours(record: Record) -> str:
    """Return one GPU's hours and dollars for AdamW's tokens, and for each fast recipe's."""
    figures = flat(record)
    arms = ("bf16", "fp8")
    ways = [("AdamW", ADAMW_TOKENS, "d12")]
    for recipe, size in (("gpt2_124m_fast", "d12"), ("modern_124m", "llama_c768")):
        ways.append((f"Muon, `{recipe}`", figures[f"recipe.{recipe}.tokens"], size))
    rows = []
    for way, tokens, size in ways:
        each = [tokens / figures[f"{MACHINE}.steps.{size}.{arm}.tok_s"] / 3600 for arm in arms]
        cells = [f"{hours:.1f} h, ${DOLLARS * hours:.0f}" for hours in each]
        rows.append([way, f"{tokens / 1e9:.2f}B", *cells])
    return markdown(["", "tokens", *(f"{MACHINE.upper()}, {arm}" for arm in arms)], rows)


def chosen(spec: dict[str, list[Any]]) -> Table:
    """Return a function that renders a table of tables.yaml, which explains its parts."""
    heads = [head.split(" | ") for head in spec["head"]]

    def table(record: Record) -> str:
        figures = flat(record)

        def text(cell: str, head: list[str]) -> str:
            if not cell.startswith("="):
                return cell
            _, formula, form = head
            value = value_of(formula.replace("{}", cell[1:]), figures)
            return format_count(value) if form == "count" else f"{value:{form}}"

        rows = [[*map(text, row, heads)] for row in spec["rows"]]
        return markdown([head[0] for head in heads], rows)

    return table


def beside(*programs: str) -> dict[str, tuple[str, str]]:
    """Return the columns of tokens/s of one sequence, then of 32, of programs."""
    return {f"{p}_{n}": (f"{p}, {n}", ",.0f") for n in (1, 32) for p in programs}


TABLES: dict[str, Table] = {
    "steps": measured(programs, "steps"),
    "peers": measured(programs, "peer"),
    "first_step": measured(programs, "first_step"),
    "multi": measured(programs, "multi"),
    "muon": measured(programs, "muon"),
    "levels": measured(programs, "levels"),
    "ops": measured(operations, "ops", most=1),
    "executed": measured(programs, "steps", executed=True),
    "executed_ops": measured(operations, "ops", executed=True),
    "epilogues": own_section(
        "epilogues", "added to the product", {"d12": ("124M", "z.0%"), "d48": ("1558M", "z.0%")}
    ),
    "sampling": own_section("sampling", "tokens/s", beside("ours", "static", "dynamic")),
    "encode": own_section(
        "encode",
        "MB/s",
        {
            "ours_1": ("one process", ".1f"),
            "ours_8": ("eight", ".0f"),
            "library_1": ("library, one thread", ".1f"),
            "library_8": ("eight", ".0f"),
        },
    ),
    "sources": own_section(
        "sources", "ms", {"one.ms": ("one source", ".2f"), "eight.ms": ("eight", ".2f")}
    ),
    "own_tokenizer": own_section(
        "own_tokenizer",
        "tokens",
        {
            "bytes_per_token": ("bytes per token", ".2f"),
            "early_nats": ("nats per byte in the first seconds", ".3f"),
            "nats": ("in the run", ".3f"),
            "seconds": ("seconds", ".0f"),
        },
    ),
    "qk_norm": own_section(
        "qk_norm",
        "",
        {
            "ms": ("ms", ".2f"),
            "joules": ("J", ".1f"),
            "longer": ("longer than above", ".1%"),
            "longer_half_width": ("±", ".1%"),
            "than_first": ("than the first", ".1%"),
            "than_first_half_width": ("±", ".1%"),
            "matmul_rope": ("qkv's product", ".2f"),
            "attention_bwd": ("attention backward", ".2f"),
            "classifier_fwd": ("logits' product", ".2f"),
        },
    ),
    "memory": memory,
    "prices": prices,
    "ratio": lambda _: ratio.table(ratio.sizes_of(pairs.read_results(SCALE))),
    "hours": hours,
}
CHOSEN = yaml.load(Path(__file__).with_name("tables.yaml").read_text(), yaml.BaseLoader)
TABLES |= {name: chosen(spec) for name, spec in CHOSEN.items()}
