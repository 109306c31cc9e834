"""The real controller over stand-in ranks: which state a run goes on from, whatever fails on the way."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.actors.config import Config, ConfigError
from braid.actors.controller import generation
from braid.actors.controller.controller import Replan, RunOptions
from braid.actors.controller.ranks import elastic, failures
from braid.actors.controller.ranks.elastic import can_be_planned
from braid.actors.controller.ranks.group import NoRoomError, StoppedError, WorkerError
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import (
    CheckpointSaved,
    Event,
    Finished,
    Incident,
    Started,
    StepDone,
    read_identity,
)
from braid.actors.controller.state.checkpoint_stores import Homes
from braid.actors.controller.state.manifest import CheckpointError, CheckpointStore
from braid.actors.controller.state.mirror import Mirror, MirrorError
from braid.actors.stage.rank.messages import RunPlan
from tests.actors.stand_ins import Hook, StandInLauncher, controller_of, losses, states, told
from tests.end_to_end.runs import BYTES_VOCABULARY, small_config

DIED = "its process ended"
RESUME = RunOptions(resume=True)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No try of a recovery is waited for, and a home that is away is looked for all the time."""
    monkeypatch.setattr(failures, "BACKOFF_S", 0.0)
    monkeypatch.setattr(generation, "_LOOK_SECONDS", 0.01)


def config_of(path: Path, **sections: Any) -> Config:
    """Two ranks, 12 steps, no validation."""
    train = {"steps": 12, "validation_samples": 1, **sections.pop("train", {})}
    common = {"parallel": {"tp": 2}, "data": {"validation_fraction": 0.0}}
    return small_config(path, **{**common, **sections, "train": train})


def every(steps: int, **more: Any) -> dict[str, Any]:
    """Checkpoints that are waited for."""
    return {"every": steps, "asynchronous": False, **more}


@dataclass
class Once:
    """Raises at the n-th call of a method of a rank; ``then``: what is called from then on."""

    method: str
    left: int
    error: Callable[[int], Exception]
    rank: int = 1
    then: Hook | None = None
    done: bool = False

    def __call__(self, method: str, rank: int, arguments: tuple[Any, ...]) -> None:
        if method == self.method and (rank == self.rank or method == "start"):
            self.left -= 1
            if self.left == 0:
                self.done = True
                raise self.error(rank)
        if self.done and self.then is not None:
            self.then(method, rank, arguments)


def died(rank: int) -> WorkerError:
    return WorkerError(rank, DIED, died=True)


def no_room(rank: int) -> Exception:
    return NoRoomError(f"there is no room to start rank {rank}")


def mistaken(rank: int) -> WorkerError:
    return WorkerError(rank, "index.json is not JSON; prepare it again", user_error=True)


def run(
    config: Config,
    ranks: StandInLauncher | Hook | None = None,
    options: RunOptions | None = None,
    replan: Replan | None = None,
    look: Callable[[Event], object] = lambda event: None,
) -> list[Event]:
    """A run on ranks that do what a hook does; ``look`` sees every event when it comes."""
    launcher = ranks if isinstance(ranks, StandInLauncher) else StandInLauncher(*filter(None, [ranks]))
    events = []
    for event in controller_of(config, launcher, options, replan).run():
        events.append(event)
        look(event)
    return events


def unharmed(config: Config, *how: Any, **more: Any) -> list[Event]:
    """A run of 12 steps that ends with what it had been without a failure."""
    events = run(config, *how, **more)
    assert losses(events) == states(12)
    return events


def replanned(config: Config, _: Any) -> RunPlan:
    """A plan for another layout."""
    return RunPlan(config=config, shape=config.check(BYTES_VOCABULARY), schedule="", data="")


def all_of(*hooks: Hook) -> Hook:
    return lambda *call: [one(*call) for one in hooks] and None


def steps_of(events: Sequence[Event]) -> list[int]:
    """Every step that was done, again where it was done again."""
    return [event.record.step for event in events if isinstance(event, StepDone)]


def saves_of(events: Sequence[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, CheckpointSaved)]


