"""Writes docs/reference/hunt.md from the results of hunts in docs/reference/hunts: python docs/generate_hunt.py

`make hunt MINUTES=60 OUTPUT=docs/reference/hunts/2026-11-20.json` writes such a file.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "reference" / "hunts"
PAGE = FOLDER.parent / "hunt.md"
COLUMNS = ("cases", "exact", "refused", "incorrect", "crashed", "hung")
HEAD = """# The hunt

`make hunt MINUTES=30` searches for cases that break the promise, with fresh random numbers each time: a case is exact
(float64, 1e-10), or refused by an error that names what is not supported. Whatever else happens is a finding, and comes
with a script that shows it.

| search | what it draws |
|---|---|
| `rules` | every operation of the table, with torch's own samples and ours: positional, by keyword, as a method, in place, with `out=`; on up to four ranks, in tiles and micro-batches |
| `models` | models of layers of every kind, with skips, reuse, views, writes in place, hooks, buffers, random layers, further results and losses that read them; under every plan that `Plan` accepts; several steps of an optimizer, compared with plain autograd. A failing case is made as small as it gets |
| `adjoint` | ⟨Fx, y⟩ = ⟨x, F*y⟩ for every message |
| `kills` | `mural train` under plans of all families; a random rank is killed at a random moment. The run ends with an error that names the rank, leaves no process behind, resumes, and ends with the same weights to the bit |

`make hunt SEED=7 ONLY=models` repeats cases. `make test` runs a fixed selection of all four.

## Results
"""  # noqa: E501, rows of a table are lines


def section(told: dict[str, object]) -> str:
    """One hunt as a table."""
    about = f"mural {told['mural']}, torch {told['torch']}, Python {told['python']}"
    lines = [f"### {told['date']}: {told['minutes']} minutes, seed {told['seed']}", "", about, ""]
    lines += [f"| search | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for row in told["searches"]:
        lines.append(f"| {row['search']} | {' | '.join(str(row[name]) for name in COLUMNS)} |")
    for finding in told["findings"]:
        lines += ["", f"- {finding['kind']}: {finding['case']}"]
    return "\n".join(lines)


def page() -> str:
    """The whole page, the last hunt first."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")]
    results.sort(key=lambda told: told["date"], reverse=True)
    return "\n".join([HEAD, "\n\n".join(section(told) for told in results) or "No hunt was recorded yet.", ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
