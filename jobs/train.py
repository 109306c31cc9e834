"""Start a run: prepare the data, plan, drive the controller, hand its events to a display."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.controller.records import Event, Finished
from braid.actors.stage.messages import RunPlan
from braid.jobs.corpus import Corpus
from braid.jobs.prepare import Executor, Prepared, Progress, Request, local_map, prepare_if_needed
from braid.jobs.session import ray_session
from braid.jobs.tokenizer import load_tokenizer

Show = Callable[[Event | Prepared | Progress], None]


def train(
    config: Config, options: RunOptions | None = None, show: Show = lambda event: None
) -> dict[str, Any]:
    """Train to the end, or until SIGINT or SIGTERM, and return the report (what ``report.json`` holds).

    Raises `ConfigError` (and other `ValueError`) for what the user can mend, `WorkerError` if a rank fails.
    """
    config, options = config.located(), options or RunOptions()
    shape = config.check(load_tokenizer(config.data.tokenizer).vocabulary)
    schedule = build_schedule(config, shape)

    def plan(prepared: Prepared) -> RunPlan:
        return RunPlan(config=config, shape=shape, schedule=schedule.to_text(), data=str(prepared.output))

    report: dict[str, Any] = {}
    events = _in_processes if config.cluster.launcher == "processes" else _on_ray
    for event in events(config, options, plan, show):
        show(event)
        if isinstance(event, Finished):
            report = event.report
    return report


def prepare_data(config: Config, executor: Executor, show: Show) -> Prepared:
    """Tokenise the corpus unless that is done already."""
    corpus = corpus_of(config)
    directory = config.data.directory or config.runs / "data" / Request.of(corpus).digest[:16]
    directory.parent.mkdir(parents=True, exist_ok=True)
    prepared = prepare_if_needed(corpus, output=directory, executor=executor, progress=show)
    show(prepared)
    return prepared


def corpus_of(config: Config) -> Corpus:
    """The corpus that the configuration names."""
    data = config.data
    return Corpus(
        files=data.files,
        exclude=data.exclude,
        format=data.format,
        tokenizer=data.tokenizer,
        text_field=data.text_field,
        validation_fraction=data.validation_fraction,
        encoding_errors=data.encoding_errors,
    )


def _in_processes(
    config: Config, options: RunOptions, plan: Callable[[Prepared], RunPlan], show: Show
) -> Iterator[Event]:
    launcher = ProcessLauncher(config)
    launcher.check(config.layout().ranks)
    controller = Controller(plan(prepare_data(config, local_map, show)), launcher, options)
    with _stopping(controller.stop):
        yield from controller.run()


def _on_ray(
    config: Config, options: RunOptions, plan: Callable[[Prepared], RunPlan], show: Show
) -> Iterator[Event]:
    with ray_session(config):
        import ray

        from braid.actors.controller.actor import start_controller
        from braid.actors.controller.placement import RayLauncher
        from braid.jobs.prepare_ray import ray_map

        RayLauncher(config).check(config.layout().ranks)
        controller = start_controller(plan(prepare_data(config, ray_map, show)), options)
        with _stopping(lambda: ray.get(controller.stop.remote())):
            for reference in controller.run.options(num_returns="streaming").remote():
                event = ray.get(reference)
                if isinstance(event, BaseException):
                    raise event
                yield event


@contextlib.contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into ``stop``, called from another thread; a second interrupts."""
    asked = threading.Event()
    over = threading.Event()

    def wait() -> None:
        asked.wait()
        if not over.is_set():
            stop()

    def handle(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    thread = threading.Thread(target=wait, name="stopping", daemon=True)
    thread.start()
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        over.set()
        asked.set()
        thread.join()