def store_of(config: Config) -> CheckpointStore:
    return CheckpointStore(config.run_directory / "checkpoints")


def recorded(config: Config, name: str = "metrics") -> list[dict[str, Any]]:
    return read_lines(config.run_directory / f"{name}.jsonl")


# -- a failure anywhere --------------------------------------------------------------------------------------


KEEPING = [{}, {"every": 4}, {"every": 3, "copies_every": 1}]


@given(st.sampled_from(KEEPING), st.sets(st.integers(0, 60), min_size=1, max_size=2))
@settings(max_examples=60, deadline=None)
def test_wherever_ranks_fail_no_step_is_lost(
    tmp_path_factory: pytest.TempPathFactory, keeping: dict[str, int], places: set[int]
) -> None:
    """At one or two of all calls, from the start to the last save, also while the run recovers. Once a step
    is done, what ranks raise is a failure like others."""
    config, calls = config_of(tmp_path_factory.mktemp("run"), checkpoint=keeping), list[str]()
    failed = list[str]()

    def fails(method: str, rank: int, arguments: tuple[Any, ...]) -> None:
        calls.append(method)
        if len(calls) - 1 in places and method != "replace":
            failed.append(method)
            raise (mistaken if calls.count("train_step") > 2 and len(calls) % 2 else died)(rank)

    events = unharmed(config, fails)
    assert told(events) == ["restarted"] * len(failed)
    assert isinstance(events[-1], Finished)
    assert events[-1].complete
    saved = [0, *saves_of(events)]
    assert saved[-1] == 12
    assert max(b - a for a, b in pairwise(saved)) < 2 * keeping.get("every", 12), (
        "what was due is made up for"
    )
    if len(failed) == 1 and "copies_every" in keeping:
        assert len(steps_of(events)) == 12, "copies in memory save all steps"


# -- whose checkpoints they are ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["setup", "open_log", "data_facts"])
def test_a_run_that_replaces_another_never_reads_its_checkpoints(tmp_path: Path, method: str) -> None:
    """A rank dies before the new run is written down: until then the old one's folder is untouched."""
    config = config_of(tmp_path, checkpoint={"every": 4})
    assert losses(run(config)) == states(12)
    kept, seen = store_of(config).steps(), list[list[int]]()

    def look(name: str, rank: int, arguments: tuple[Any, ...]) -> None:
        if name == "replace":
            seen.append(store_of(config).steps())

    dying = Once(method, 1, died, rank=0 if method == "data_facts" else 1)
    new = config.changed(train={"steps": 5})
    events = run(new, all_of(dying, look), RunOptions(overwrite=True))
    assert dying.done
    assert seen == [kept] == [[8, 12]]
    assert losses(events) == states(5)
    assert store_of(config).steps() == [4, 5]
    identity: Any = read_identity(config.run_directory)
    assert {store_of(config).run_of(step) for step in (4, 5)} == {identity.mark}


def test_checkpoints_of_another_run_are_no_homes(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"every": 4})
    run(config)
    identity: Any = read_identity(config.run_directory)
    assert Homes.of(config, identity).steps() == [8, 12]
    homes = Homes.of(config, type(identity)(identity.name, "0" * 16))
    assert (homes.steps(), homes.begun()) == ([], False)
    with pytest.raises(CheckpointError, match="step-12 there is another run's"):
        homes.newest_of(config.check(BYTES_VOCABULARY))


# -- a home that is away -------------------------------------------------------------------------------------


def losing(config: Config, place: Path) -> tuple[Once, Callable[[], None]]:
    """A rank dies in step 10, and a folder of a run is gone; what brings it back."""
    aside = config.runs / ".aside"

    def gone(rank: int) -> Exception:
        place.rename(aside)
        return died(rank)

    def back() -> None:
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)

    return Once("train_step", 10, gone), back


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_run_whose_checkpoints_vanish_waits_and_never_restarts(tmp_path: Path, comes_back: bool) -> None:
    """Step 10 of 12: the newest checkpoint is of step 8."""
    config = config_of(tmp_path, checkpoint=every(4), elastic={"wait_s": 60.0 if comes_back else 0.2})
    home, back = losing(config, store_of(config).directory)
    if comes_back:
        waits = {"waiting": back}
        events = unharmed(config, home, look=lambda event: waits.get(getattr(event, "kind", ""), list)())
        assert told(events) == ["restarted", "waiting"]
        assert steps_of(events) == [*range(1, 10), *range(9, 13)]
        return
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*elastic\.wait_s"):
        run(config, home)
    back()
    assert len(recorded(config)) == 9, "nothing is cut off"
    assert losses(run(config, options=RESUME)) == states(12)[8:]


