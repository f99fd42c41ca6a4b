"""Writes docs/reference/documents.md, the five documents claim by claim: python docs/generate_documents.py"""

from collections import Counter
from pathlib import Path

from documents import (
    all_reduce_003,
    bigconv_002,
    conclusions_004,
    counts_002,
    digits_003,
    hybrids_000,
    limits_000,
    nodes_004,
    offload_001,
    rest_002,
    splitting_001,
    survey_000,
    takeaways_001,
    traffic_004,
    training_004,
    unet_000,
)
from documents.row import Document, Row, Verdict

PAGE = Path(__file__).parent / "reference" / "documents.md"

DOCUMENTS = (
    Document(
        "000",
        "Model parallelism for U-Net (Dong, Ballas, Jain: final report of CSE 5249)",
        (*survey_000.ROWS, *hybrids_000.ROWS, *unet_000.CUTS, *unet_000.FIGURE_9, *limits_000.ROWS),
    ),
    Document(
        "001",
        "Automatic splitting and offload (Hamza, Alnaasan, Dong, Jain: Scaling Distributed DNN Training for Large "
        "Images)",
        (*splitting_001.ROWS, *offload_001.TABLES, *takeaways_001.TAKEAWAYS),
    ),
    Document(
        "002",
        "BigConv and Multi-DSN (Tsaris, Hinkle: Distributed Training for High Resolution Images)",
        (
            *bigconv_002.LIBRARY,
            *bigconv_002.FIGURES,
            *counts_002.NUMBERS_OF_GPUS,
            *counts_002.THROUGHPUT,
            *rest_002.ROWS,
        ),
    ),
    Document(
        "003",
        "Tree, butterfly and ring (Fourie: Distributed Deep Learning)",
        (*all_reduce_003.THEORY, *digits_003.PARTITIONING, *digits_003.EXPERIMENT),
    ),
    Document(
        "004",
        "Data, model and hybrid parallelism (Parallelizing Strategies for Convolutional Neural Networks)",
        (*nodes_004.DATA, *traffic_004.MODEL, *training_004.TABLES, *conclusions_004.CONCLUSIONS),
    ),
)

HEAD = """# The five documents, claim by claim

Written by `python docs/generate_documents.py`. mural grew out of five documents. Each of their tables, figures and
claims that can be checked has a row: what the document says, what mural found, the command that measures it, and a
verdict. Numbers of ours are looked up in the results files of the benchmarks when the page is written; errors of
predicted times, in the table that `mural bench cost --page` writes from such files. Machines, dates and settings are on
the benchmark's page, to which the command links. Numbers of theirs come from the documents. Introductions, and what is
cited without a number, are left out.

| verdict | meaning |
|---|---|
| reproduced | found here, too: the effect or the number, as the row says |
| better | more than the document reached, or what it left for later |
| contradicted | found otherwise here, or by the document itself |
| not comparable | measured under other conditions, or nothing to compare with; the row says why |
| not measured yet | what is missing, which the command measures |

"""


def linked(command: str) -> str:
    """The command, with a link to the page of its benchmark."""
    words = command.split()
    if words[:2] != ["mural", "bench"]:
        return f"`{command}`" if command else "–"
    return f"[`{command}`](../../benchmarks/{words[2]}/README.md)"


def line(row: Row) -> str:
    """A row of a table."""
    why = f": {row.why}" if row.why else ""
    cells = (row.place, str(row.theirs), str(row.said), linked(row.command), f"**{row.verdict}**{why}")
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def counts() -> list[str]:
    """How many rows of each document have each verdict."""
    lines = [f"| document | rows | {' | '.join(Verdict)} |", f"|---|---{'|---' * len(Verdict)}|"]
    for document in DOCUMENTS:
        found = Counter(row.verdict for row in document.rows)
        cells = " | ".join(str(found[verdict]) for verdict in Verdict)
        lines.append(f"| [`{document.number}`](#{document.number}) | {len(document.rows)} | {cells} |")
    return lines


def page() -> str:
    """The text of the page."""
    lines = [*HEAD.splitlines(), *counts()]
    for document in DOCUMENTS:
        lines += ["", f"## {document.number}", "", document.title, ""]
        lines += ["| where | theirs | ours | command | verdict |", "|---|---|---|---|---|"]
        lines += [line(row) for row in document.rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
