"""Resolves the arguments of `plan`, `simulate`, `explain` and `compare`: configurations, presets, plans,
clusters."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braid.actors.config import Config, ConfigError, load_config, parse_config
from braid.actors.config.paths import anchored, expanded
from braid.actors.controller.decisions import find_or_decide
from braid.actors.controller.planning import build_schedule, setting_of
from braid.actors.controller.profiling import known_profile
from braid.jobs.cluster.session import launcher_of
from braid.jobs.data.hub import with_hub_files
from braid.scheduling.cost.profile import Profile, read_profile
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.layout import AXES
from braid.scheduling.model.presets.library import load_cluster, model_names
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import Outcome, decide, modelled, replay, simulate_setting, within
from braid.scheduling.plan.layout_candidates import Search
from braid.scheduling.plan.layouts import Tell, plan_layout, plan_of, runner_up, usual_schedules
from braid.scheduling.plan.plan import Plan, RunnerUp, read_plan
from braid.scheduling.plan.space import AUTO, EVERYTHING, PART_BY_PART, searched_schedules, with_schedule
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.schedule.text import parse
from braid.scheduling.text.suggestions import nearest

PRESET_BATCH_TOKENS = 2**22
"""Global batch, in tokens, of a model preset that is planned without a configuration."""


@dataclass(frozen=True)
class Request:
    """A job to plan on a cluster."""

    config: Config
    model: ModelShape
    cluster: ClusterSpec
    profile: Profile | None = None


def request(
    reference: str,
    overrides: list[str] | None,
    cluster: str,
    nodes: int | None,
    profile: Path | None = None,
) -> Request:
    """Read a configuration file or a model preset's name, and a cluster preset or file."""
    config = _config(reference, overrides or [])
    model = config.shape(config.model.vocabulary or _vocabulary(config))
    costs = None if profile is None else read_profile(profile)
    return Request(config, model, load_cluster(cluster, nodes), costs)