def test_a_mirror_is_gone_on_from_where_the_run_s_own_folder_is_lost(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint=every(4, mirror=str(tmp_path / "mirror")))
    home, _ = losing(config, config.run_directory)

    def wait(method: str, rank: int, arguments: tuple[Any, ...]) -> None:
        if method == "train_step" and arguments[0] == 9 and not home.done:
            while not list((tmp_path / "mirror" / config.name).glob("*/step-8/manifest.json")):
                pass

    events = unharmed(config, all_of(wait, home))
    assert steps_of(events) == [*range(1, 10), *range(9, 13)], "step 8 is in the mirror"


@pytest.mark.parametrize("copies", [0, 1])
def test_a_home_that_cannot_be_read_is_waited_for_unless_copies_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    config = config_of(tmp_path, checkpoint=every(4, copies_every=copies), elastic={"wait_s": 60.0})
    steps, dying, back = CheckpointStore.steps, Once("train_step", 10, died), list[Event]()

    def stale(self: CheckpointStore) -> list[int]:
        if dying.done and not back:
            raise OSError(116, "Stale file handle", str(self.directory))
        return steps(self)

    def look(event: Event) -> None:
        if dying.done and (getattr(event, "kind", "") == "waiting" or isinstance(event, Started)):
            back.append(event)

    monkeypatch.setattr(CheckpointStore, "steps", stale)
    events = unharmed(config, dying, look=look)
    assert told(events) == ["restarted", "waiting"][: 1 if copies else 2]


