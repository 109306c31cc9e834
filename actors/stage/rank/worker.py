"""One rank: mesh, model, executor, optimizer, data, checkpoints. Runs in a Ray actor or a plain process."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from braid.actors.stage.data.samples import ReplicaSamples, documents_to_measure
from braid.actors.stage.files.digests import damage_in_share
from braid.actors.stage.measure.kernel_uses import KernelChoice
from braid.actors.stage.measure.memory import PeakMemory, held_bytes
from braid.actors.stage.measure.profiling import Profiler
from braid.actors.stage.measure.span_stream import Sink, SpanStream
from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.measure.torch_profile import TorchProfile
from braid.actors.stage.model.routing import ChoicesMade
from braid.actors.stage.rank.allocator import keep_freed_memory, set_aside_what_lasts
from braid.actors.stage.rank.assembly import Assembly, assemble, join
from braid.actors.stage.rank.clocks import clock_ahead_ns
from braid.actors.stage.rank.devices import hardware, set_arithmetic
from braid.actors.stage.rank.faults import Saboteur
from braid.actors.stage.rank.groups import Mesh, TorchGroups
from braid.actors.stage.rank.interface import Pulse, Rank
from braid.actors.stage.rank.log import Logged
from braid.actors.stage.rank.membership import Membership
from braid.actors.stage.rank.messages import (
    CopiesHeld,
    Rendezvous,
    Rescue,
    RunPlan,
    Samples,
    StepResult,
    Written,
)
from braid.actors.stage.run.accelerator import accelerator_of
from braid.actors.stage.run.executor import Executor
from braid.actors.stage.state.checkpoint import Saves, held_slices, load_checkpoint, save_group, write_slices
from braid.actors.stage.state.copies import Copies
from braid.actors.stage.state.exchange import load_initial
from braid.scheduling.generate.lower import validation_schedule
from braid.scheduling.schedule.operations import Operation
from braid.scheduling.schedule.validate import linked


class Worker(Logged, Rank):
    """A rank of a run; `Rank` documents its methods."""

    def __init__(self, rank: int, address: str) -> None:
        keep_freed_memory()
        self.rank = rank
        self.address = address
        self.spans: Sink | None = None
        """Receiver of this rank's spans; the process that the rank runs in sets it."""
        self._stream: SpanStream | None = None
        self._membership = Membership(address)
        self._kernels = KernelChoice()
        self._assembly: Assembly | None = None
        self._evaluator: Executor | None = None
        self._copies = Copies()
        self._saves: Saves | None = None
        self._samples: ReplicaSamples | None = None
        self._profile: TorchProfile | None = None

    def pulse(self) -> Pulse:
        """Answer `Rank.pulse`; this method and `interrupt` are called from another thread."""
        self._membership.use_device()
        if (saves := self._saves) is not None and (awaited := saves.awaited) is not None:
            return Pulse(awaited.read())
        parts = self._assembly
        return Pulse(None) if parts is None else Pulse(*parts.recorder.pulse())

    def interrupt(self, generation: int | None = None) -> None:
        self._membership.break_off(generation)

    def open_store(self, timeout_s: float) -> int:
        return self._membership.host_store(timeout_s)

    def setup(self, plan: RunPlan, rendezvous: Rendezvous) -> str:
        config = plan.config
        self._config, self._shape = config, plan.shape
        cluster = config.cluster
        torch.set_num_threads(cluster.threads_per_rank)
        set_arithmetic(deterministic=config.train.deterministic, tf32=config.train.tf32)
        timeout = timedelta(seconds=cluster.group_timeout_s)
        self._layout = layout = config.layout()
        self._membership.begin(cluster, self.rank, rendezvous)
        self._membership.join(cluster, rendezvous, self.rank, layout.ranks)
        groups = TorchGroups(self.rank, timeout, cluster.nccl)
        mesh = join(plan, self.rank, rendezvous.hosts, groups)
        if plan.data:
            place, sequence = mesh.place, plan.shape.sequence
            chunks = layout.chunks_of(place.position["pp"])
            self._samples = ReplicaSamples(
                Path(plan.data), config, sequence, layout, place, chunks, self._membership.device
            )
        self._build(plan, mesh)
        self._parts.recorder.set_clock(clock_ahead_ns(self.rank, rendezvous.hosts, mesh.groups))
        if config.checkpoint.copies_every:
            self.pair_copies(rendezvous.copies_shift)
        self._saves = Saves(self._parts.optimizer, save_group(timeout))
        self._membership.connected(cluster.emulated_link_mbit)
        self._memory = PeakMemory(self._device)
        return self._kernels.told

    @property
    def _parts(self) -> Assembly:
        """The objects that this rank trains with; they exist from `setup` to `leave`."""
        assert self._assembly is not None, "the rank has not been set up"
        return self._assembly

    @property
    def _device(self) -> torch.device:
        return self._membership.device

    def _build(self, plan: RunPlan, mesh: Mesh) -> None:
        layout, device = self._layout, self._device
        self._profile = profile = TorchProfile(plan.config, self.rank, device, os.environ)
        parts = assemble(plan, mesh, device, accelerator_of(device), self._kernels, profile.around)
        self._assembly, self._model_of = parts, parts.model_of
        initial, frozen = plan.config.model.initial, parts.buckets.frozen
        if initial is not None and frozen:  # checkpoints and copies hold what is trained
            load_initial(initial, plan.shape, ((shard.tensor, shard.slices) for shard in frozen))
        self._membership.graph = parts.executor.graph
        parts.executor.ended = partial(parts.recorder.meet, self.rank, parts.told_along)
        if self._samples is not None and (count := self._samples.validation_micro_batches):
            validation = validation_schedule(layout, parts.sizes.kinds, count, parts.parts)
            code = linked(validation, layout, parts.sizes.kinds, parts.parts)
            self._evaluator = parts.bind(code, recorder=parts.recorder)
        stage = parts.code.stages[mesh.position["pp"]]
        self._saboteur = Saboteur(plan.faults, self.rank, plan.config.run_directory, stage)
        set_aside_what_lasts()

    # -- steps -------------------------------------------------------------------------------------------

    def train_step(self, step: int) -> StepResult:
        assert self._profile is not None
        with self._profile.step(step + 1):
            return self._train_step(step)

    def _train_step(self, step: int) -> StepResult:
        begin = time.perf_counter()
        self._memory.begin()
        assert self._samples is not None
        batches = self._samples.of_step(step)
        batch, discarded = self._config.train.global_batch, 0
        executor = self._parts.executor
        executor.before = self._saboteur.before(step, self._parts.buckets)
        executor.transfers = self._saboteur.transfers(step)
        while True:
            update = self._parts.optimizer.begin(step, self._membership.intact)
            loss_sum = executor.run(batches, 1.0 / (batch * self._shape.sequence), update)
            if update.applied or discarded or self._config.failure.on_nan != "retry":
                break
            discarded += 1
        every = self._config.checkpoint.copies_every
        self._membership.intact()
        if update.applied and every and (step + 1) % every == 0:
            self.keep_copy(step + 1)
        first = not any(self._parts.mesh.place.on(axis) for axis in ("tp", "cp", "pp"))
        seconds = time.perf_counter() - begin
        records = self._parts.recorder.records()
        if self._stream is not None and self._parts.recorder.recording:
            self._stream.put(self._parts.recorder.labels, records, step)
        return StepResult(
            loss_sum=loss_sum if self._parts.model.tells_loss else 0.0,
            gradient_norm=update.gradient_norm,
            lr=update.lr,
            seconds=seconds,
            applied=update.applied,
            samples=self._samples.digest() if first else 0,
            discarded=discarded + (not update.applied),
            overlap=self._parts.recorder.numbers(records),
            dropped_spans=self._stream.dropped if self._stream else 0,
            sampled_every=self._stream.every if self._stream else 1,
            peak_bytes=self._memory.of_step(),
            lifetime_peak_bytes=self._memory.of_lifetime(),
            routing=self._parts.executor.routed,
        )

    def validate(self) -> tuple[float, ...]:
        assert self._samples is not None
        assert self._evaluator is not None
        batches = self._samples.of_validation()
        self._evaluator.run(batches, 0.0)
        # another rank has the same losses if this one does not tell its own
        losses = self._evaluator.losses if self._parts.model.tells_loss else {}
        return self._samples.sums_by_set(batches, losses)

    def data_facts(self) -> dict[str, Any]:
        assert self._samples is not None
        return self._samples.facts()

    def profile(self, rounds: int, seed: int) -> Samples:
        documents = documents_to_measure(self._samples, self._config, self._parts.model.context)
        recorder, choices_made = Recorder(self._parts.streams), ChoicesMade(self._parts.model)
        if choices_made.wanted and self._samples is not None:
            self._run_again(self._parts.bind(self._parts.code, recorder=recorder, routing=choices_made), 0)
        profiler = Profiler(
            self._parts.parts,
            self._parts.model,
            self._parts.mesh,
            self._parts.streams,
            seed,
            documents,
            choices_made.choices,
        )
        samples = profiler.run(rounds, self._parts.buckets.square, self._parts.optimizer.step)
        self._parts.buckets.zero()
        return samples

    def activation_bytes(self, step: int) -> int:
        peak = 0

        def watch(operation: Operation) -> None:
            nonlocal peak
            peak = max(peak, held_bytes(executor.held(), self._parts.buckets.passing))

        executor = self._parts.bind(self._parts.code, recorder=Recorder(self._parts.streams), watch=watch)
        self._run_again(executor, step)
        return peak

    def _run_again(self, executor: Executor, step: int) -> None:
        assert self._samples is not None
        tokens = self._config.train.global_batch * self._shape.sequence
        executor.run(self._samples.of_step(step), 1.0 / tokens)
        self._parts.buckets.zero()

    def stream_spans(self, target: Any, generation: int) -> None:
        """Stream the spans of all further steps to a collector; ``target`` is not used here, as the process
        has a connection (`spans`).
        """
        if self._config.telemetry.spans:
            self._stream = SpanStream(self.rank, generation, self._span_sink(target))

    def _span_sink(self, target: Any) -> Sink:
        assert self.spans is not None, "whoever starts a process sets it"
        return self.spans

    def record_spans(self, on: bool) -> None:
        self._parts.recorder.recording = on

    # -- copies in memory and checkpoints ------------------------------------------------------------------

    def keep_copy(self, step: int) -> None:
        self._copies.keep(self._parts.optimizer, step)

    def pair_copies(self, shift: int) -> None:
        megabytes, layout = self._config.checkpoint.copies_mb, self._layout
        limit = megabytes << 20 if megabytes is not None else None
        timeout = timedelta(seconds=self._config.cluster.group_timeout_s)
        self._copies.join(self._parts.optimizer, layout, layout.mesh, shift, limit, timeout)

    def copies_held(self) -> CopiesHeld:
        return self._copies.held()

    def restore_copies(self, step: int, sources: Sequence[int]) -> None:
        self._parts.buckets.settle()
        self._copies.restore(self._parts.optimizer, step, sources)

    def rescue(self, directory: str, plan: Rescue) -> Written:
        number = plan.survivors.index(self.rank)
        self._membership.join(self._config.cluster, plan.meeting, number, len(plan.survivors))
        states = self._config.train.states
        slices = held_slices(self._copies, self.rank, plan, self._layout.mesh, self._model_of, states)
        written = write_slices(Path(directory), slices)
        self.leave()
        return Written(files=written)

    def begin_save(self, directory: str, step: int, again: bool = False) -> None:
        assert self._saves is not None
        if not again:
            self._saves.take(step)
            self._saboteur.during_save(step, Path(directory))
        self._saves.begin(Path(directory))

    def save_finished(self, wait: bool) -> Written | None:
        assert self._saves is not None
        return self._saves.finished(wait=wait, intact=self._membership.intact)

    def save(self, directory: str, step: int) -> Written:
        assert self._saves is not None
        self._saboteur.during_save(step, Path(directory))
        return self._saves.save(Path(directory))

    def damage(self, directory: str) -> str | None:
        return damage_in_share(Path(directory), self.rank, self._layout.ranks)

    def load(self, directory: str, step: int) -> None:
        self._parts.buckets.settle()
        load_checkpoint(Path(directory), self._parts.optimizer, step)

    def load_initial(self, directory: str) -> None:
        self._parts.buckets.settle()
        optimizer = self._parts.optimizer
        shards = (shard.slices for shard in optimizer.shards)
        load_initial(Path(directory), self._shape, zip(optimizer.masters, shards, strict=True))
        optimizer.restored(0)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and local slice of every parameter that this rank updates, for tests and exports."""
        for shard in self._parts.optimizer.shards:
            for piece in shard.slices:
                yield piece.source.name, piece.of_local(shard.tensor)

    def close(self) -> None:
        if self._assembly is not None and not self._membership.broken:
            self._parts.buckets.settle()
            if self._profile is not None:
                self._profile.end()
        self._release()

    def leave(self) -> None:
        self._release()
        # Objects of a step form reference cycles, and torch's checkpointing holds the group of a failed save.
        gc.unfreeze()
        gc.collect()

    def _release(self) -> None:
        if self._profile is not None:
            self._profile.end(broken=True)
            self._profile = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._samples is not None:
            self._samples.close()
            self._samples = None
        if self._assembly is not None:
            self._assembly.streams.close()
        self._saves = None
        self._membership.leave()
        self._assembly = self._evaluator = None  # the next generation needs their memory

    def hardware(self) -> str:
        return hardware(self._device)

    def process_id(self) -> int:
        return os.getpid()
