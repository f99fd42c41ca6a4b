"""Document 000, what it concludes from figures 7 to 9: how large an image, how much slower."""

from __future__ import annotations

from documents.lookup import Made, Printed
from documents.row import Row, Verdict, say
from documents.unet_000 import COMMAND, fails, fits, printed, slowdown

FIGURES = f'{COMMAND} --ways "figure 7;figure 8"'
KNOWN = "--known benchmarks/unet_split/results/gpu.json --output deep.jsonl"


def largest(column: str) -> Printed:
    """The largest side of a column of figure 9 that has seconds."""
    return Printed("unet_split", lambda module: max(module.SECONDS[column]))


def beyond(way: str, net: str) -> Made:
    """A way's largest side over that of one rank."""
    return fits(net, way) / fits(net, "sequential")


ROWS = (
    Row(
        "figures 7 and 8",
        "memory-aware cuts (figure 8) outperform naive cuts (figure 7)",
        say(
            "classic net: {aware:.0f}² against {naive:.0f}², {gain:.2f} times the side",
            aware=fits("classic", "figure 8"),
            naive=fits("classic", "figure 7"),
            gain=fits("classic", "figure 8") / fits("classic", "figure 7"),
        ),
        FIGURES,
        Verdict.REPRODUCED,
        "by the cuts as we read them: the pictures are not in the document's text",
    ),
    Row(
        "the same, on the deep net",
        "the same",
        say(
            "{aware:.0f}² against {naive:.0f}², {gain:.2f} times the side; figure 7's cuts fail at {fails:.0f}²",
            aware=fits("deep", "figure 8"),
            naive=fits("deep", "figure 7"),
            gain=fits("deep", "figure 8") / fits("deep", "figure 7"),
            fails=fails("deep", "figure 7"),
        ),
        f"{COMMAND} --only 'deep/figure 7' {KNOWN}",
        Verdict.REPRODUCED,
    ),
    Row(
        "figures 7 and 8, against other cuts",
        "figure 8 is «more advanced» than cuts of equal numbers of layers",
        say(
            "equal numbers of layers reach {naive:.0f}² (classic) and {deep_naive:.0f}² (deep), figure 8 "
            "{figure:.0f}² and {deep_figure:.0f}², cuts balanced by memory {memory:.0f}² and {deep_memory:.0f}²",
            naive=fits("classic", "naive"),
            deep_naive=fits("deep", "naive"),
            figure=fits("classic", "figure 8"),
            deep_figure=fits("deep", "figure 8"),
            memory=fits("classic", "memory"),
            deep_memory=fits("deep", "memory"),
        ),
        COMMAND,
        Verdict.CONTRADICTED,
        "for the cuts of figure 8; balanced by memory, as the document means them, cuts do reach further",
    ),
    Row(
        "section 5",
        "one GPU runs out of memory at 640²; its table says so, too",
        say(
            "deep net: {fits:.0f}² runs on one rank, {fails:.0f}² does not",
            fits=fits("deep", "sequential"),
            fails=fails("deep", "sequential"),
        ),
        f"{COMMAND} --ways sequential",
        Verdict.REPRODUCED,
        "by the choice of the net's width; the classic net fits on one rank far beyond",
    ),
    Row(
        "section 5, against figure 9",
        say(
            "naive: «able to train all images up to a 1024x1024 image»; its table: OOM at 1024², {naive:.0f}² is the "
            "largest",
            naive=largest("naive"),
        ),
        say(
            "deep net: naive cuts run at {fits:.0f}² and fail at {fails:.0f}²",
            fits=fits("deep", "naive"),
            fails=fails("deep", "naive"),
        ),
        f"{COMMAND} --ways naive",
        Verdict.CONTRADICTED,
        "by its own table; ours does run at 1024², on another net",
    ),
    Row(
        "section 5, against figure 9",
        say(
            "model-aware: «able to train all images up to 2048x2048»; its table: OOM at 2048², {aware:.0f}² is the "
            "largest",
            aware=largest("memory"),
        ),
        say(
            "deep net: cuts by memory run at {fits:.0f}² and fail at {fails:.0f}²",
            fits=fits("deep", "memory"),
            fails=fails("deep", "memory"),
        ),
        f"{COMMAND} --ways memory",
        Verdict.CONTRADICTED,
        "by its own table, and by ours",
    ),
    Row(
        "sections 5 and 6",
        say(
            "«minimal slowdown» against one GPU; its table: naive {small:.2f} times at 64², {large:.2f} at 512²; "
            "model-aware {aware_small:.2f} and {aware_large:.2f}",
            small=printed("naive", 64) / printed("sequential", 64),
            large=printed("naive", 512) / printed("sequential", 512),
            aware_small=printed("memory", 64) / printed("sequential", 64),
            aware_large=printed("memory", 512) / printed("sequential", 512),
        ),
        say(
            "naive {small:.2f} times at 64², {large:.2f} at 512² (deep), {classic_small:.2f} and {classic_large:.2f} "
            "(classic); by memory {aware:.2f} and {classic_aware:.2f} at 512²",
            small=slowdown("deep", "naive", 64),
            large=slowdown("deep", "naive", 512),
            classic_small=slowdown("classic", "naive", 64),
            classic_large=slowdown("classic", "naive", 512),
            aware=slowdown("deep", "memory", 512),
            classic_aware=slowdown("classic", "memory", 512),
        ),
        COMMAND,
        Verdict.CONTRADICTED,
        "by its own table for small images, and by ours more: 8 processes take turns on one GPU, and one rank is "
        "faster here",
    ),
    Row(
        "section 4, C, and figure 9",
        say(
            "model-aware «outperformed» naive; in time its table has {large:.2f} of naive's seconds at 256², "
            "{small:.2f} at 512²",
            large=printed("memory", 256) / printed("naive", 256),
            small=printed("memory", 512) / printed("naive", 512),
        ),
        say(
            "deep net, by memory over naive: {small:.2f} at 256², {large:.2f} at 512²; classic net "
            "{classic_small:.2f} and {classic_large:.2f}",
            small=slowdown("deep", "memory", 256) / slowdown("deep", "naive", 256),
            large=slowdown("deep", "memory", 512) / slowdown("deep", "naive", 512),
            classic_small=slowdown("classic", "memory", 256) / slowdown("classic", "naive", 256),
            classic_large=slowdown("classic", "memory", 512) / slowdown("classic", "naive", 512),
        ),
        COMMAND,
        Verdict.NOT_COMPARABLE,
        "in time there is no winner, theirs or ours; in memory see the rows above",
    ),
    Row(
        "section 6",
        say(
            "images «over double the size» of what one GPU holds; its table: {aware:.0f}² over {alone:.0f}², "
            "{gain:.2f} times the side",
            aware=largest("memory"),
            alone=largest("sequential"),
            gain=largest("memory") / largest("sequential"),
        ),
        say(
            "cuts by memory over one rank: {deep:.2f} times the side (deep net), {classic:.2f} times (classic net)",
            deep=beyond("memory", "deep"),
            classic=beyond("memory", "classic"),
        ),
        COMMAND,
        Verdict.REPRODUCED,
        "on the deep net, but not on the classic one; by its own table, double is reached and not exceeded",
    ),
    Row(
        "sections 1 and 6",
        "model parallelism lets U-Nets train on images too large for one GPU",
        say(
            "8 ranks, a grid of 4 × 2 with recompute: {classic:.0f}² (classic net), {gain:.2f} times the side of one "
            "rank and {naive:.2f} times that of naive cuts; the deep net ran at {deep:.0f}², {deep_gain:.2f} times "
            "one rank's",
            classic=fits("classic", "spatial, recompute"),
            gain=beyond("spatial, recompute", "classic"),
            naive=fits("classic", "spatial, recompute") / fits("classic", "naive"),
            deep=fits("deep", "spatial, recompute"),
            deep_gain=beyond("spatial, recompute", "deep"),
        ),
        f'{COMMAND} --ways "spatial, recompute"',
        Verdict.BETTER,
    ),
    Row(
        "the same, by the other ways",
        "the same",
        say(
            "classic net: spatial {spatial:.0f}², spatial × stages {mixed:.0f}², grids {grids:.0f}², GEMS {gems:.0f}²; "
            "deep net {deep_spatial:.0f}², {deep_mixed:.0f}², {deep_grids:.0f}² and {deep_gems:.0f}²",
            spatial=fits("classic", "spatial"),
            mixed=fits("classic", "spatial × stages"),
            grids=fits("classic", "grids"),
            gems=fits("classic", "GEMS"),
            deep_spatial=fits("deep", "spatial"),
            deep_mixed=fits("deep", "spatial × stages"),
            deep_grids=fits("deep", "grids"),
            deep_gems=fits("deep", "GEMS"),
        ),
        f"{COMMAND} --only deep/GEMS deep/spatial 'deep/spatial × stages' {KNOWN}",
        Verdict.BETTER,
        "spatial cuts, alone or with stages, hold larger images than any cut by layers; GEMS trains two images at a "
        "time and so holds smaller ones. Of the classic net the searches were not finished",
    ),
    Row(
        "the same, with recompute",
        "the same",
        say(
            "blocks computed again: {blocks:.0f}² (classic) and {deep_blocks:.0f}² (deep); whole stages: {stages:.0f}² "
            "and {deep_stages:.0f}²; without: {memory:.0f}² and {deep_memory:.0f}²",
            blocks=fits("classic", "recompute blocks"),
            deep_blocks=fits("deep", "recompute blocks"),
            stages=fits("classic", "recompute stages"),
            deep_stages=fits("deep", "recompute stages"),
            memory=fits("classic", "memory"),
            deep_memory=fits("deep", "memory"),
        ),
        f"{COMMAND} --only 'classic/recompute *' {KNOWN}",
        Verdict.NOT_COMPARABLE,
        "the document does not compute anything again; with one image at a time, stages gain little or nothing by it",
    ),
)