def test_a_disk_that_is_away_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ESTALE for three steps: training goes on."""
    config, exists, done = config_of(tmp_path), Path.exists, [0]

    def stale(self: Path, **named: Any) -> bool:
        if 4 <= done[-1] < 7 and self.is_relative_to(config.run_directory):
            raise OSError(116, "Stale file handle", str(self))
        return exists(self, **named)

    monkeypatch.setattr(Path, "exists", stale)
    unharmed(config, look=lambda event: done.extend(steps_of([event])))
    assert len(recorded(config)) == 12


def test_a_folder_that_is_removed_in_mid_run_is_made_anew(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"every": 100})
    unharmed(config, look=lambda event: steps_of([event]) == [6] and shutil.rmtree(config.run_directory))
    left = {path.name for path in config.run_directory.iterdir()}
    assert {"config.yaml", "run-mark", "cluster.json", "model.json", "schedule.txt", "report.json"} <= left
    assert len(recorded(config)) == 6, "steps 7 to 12"
    assert store_of(config).steps() == [12]


# -- ends that are not wanted --------------------------------------------------------------------------------


ENDS = [
    (0, "train_step", died, DIED),
    (1, "train_step", died, DIED),
    *((1, method, mistaken, "not JSON") for method in ("setup", "data_facts", "open_log")),
    (3, "replace", no_room, "no room to start"),
]


@pytest.mark.parametrize(("restarts", "method", "error", "ends"), ENDS)
def test_a_run_that_a_failure_ends_leaves_what_copies_hold(
    tmp_path: Path, restarts: int, method: str, error: Callable[[int], Exception], ends: str
) -> None:
    """9 steps are done, the newest checkpoint is of step 5; a rank dies, and then something fails as often
    as it is tried."""
    keeping = {"every": 5, "copies_every": 1}
    config = config_of(tmp_path, checkpoint=keeping, failure={"max_restarts": restarts})

    def fails(name: str, rank: int, arguments: tuple[Any, ...]) -> None:
        if name == method and (rank == 1 or method == "data_facts"):  # of rank 0 alone
            raise error(rank)

    with pytest.raises((WorkerError, NoRoomError), match=ends):
        run(config, Once("train_step", 10, died, then=fails))
    assert store_of(config).steps()[-1] == 9
    assert (store_of(config).directory / "step-9" / "state").read_text() == repr(states(9)[-1])
    assert losses(run(config, options=RESUME)) == states(12)[9:]


# -- whose mistake it is -------------------------------------------------------------------------------------


def test_what_ranks_raise_is_the_user_s_mistake_until_a_step_is_done(tmp_path: Path) -> None:
    launcher = StandInLauncher(Once("setup", 1, mistaken))
    with pytest.raises(WorkerError, match="not JSON") as caught:
        run(config_of(tmp_path), launcher)
    assert caught.value.user_error
    assert launcher.starts == 1


def test_a_controller_that_takes_over_has_no_user_to_blame(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"every": 4})
    first = controller_of(config, StandInLauncher()).run()
    while steps_of([next(first)]) != [6]:
        pass
    del first
    (config.run_directory / "events.jsonl").open("a").close()
    odd = Once("setup", 1, mistaken)
    options = RunOptions(resume=True, again=True, takes_over=True)
    assert losses(run(config, odd, options)) == states(12)[4:]
    assert odd.done


# -- planning is a part of a recovery ------------------------------------------------------------------------


def elastic_config(path: Path, **sections: Any) -> Config:
    usual = {"parallel": {"dp": 2, "tp": 2}, "elastic": {}, "checkpoint": every(1), **sections}
    return config_of(path, **{**usual, "elastic": {"max_ranks": 4, "settle_s": 0.0, **usual["elastic"]}})


def losing_a_node() -> StandInLauncher:
    """Room for 4 ranks, until one dies in step 5: then its node is gone, and there is room for 2."""

    def lost(rank: int) -> Exception:
        launcher.room = 2
        return no_room(rank)

    launcher = StandInLauncher(all_of(Once("train_step", 5, died), Once("replace", 1, lost)), room=4)
    return launcher


def test_a_node_that_is_lost_while_the_run_is_planned_anew_is_one_more_try(tmp_path: Path) -> None:
    """4 ranks, of which 3 survive; the second node is lost while these are planned for: 1 goes on."""
    launcher, tries = losing_a_node(), list[int]()

    def replan(config: Config, _: Any) -> RunPlan:
        tries.append(config.layout().ranks)
        if len(tries) == 1:
            launcher.room = 1
            raise died(0)
        return replanned(config, _)

    events = unharmed(elastic_config(tmp_path), launcher, None, replan)
    assert tries == [3, 1]
    assert launcher.groups[-1].left() == [0]
    assert told(events) == ["restarted", "resized", "restarted", "resized"]


def test_a_layout_that_planning_refuses_is_not_taken_again(tmp_path: Path) -> None:
    tries: list[int] = []

    def replan(config: Config, _: Any) -> RunPlan:
        tries.append(config.layout().ranks)
        if tries[-1] == 2:
            raise ValueError("no order fits into memory")
        return replanned(config, _)

    unharmed(elastic_config(tmp_path), losing_a_node(), None, replan)
    assert tries[-1] == 1
    assert len(tries) == len(set(tries)) + tries.count(2) - 1, "each layout once"


def test_whether_a_layout_fits_is_asked_of_the_planner(tmp_path: Path) -> None:
    """A schedule of a pipeline needs more micro-batches than stages: no layout that has too few is taken."""
    config = config_of(
        tmp_path,
        parallel={"pp": 2},
        model={"layers": 8},
        train={"global_batch": 4, "micro_batch": 2},
        overlap={"schedule": "interleaved"},
        elastic={"max_ranks": 4},
    )
    four = config.changed(parallel={"pp": 4})
    four.check(BYTES_VOCABULARY)
    with pytest.raises(ValueError, match="micro-batch"):
        run(four)
    assert can_be_planned(config, BYTES_VOCABULARY)
    assert not can_be_planned(four, BYTES_VOCABULARY)


def test_nodes_that_take_no_ranks_are_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    """They are counted as room, and placement fails each time."""

    def full(*call: Any) -> None:
        time.sleep(0.05)
        raise NoRoomError("another job holds the CPUs")

    with pytest.raises(NoRoomError, match="another job holds the CPUs"):
        run(elastic_config(tmp_path, elastic={"wait_s": 0.5}), StandInLauncher(full, room=4), None, replanned)


def test_layouts_that_trained_no_step_are_incidents_too(tmp_path: Path) -> None:
    """Machines are fewer each time ranks are to start, down to one."""
    train, elastic = {"steps": 2, "global_batch": 24}, {"min_ranks": 1}
    config = elastic_config(tmp_path, parallel={"dp": 4}, train=train, elastic=elastic, checkpoint={})

    def fewer(method: str, rank: int, arguments: tuple[Any, ...]) -> None:
        if method == "start":
            launcher.room = max(launcher.room - 1, 1)

    launcher = StandInLauncher(fewer, room=4)
    assert told(run(config, launcher, None, replanned)) == ["resized"] * 3
    lines = recorded(config, "incidents")
    assert [line["ranks"] for line in lines] == [[4, 3], [3, 2], [2, 1]]
    for line in lines:
        assert line["recovered_after_seconds"] == pytest.approx(sum(line["parts"].values()))


# -- who keeps whose copies ----------------------------------------------------------------------------------


def test_copies_change_partners_after_the_state_is_restored(tmp_path: Path) -> None:
    """Four ranks on hosts a a b b: copies go two ranks on. After rank 3 was replaced they are on a b a b, and
    the next rank is a better partner: but rank 1 has the lost rank's state."""
    config = config_of(
        tmp_path, parallel={"pp": 4}, checkpoint={"copies_every": 1, "every": 100}, model={"layers": 4}
    )
    shifts: list[int] = []

    def look(method: str, rank: int, arguments: tuple[Any, ...]) -> None:
        if method == "replace":
            launcher.groups[-1].hosts = ["a", "b", "a", "b"]
        if method == "pair_copies" and rank == 0:
            shifts.append(arguments[0])

    launcher = StandInLauncher(all_of(Once("train_step", 6, died, rank=3), look), hosts=("a", "a", "b", "b"))
    assert len(steps_of(unharmed(config, launcher))) == 12, "no step was lost"
    assert shifts == [1], "on hosts a b a b the next rank is on the other host"


