"""The dashboard *Training*: loss, speed, memory, and whether the run is well."""

from typing import Final

from braid.dashboards.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
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

_EVENTS: Final = (
    ("restarts", VERMILION),
    ("resizes", ORANGE),
    ("stragglers", SKY),
    ("failures", GREY),
)


def _stat(
    title: str, description: str, expr: str, unit: str, steps: tuple[tuple[float, str], ...] = ()
) -> Panel:
    return Panel(
        kind="stat",
        title=title,
        description=description,
        queries=(Query(expr=expr),),
        unit=unit,
        width=4,
        height=5,
        steps=steps,
    )


def _count(name: str) -> str:
    """A counter of events, 0 before the first one."""
    return or_zero(of_run(name), of_run("braid_step"))


def _curve(title: str, description: str, name: str, unit: str, logarithmic: bool = False) -> Panel:
    return Panel(
        kind="timeseries",
        title=title,
        description=description,
        queries=(Query(expr=of_run(name), legend=title.lower()),),
        unit=unit,
        width=8,
        logarithmic=logarithmic,
    )


PANELS: Final = (
    _stat("Step", "The last finished one.", of_run("braid_step"), "none"),
    _stat("Loss", "Mean over the tokens of the last step, in nats.", of_run("braid_loss_nats"), "none"),
    _stat(
        "Speed",
        "Tokens of the last step over its time.",
        of_run("braid_tokens_per_second"),
        "suffix: tokens/s",
    ),
    _stat("MFU", "Useful FLOPs over what the devices could do.", of_run("braid_mfu_ratio"), "percentunit"),
    _stat(
        "Since the last step",
        "Time since a step ended; it grows when the run hangs, and after its end.",
        f"time() - {of_run('braid_last_progress_timestamp_seconds')}",
        "s",
        steps=((0.0, BLUE), (300.0, ORANGE), (1800.0, VERMILION)),
    ),
    _stat(
        "Running",
        "1 while the run trains, 0 once it has finished or failed.",
        of_run("braid_running"),
        "none",
        steps=((0.0, GREY), (1.0, BLUE)),
    ),
    Panel(
        kind="timeseries",
        title="Loss",
        description="Mean loss of a token in nats: of the last step, and of the last validation.",
        queries=(
            Query(expr=of_run("braid_loss_nats"), legend="training", colour=BLUE),
            Query(expr=of_run("braid_validation_loss_nats"), legend="validation", colour=ORANGE),
        ),
        unit="none",
        width=8,
    ),
    _curve("Bits per byte", "On the validation split.", "braid_validation_bits_per_byte", "none"),
    _curve(
        "Gradient norm", "Before clipping; a jump comes before trouble.", "braid_gradient_norm", "none", True
    ),
    _curve("Learning rate", "Of the last step.", "braid_learning_rate", "sci"),
    Panel(
        kind="timeseries",
        title="Tokens per second",
        description="Of the last step, and over time with all pauses (checkpoints, restarts).",
        queries=(
            Query(expr=of_run("braid_tokens_per_second"), legend="last step", colour=BLUE),
            Query(
                expr=f"max by (run) (rate({series('braid_tokens_total')}[$__rate_interval]))",
                legend="over time",
                colour=ORANGE,
            ),
        ),
        unit="suffix: tokens/s",
        width=8,
        minimum=0,
    ),
    _curve("MFU", "Useful FLOPs over what the devices could do.", "braid_mfu_ratio", "percentunit"),
    Panel(
        kind="heatmap",
        title="Times of steps",
        description="How many steps took how long: a second band is a straggler or a checkpoint.",
        queries=(
            Query(
                expr=f"sum by (le) (rate({series('braid_step_duration_seconds_bucket')}[$__rate_interval]))",
                legend="{{le}}",
                buckets=True,
            ),
        ),
        unit="s",
    ),
    Panel(
        kind="timeseries",
        title="Compute of a step by rank",
        description="The rank on top is the one that everybody waits for.",
        queries=(Query(expr=of_ranks("braid_step_compute_seconds"), legend="{{stage}}/{{rank}}", many=True),),
        unit="s",
        minimum=0,
    ),
    Panel(
        kind="timeseries",
        title="Peak memory by rank",
        description="Most memory in use at once, in every step. It should be flat.",
        queries=(Query(expr=of_ranks("braid_peak_memory_bytes"), legend="{{stage}}/{{rank}}", many=True),),
        unit="bytes",
        minimum=0,
    ),
    Panel(
        kind="timeseries",
        title="Restarts, resizes, stragglers",
        description="Counts since the run began to be exported; a step is an event.",
        queries=tuple(
            Query(expr=_count(f"braid_{name}_total"), legend=name, colour=colour) for name, colour in _EVENTS
        ),
        unit="none",
        minimum=0,
    ),
    Panel(
        kind="timeseries",
        title="Imbalance of experts",
        description="The fullest over the average, of experts and of ranks that share them. 1 is balanced; "
        "steps without capacity take as long as the fullest rank. Empty for models without experts.",
        queries=(
            Query(expr=of_run("braid_expert_imbalance_ratio"), legend="mean over layers", colour=BLUE),
            Query(expr=of_run("braid_worst_expert_imbalance_ratio"), legend="worst layer", colour=VERMILION),
            Query(expr=of_run("braid_expert_rank_imbalance_ratio"), legend="ranks", colour=GREEN),
        ),
        unit="suffix:x",
        width=8,
    ),
    Panel(
        kind="timeseries",
        title="Load of experts",
        description="Its entropy over that of a balanced load, and the share of visits that were dropped.",
        queries=(
            Query(expr=of_run("braid_expert_entropy_ratio"), legend="entropy", colour=BLUE),
            Query(expr=of_run("braid_worst_expert_entropy_ratio"), legend="worst layer", colour=VERMILION),
            Query(expr=of_run("braid_dropped_visits_ratio"), legend="dropped", colour=ORANGE),
        ),
        unit="percentunit",
        width=8,
        minimum=0,
        maximum=1,
    ),
    Panel(
        kind="timeseries",
        title="Experts without a visit",
        description="Of all layers, in the last step.",
        queries=(Query(expr=of_run("braid_unvisited_experts"), legend="experts", colour=BLUE),),
        unit="none",
        width=8,
        minimum=0,
    ),
    Panel(
        kind="table",
        title="Ranks",
        description="The last step of every chosen rank, and what its recording lost.",
        queries=(
            Query(expr=of_ranks("braid_step_compute_seconds")),
            Query(expr=of_ranks("braid_peak_memory_bytes")),
            Query(expr=or_zero(of_ranks("braid_dropped_spans_total"), of_ranks("braid_span_sampling_steps"))),
            Query(expr=of_ranks("braid_span_sampling_steps")),
        ),
        columns=(
            ("A", "compute", "s"),
            ("B", "peak memory", "bytes"),
            ("C", "lost spans", "none"),
            ("D", "records one step in", "none"),
        ),
    ),
    Panel(
        kind="timeseries",
        title="Spans lost",
        description="By all chosen ranks, a second. Above zero, traces have gaps; training does not.",
        queries=(
            Query(
                expr=or_zero(
                    f"sum(rate({series('braid_dropped_spans_total', STAGES)}[$__rate_interval]))",
                    rate("braid_compute_seconds_total"),
                ),
                legend="lost",
                colour=VERMILION,
            ),
        ),
        unit="suffix: spans/s",
        width=6,
        minimum=0,
    ),
    Panel(
        kind="timeseries",
        title="Checkpoints",
        description="Time that the last one took, how many there are, and how many tries failed.",
        queries=(
            Query(expr=of_run("braid_checkpoint_seconds"), legend="seconds", colour=BLUE),
            Query(expr=_count("braid_checkpoints_total"), legend="saved", colour=GREEN),
            Query(expr=_count("braid_failed_saves_total"), legend="failed", colour=VERMILION),
        ),
        unit="none",
        width=6,
        minimum=0,
    ),
)


def training() -> Json:
    """The dashboard as Grafana takes it."""
    return dashboard("braid-training", "Loss, speed, memory and health of a run.", PANELS)
