"""The dashboard *Overlap*: how much communication is hidden, what that costs, and how it compares."""

from typing import Final

from braid.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    STAGES,
    VERMILION,
    Json,
    Panel,
    Query,
    dashboard,
    of_ranks,
    of_run,
    or_zero,
    rate,
    series,
)

_HIDDEN: Final = ((0.0, VERMILION), (0.5, ORANGE), (0.8, BLUE))


def _lost(name: str) -> str:
    """A rank's time of a kind as a share of time, mean over the chosen ranks."""
    expr = rate(f"braid_{name}_seconds_total")
    # All are recorded together, but slowdown only where solo times are known, which its gauge tells.
    known = f"abs(avg({series('braid_step_slowdown_seconds', STAGES)}))"
    return or_zero(expr, known if name == "slowdown" else rate("braid_compute_seconds_total"))


PANELS: Final = (
    Panel(
        kind="stat",
        title="Hidden now",
        description="Share of the last step's communication during which compute ran; mean over the ranks.",
        queries=(Query(expr=of_run("braid_hidden_ratio")),),
        unit="percentunit",
        width=5,
        height=5,
        minimum=0,
        maximum=1,
        steps=_HIDDEN,
    ),
    Panel(
        kind="stat",
        title="Hidden, predicted",
        description="The same share in the simulated step that the schedule was chosen by.",
        queries=(Query(expr=of_run("braid_predicted_hidden_ratio")),),
        unit="percentunit",
        width=5,
        height=5,
        minimum=0,
        maximum=1,
        steps=_HIDDEN,
    ),
    Panel(
        kind="stat",
        title="Alpha",
        description="Share of communication in the simulated step without overlap: what there is to hide.",
        queries=(Query(expr=of_run("braid_alpha_ratio")),),
        unit="percentunit",
        width=4,
        height=5,
    ),
    Panel(
        kind="stat",
        title="Most that overlap can win",
        description="The limit on the speed-up, min(1/alpha, 1/(1-alpha)).",
        queries=(Query(expr=of_run("braid_limit_speedup_ratio")),),
        unit="suffix:x",
        width=5,
        height=5,
    ),
    Panel(
        kind="stat",
        title="Speed-up over no overlap",
        description="Simulated step without overlap over the measured step. Two runs give a measured one.",
        queries=(Query(expr=f"{of_run('braid_predicted_serial_seconds')} / {of_run('braid_step_seconds')}"),),
        unit="suffix:x",
        width=5,
        height=5,
    ),
    Panel(
        kind="timeseries",
        title="Hidden fraction",
        description="Measured against predicted. Where they part, the profile is no longer true.",
        queries=(
            Query(expr=of_run("braid_hidden_ratio"), legend="measured", colour=BLUE),
            Query(
                expr=of_run("braid_predicted_hidden_ratio"), legend="predicted", colour=ORANGE, dashed=True
            ),
        ),
        unit="percentunit",
        minimum=0,
        maximum=1,
    ),
    Panel(
        kind="timeseries",
        title="Time of a step",
        description="Measured (slowest rank), simulated, and simulated without overlap.",
        queries=(
            Query(expr=of_run("braid_step_seconds"), legend="measured", colour=BLUE),
            Query(
                expr=of_run("braid_predicted_step_seconds"), legend="predicted", colour=ORANGE, dashed=True
            ),
            Query(
                expr=of_run("braid_predicted_serial_seconds"), legend="no overlap", colour=GREY, dashed=True
            ),
        ),
        unit="s",
        minimum=0,
    ),
    Panel(
        kind="timeseries",
        title="What communication costs",
        description="Shares of time, mean over the chosen ranks, stacked: transfers that nothing hid, "
        "waiting until a peer too has issued a collective, compute slowed down by what runs beside it, gaps "
        "inside blocks, waits between blocks.",
        queries=(
            Query(expr=_lost("exposed"), legend="exposed", colour=VERMILION),
            Query(expr=_lost("waiting"), legend="waiting for a peer", colour=SKY),
            Query(expr=_lost("slowdown"), legend="slowdown", colour=ORANGE),
            Query(expr=_lost("launch_gap"), legend="launch gap", colour=PURPLE),
            Query(expr=_lost("bubble"), legend="bubble", colour=GREY),
        ),
        unit="percentunit",
        minimum=0,
        stacked=True,
    ),
    Panel(
        kind="timeseries",
        title="Communication and compute",
        description="Shares of time, mean over the chosen ranks: compute; communication, of it hidden.",
        queries=(
            Query(expr=_lost("compute"), legend="compute", colour=GREEN),
            Query(expr=_lost("communication"), legend="communication", colour=SKY),
            Query(expr=_lost("hidden"), legend="hidden", colour=BLUE),
        ),
        unit="percentunit",
        minimum=0,
    ),
    Panel(
        kind="heatmap",
        title="Exposed communication by rank",
        description="Seconds of a step; a bright row is a rank whose communication nothing hides.",
        queries=(Query(expr=of_ranks("braid_step_exposed_seconds"), legend="{{stage}}/{{rank}}", many=True),),
        unit="s",
    ),
    Panel(
        kind="table",
        title="Ranks",
        description="The last step of every chosen rank.",
        queries=(
            Query(expr=of_ranks("braid_step_communication_seconds")),
            Query(expr=of_ranks("braid_step_hidden_seconds")),
            Query(expr=of_ranks("braid_step_exposed_seconds")),
            Query(expr=of_ranks("braid_step_waiting_seconds")),
            Query(expr=f"clamp_min({of_ranks('braid_step_slowdown_seconds')}, 0)"),
            Query(expr=of_ranks("braid_step_launch_gap_seconds")),
            Query(expr=of_ranks("braid_step_bubble_seconds")),
        ),
        columns=(
            ("A", "communication", "s"),
            ("B", "hidden", "s"),
            ("C", "exposed", "s"),
            ("D", "waiting for a peer", "s"),
            ("E", "slowdown", "s"),
            ("F", "launch gap", "s"),
            ("G", "bubble", "s"),
        ),
    ),
)


def overlap() -> Json:
    """The dashboard as Grafana takes it."""
    return dashboard("braid-overlap", "How much communication Braid hides, and what that costs.", PANELS)