# -- stopping ------------------------------------------------------------------------------------------------


def stopped_at_setup(config: Config, dying: Once | None = None) -> list[Event]:
    """A run that is stopped when ranks are set up; perhaps again, after one of them has died."""

    def stop(rank: int) -> Exception:
        controller.stop()
        return StoppedError()

    at_setup = Once("setup", 1, stop, rank=0)
    if dying is not None:
        dying.then = at_setup
    controller = controller_of(config, StandInLauncher(dying or at_setup))
    return list(controller.run())


def test_a_run_that_is_stopped_before_it_begins_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(StoppedError):
        stopped_at_setup(config)
    assert not config.run_directory.exists()


def test_a_run_that_is_stopped_in_a_recovery_leaves_its_newest_state(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"every": 100, "copies_every": 1})
    assert saves_of(stopped_at_setup(config, Once("train_step", 6, died))) == [5]
    assert losses(run(config, options=RESUME)) == states(12)[5:]


def test_a_stop_in_a_recovery_says_what_is_lost_and_is_never_complete(tmp_path: Path) -> None:
    """All steps are done, and a rank dies in the last save: without copies the newest state is gone."""
    events = stopped_at_setup(config_of(tmp_path, checkpoint={"every": 5}), Once("begin_save", 3, died))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert not finished.report["complete"]
    texts = [event.text for event in events if isinstance(event, Incident)]
    assert texts[-1] == "stopped in a recovery; the newest checkpoint is of step 10, 12 were done"


# -- checkpoints that are late, lost or elsewhere ------------------------------------------------------------