def _config(reference: str, overrides: list[str]) -> Config:
    if reference in model_names():
        content: dict[str, Any] = {"name": reference, "model": {"preset": reference}, "parallel": "auto"}
        content["train"] = {"dtype": "bf16"}
        config = expanded(parse_config(content, overrides, source=reference))
        if "global_batch" in config.train.model_fields_set:
            return config
        content["train"]["global_batch"] = max(1, PRESET_BATCH_TOKENS // config.model.shape(1).sequence)
        return expanded(parse_config(content, overrides, source=reference))
    path = Path(reference)
    if not path.exists():
        near = nearest(reference, model_names())
        remedy = f"did you mean {near!r}?" if near else "`braid presets` lists the presets"
        raise ConfigError(f"{reference} is neither a file nor a model preset; {remedy}")
    return with_hub_files(load_config(path, overrides))


def _vocabulary(config: Config) -> int:
    """Return the tokenizer's vocabulary; 1 if the model has its own, as presets and initial weights have."""
    if config.model.preset is not None or config.model.initial is not None:
        return 1
    from braid.jobs.data.tokenizer import tokenizer_of

    return tokenizer_of(config).vocabulary


def make_plan(job: Request, tell: Tell = lambda text: None) -> Plan:
    """Plan a job: search layouts with ``parallel: auto``, else decide for the given layout. ``tell``:
    receives progress."""
    config, overlap = job.config, job.config.overlap
    if config.parallel.auto:
        if job.profile is not None:
            raise ConfigError(
                "--profile holds the costs of one layout: set the degrees in parallel, not auto"
            )
        given = config.train.model_fields_set
        named = "schedule" in overlap.model_fields_set and overlap.schedule != AUTO
        search = Search(
            model=job.model,
            global_batch=config.train.global_batch,
            dtype=config.train.dtype,
            reduce_dtype=config.train.reduce_dtype,
            states=config.train.states,
            micro_batch=config.train.micro_batch if "micro_batch" in given else None,
            recompute=config.recompute if "recompute" in given and config.train.recompute != AUTO else None,
            schedule=overlap.name if named else None,
            fixed=config.parallel.fixed,
            zero=config.parallel.zero if "zero" in config.parallel.model_fields_set else None,
            context=config.parallel.context,
        )
        return plan_layout(search, job.cluster, tell=tell)
    tell("orders of the schedule" if overlap.schedule != AUTO else "all schedules of this layout")
    setting = setting_of(job.config, job.model)
    outcome, others = _with_layers(job, setting) if config.chooses_layers else (_decided(job, setting), ())
    if outcome.missing_bytes:
        missing, usable = outcome.missing_bytes / 2**30, job.cluster.usable_bytes / 2**30
        raise ConfigError(
            f"the layout {outcome.setting.layout.describe()} needs {missing:.1f} GiB more than the "
            f"{usable:.1f} GiB that a GPU of {job.cluster.name} can use; set parallel to auto, raise "
            f"parallel.tp or parallel.pp, raise parallel.zero, or set train.recompute to fine or full"
        )
    tell("what the usual schedules would take")
    bench_of, over = modelled(job.cluster, job.profile), within(job.cluster.usable_bytes)
    return plan_of(outcome, job.cluster, others, usual_schedules(outcome, bench_of, over))


def _decided(job: Request, setting: Setting) -> Outcome:
    """Decide a layout under the configuration's schedule or, with ``auto``, under the best one."""
    space = PART_BY_PART if job.profile is None else EVERYTHING  # measured costs: as `braid train` does
    bench_of, over = modelled(job.cluster, job.profile), within(job.cluster.usable_bytes)
    auto = job.config.overlap.schedule == AUTO
    return decide(searched_schedules(setting) if auto else [setting], bench_of, over, space)[0]


def _with_layers(job: Request, setting: Setting) -> tuple[Outcome, tuple[RunnerUp, ...]]:
    """Choose a degree and a policy for every layer; return the choice, and the results if all layers are of
    one kind."""
    from braid.jobs.training.layouts import layer_search, schedules_of
    from braid.scheduling.plan.layer_choices import choose_layers

    bench_of, usable = modelled(job.cluster, job.profile), job.cluster.usable_bytes
    search, over = layer_search(job.config, usable), within(usable)
    best, *others = choose_layers(setting, search, bench_of, over, schedules_of(job.config))
    auto = job.config.overlap.schedule == AUTO
    opened = with_schedule(best.setting, best.setting.name if auto else job.config.overlap.name)
    taken = decide([opened], bench_of, over, PART_BY_PART)[0]
    return taken, tuple(runner_up(outcome, best) for outcome in others[:5])


_LISTS = ("tensor_degrees", "recompute")
"""Keys of lists over layers: they can be written in several ways, so that they are compared when expanded."""


def with_plan(config: Config, file: Path | None = None) -> Config:
    """Fill what the configuration leaves open with a plan's decisions: schedule, degrees of the mesh and of
    layers, the ZeRO stage, policies, samples of a micro-batch. ``file``: the plan's file, by default
    ``overlap.plan``, if there is one.

    Other keys (model, batch, numerics) are compared by `braid.actors.controller.planning`.
    """
    if (file := file or config.overlap.plan) is None:
        return config
    setting = read_plan(file).setting
    layout, changed = setting.layout, dict[str, Any]()
    degrees = {axis: layout.degree(axis) for axis in (*AXES, "ep")}
    cut = {key: getattr(layout, key) for key in ("zero", "shards")}
    pipeline = config.overlap.pipeline or setting.name.pipeline or None
    if pipeline not in (None, setting.pipeline, f"{setting.pipeline}/{setting.hop}"):
        pipeline = setting.pipeline
    of_layers = {"tensor_degrees": layout.tensor_degrees or None, "context": setting.context}
    decisions: dict[str, dict[str, Any]] = {
        "parallel": {**degrees, **cut, **of_layers},
        "train": {"micro_batch": setting.workload.micro_batch, "recompute": setting.recompute},
        "overlap": {"schedule": setting.schedule, "pipeline": pipeline},
    }
    for name, decided in decisions.items():
        section = getattr(config, name)
        given = {key: getattr(section, key) for key in decided if key in section.model_fields_set}
        said = {key: value for key, value in given.items() if value != AUTO}
        if layout.data_ranks == 1:  # ZeRO has nothing to cut
            said.pop("zero", None)
        for key, value in said.items():
            if key not in _LISTS and value != decided[key]:
                raise ConfigError(
                    f"plan {file} has {name}.{key}={decided[key]}, the configuration says {value}: leave "
                    f"{name}.{key} out, or plan anew"
                )
        changed[name] = section.model_copy(update={**decided, **said})
    changed["parallel"] = changed["parallel"].model_copy(update={"auto": False})
    changed["overlap"] = changed["overlap"].model_copy(update={"plan": file})
    return config.model_copy(update=changed)


def is_plan(reference: str) -> bool:
    """Return whether a file is a plan (a YAML mapping with the key ``braid_plan``)."""
    path = Path(reference)
    if not path.is_file() or path.suffix not in (".yaml", ".yml"):
        return False
    return any(line.startswith("braid_plan:") for line in path.read_text(errors="replace").splitlines())


def cluster_of(plan: Plan, cluster: str | None, nodes: int | None) -> ClusterSpec:
    """Return the named cluster, or the plan's own with as many nodes as its layout fills."""
    if cluster is not None:
        return load_cluster(cluster, nodes)
    spec = load_cluster(plan.cluster)
    needed = plan.setting.layout.ranks
    if needed % spec.gpus_per_node and needed > spec.gpus_per_node:
        raise ConfigError(
            f"the plan's {needed} ranks do not fill nodes of {spec.gpus_per_node} GPUs; name a --cluster"
        )
    if needed < spec.gpus_per_node:
        return replace(spec, nodes=1, gpus_per_node=needed)
    return load_cluster(plan.cluster, nodes or needed // spec.gpus_per_node)


def simulated(
    reference: str,
    cluster: str | None,
    nodes: int | None,
    schedule: str | None = None,
    profile: Path | None = None,
    overrides: list[str] | None = None,
) -> Outcome:
    """Simulate a step of a plan, which is replayed, or of a configuration under its schedule (with
    ``parallel: auto``, of its best plan). ``schedule``: simulate another schedule on the same layout."""
    if not is_plan(reference):
        job = request(reference, overrides, cluster or "h100", nodes, profile)
        if job.config.parallel.auto:
            return simulate_plan(make_plan(job), job.cluster, schedule)
        setting = setting_of(job.config, job.model)
        return _under(setting, schedule, job.cluster, job.profile) if schedule else _decided(job, setting)
    if overrides:
        raise ConfigError("--set changes configurations; edit the plan's YAML instead")
    plan = read_plan(Path(reference))
    costs = None if profile is None else read_profile(profile)
    return simulate_plan(plan, cluster_of(plan, cluster, nodes), schedule, costs)


def simulate_plan(
    plan: Plan, cluster: ClusterSpec, schedule: str | None, profile: Profile | None = None
) -> Outcome:
    """Simulate a plan's own decisions, or another schedule on its layout."""
    if schedule is None or _named(schedule) == plan.setting.name:
        return replay(plan.setting, plan.choices, cluster, profile)
    return _under(plan.setting, schedule, cluster, profile)


def _under(setting: Setting, schedule: str, cluster: ClusterSpec, profile: Profile | None) -> Outcome:
    return simulate_setting(with_schedule(setting, _named(schedule)), cluster, profile)


def _named(text: str) -> ScheduleName:
    """Parse a schedule's name, perhaps with a pipeline; raise `ConfigError`, which lists them, if it is
    unknown."""
    try:
        return ScheduleName.parse(text)
    except ValueError as error:
        raise ConfigError(f"--schedule {text}: {error}") from None


def known_schedule(config: Config, shape: ModelShape) -> Schedule:
    """Return the schedule that `braid train` would execute, without measuring anything.

    If costs decide, use the given profile or one measured before; raise `ConfigError` if there is none. For a
    run on Ray, connect to its cluster, or start it, to find out which profile applies.
    """
    if not config.overlap.needs_profile:
        return build_schedule(config, shape)
    config = anchored(config, Path.cwd())
    measured = None
    if config.overlap.profile is not None:
        measured = read_profile(config.overlap.profile)
    elif any((config.runs / "profiles").glob("*.json")):
        with launcher_of(config) as (launcher, _):
            if (found := known_profile(config, shape, launcher)) is not None:
                measured = found.profile
    if measured is None:
        raise ConfigError(
            f"overlap.schedule={config.overlap.schedule} is decided by measured costs, and this run has "
            f"none in {config.runs / 'profiles'}: measure them with `braid profile`, or name a file in "
            f"overlap.profile"
        )
    return parse(find_or_decide(config, shape, measured).schedule)