def refusing(monkeypatch: pytest.MonkeyPatch, error: Exception, before: int = 13) -> None:
    """No checkpoint of a step before this one can be written."""
    publish = CheckpointStore.publish

    def refuses(self: CheckpointStore, *arguments: Any, **named: Any) -> Path:
        if named["step"] < before:
            raise error
        return publish(self, *arguments, **named)

    monkeypatch.setattr(CheckpointStore, "publish", refuses)


@pytest.mark.parametrize("error", [MirrorError("no mirror"), NotADirectoryError(20, "Not a directory")])
def test_a_rescue_that_no_disk_takes_is_told_and_does_not_hide_why_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    config = config_of(tmp_path, checkpoint={"copies_every": 1}, failure={"max_restarts": 0})
    refusing(monkeypatch, error)
    with pytest.raises(WorkerError, match=DIED):
        run(config, Once("train_step", 7, died))
    texts = [line.get("text", "") for line in recorded(config, "events")]
    assert any(f"copies in memory could not be written as a checkpoint: {error}" in text for text in texts)


def test_a_last_checkpoint_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, OSError(116, "Stale file handle"))
    says = r"step 12 is done, but its checkpoint failed \(.*Stale file handle"
    with pytest.raises(CheckpointError, match=says):
        run(config_of(tmp_path))


def test_growth_that_cannot_be_saved_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: training goes on with the ranks that there are."""
    refusing(monkeypatch, OSError(28, "No space left on device"), before=12)
    monkeypatch.setattr(elastic, "_NODES_SECONDS", 0.0)
    monkeypatch.setattr(elastic, "_GUESSED_COST_S", -1.0)

    def replan(config: Config, _: Any) -> RunPlan:
        raise AssertionError("there is no checkpoint to go on from")

    config = elastic_config(tmp_path, parallel={}, checkpoint=every(100))
    assert "save-failed" in told(unharmed(config, StandInLauncher(room=4), None, replan))


def test_a_rescued_checkpoint_comes_to_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though that takes a while."""
    put = Mirror.put
    monkeypatch.setattr(Mirror, "put", lambda *given: (time.sleep(0.5), put(*given)))
    keeping = {"copies_every": 1, "mirror": str(tmp_path / "mirror")}
    config = config_of(tmp_path, checkpoint=keeping, failure={"max_restarts": 0})
    with pytest.raises(WorkerError, match=DIED):
        run(config, Once("train_step", 7, died))
    assert list((tmp_path / "mirror" / config.name).glob("*/step-6/manifest.json"))


def test_runs_of_one_mirror_go_on_from_their_own_checkpoints(tmp_path: Path) -> None:
    """Two runs save there; their disk is lost, as a volume may be, and they are started again by themselves,
    as the first time: whoever does that need not know whether a run has begun."""
    mirror, again = tmp_path / "mirror", RunOptions(resume=True, again=True)
    keeping = {"every": 2, "keep": 2, "mirror": mirror.as_uri()}
    configs = [
        config_of(tmp_path / "runs", train={"steps": 10, "seed": seed}, checkpoint=keeping).model_copy(
            update={"name": name}
        )
        for seed, name in enumerate(("a", "b"))
    ]

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in mirror.rglob("*") if path.is_file()}

    with pytest.raises(ConfigError, match=r"no run in .* to resume"):
        run(configs[0], options=RESUME)
    for config, until in zip(configs, (4, 6), strict=True):
        assert losses(run(config, options=replace(again, until=until))) == states(until)
    before = files()
    shutil.rmtree(tmp_path / "runs")
    for config, until in zip(configs, (4, 6), strict=True):
        events = run(config, options=again)
        (started,) = [event for event in events if isinstance(event, Started)]
        assert f"step {until} is read from {mirror.as_uri()}" in " ".join(started.notes)
        assert losses(events) == states(10)[until:]
        others = {path: content for path, content in before.items() if f"/{config.name}/" not in path}
        assert others.items() <= files().items(), "the other run's files are as they were"
        before = files()
    assert losses(run(configs[0], options=again)) == [], "nothing is left to do"
