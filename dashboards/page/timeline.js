// The timeline: three lanes per rank, drawn on a canvas that stays in place while its box scrolls. Only rows in view are
// drawn, and of spans that share a pixel one rectangle; so the number of ranks and of operators hardly matters.

import { el, fitted, nanoseconds, percent, tell, ticks } from "./dom.js";
import { describeInterval, describeNumbers, describeSpan, LANES, spanAt } from "./spans.js";

const [AXIS, STRIP, END] = [22, 7, 10]; // heights of axis and strip of waits, free width at the right, in pixels
const WIDEST = 15_000_000; // pixels of a box that every browser can scroll
const STRANDS = ["neither", "alpha", "beta"].map((strand) => ["", "-forward", "-backward"].map((way) => `${strand}${way}`));
const COLOURS = [...STRANDS.flat(), "card", "row", "line", "ink", "quiet", "hurt", "stripe", "wash", "peer", "dot", "block", "paired"];

export class Timeline {
  /** `box` scrolls a `room`, as large as the whole drawing, in which a canvas sticks to the visible part. */
  constructor(box, run, { redraw, stepChanged }) {
    Object.assign(this, { box, run, redraw, stepChanged });
    this.room = box.firstElementChild;
    this.canvas = this.room.firstElementChild;
    this.chosen = null; // a step; null: follow the newest
    this.drawn = null; // a completely loaded step, drawn until the next one is loaded
    this.next = null; // the step that is being loaded
    this.count = 1;
    this.scale = 1; // how many times as wide as the window a step is drawn
    this.whole = null; // nanoseconds that are drawn
    this.picked = null;
    box.addEventListener("scroll", redraw);
    box.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
    this.canvas.lines = (x, y) => {
      const hit = this.hit(x, y);
      return hit && this.describe(hit);
    };
    this.recolour();
  }

  /** Take the colours of style.css, which a canvas cannot name. */
  recolour() {
    const probe = this.box.appendChild(el("i"));
    this.colours = {};
    for (const name of COLOURS) {
      probe.style.color = `var(--${name})`;
      this.colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    this.redraw();
  }

  get step() {
    return this.chosen ?? this.run.traced.at(-1) ?? null;
  }

  /** Go to a step; null, or a number past the newest step, means to follow the newest. */
  choose(step) {
    const [first, last] = [this.run.traced[0], this.run.traced.at(-1)];
    if (last === undefined) return;
    this.chosen = step === null || step > last ? null : Math.max(first, step);
    this.picked = this.next = null;
    this.stepChanged();
    this.redraw();
  }

  /** Show `count` steps, by default as many as before, from begin to end. */
  show(count = this.count) {
    Object.assign(this, { count, scale: 1 });
    this._fit();
    this.redraw();
  }

  get rankCount() {
    return Math.max(1, this.run.state?.cluster.ranks.length || 0, this.run.ranks?.line?.seconds?.length || 0);
  }

  /** Height of a lane; the fewer ranks, the higher. */
  get lane() {
    return [[2, 22], [4, 16], [16, 12]].find(([most]) => this.rankCount <= most)?.[1] ?? 8;
  }

  get row() {
    return 3 * this.lane + STRIP + 10;
  }

  get scroll() {
    return this.box.scrollTop;
  }

  get width() {
    return this.box.clientWidth;
  }

  /** Width reserved for names; smaller in a narrow window. */
  get gutter() {
    return this.width < 600 ? 120 : 176;
  }

  /** Pixels over which the drawn time extends. */
  get extent() {
    return (this.width - this.gutter - END) * this.scale;
  }

  reveal(rank) {
    this.box.scrollTop = rank * this.row - 20;
  }

  /** Return the first step in view if a given step is the last. */
  _first(step) {
    return Math.max(this.run.traced[0], step - this.count + 1);
  }

  /** Return whether the columns of all ranks in view are loaded for a step; request missing ones. */
  _isWhole(step, ranks) {
    let whole = true;
    for (let at = this._first(step); at <= step; at += 1) {
      for (const rank of ranks) whole = Boolean(this.run.step(at, rank)) && whole;
    }
    return whole;
  }

  /** Draw a step once it is completely loaded, and only then ask for a newer one: steps may come faster than columns. */
  _advance(ranks) {
    if (!(this.next >= this.run.traced[0] && this.next <= this.step)) this.next = this.step;
    if (this._isWhole(this.next, ranks)) {
      this.drawn = this.next;
      this.next = this.step;
      this._isWhole(this.next, ranks);
    }
    if (this.drawn > this.step || this.drawn < this.run.traced[0]) this.drawn = null;
  }

  /** Return the steps in view with the nanoseconds at which they begin; the first one is at 0. */
  steps(rank) {
    if (this.drawn === null) return [];
    const first = this._first(this.drawn);
    const origin = this.run.held(first, Math.floor(this.scroll / this.row))?.begin_ns;
    const steps = [];
    for (let step = first; step <= this.drawn; step += 1) {
      const data = this.run.held(step, rank);
      if (data && !data.missing) steps.push({ data, at: origin ? Number(BigInt(data.begin_ns) - BigInt(origin)) : 0 });
    }
    return steps;
  }

  /** Give box and room their sizes. */
  _fit() {
    const all = AXIS + this.rankCount * this.row + 4;
    const most = AXIS + Math.max(260, Math.min(620, window.innerHeight * 0.62));
    const bar = this.box.offsetHeight - this.box.clientHeight;
    this.box.style.height = `${Math.min(all, most) + bar}px`;
    this.room.style.height = `${all}px`;
    this.room.style.width = `${this.gutter + this.extent + END}px`;
  }

  /** Make the canvas as large as the visible part of the box; return its context in CSS pixels. */
  _surface() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.width, this.box.clientHeight];
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.context = this.canvas.getContext("2d");
    this.context.scale(ratio, ratio);
    Object.assign(this.context, { font: "11px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", textBaseline: "middle" });
    this._box("card", 0, 0, width, height);
    return height;
  }

  _box(paint, ...box) {
    this.context.fillStyle = this.colours[paint] ?? paint;
    this.context.fillRect(...box);
  }

  _write(text, x, y, colour = "quiet", align = "left") {
    this.context.fillStyle = this.colours[colour] ?? colour;
    this.context.textAlign = align;
    this.context.fillText(text, x, y);
  }

  draw() {
    this._fit();
    const height = this._surface();
    if (this.step === null) {
      this._write("No spans yet: they come with the first step (telemetry.spans: true).", 12, 40);
      return;
    }
    const firstRank = Math.floor(this.scroll / this.row);
    const lastRank = Math.min(this.rankCount - 1, Math.floor((this.scroll + height - AXIS) / this.row));
    const ranks = Array.from({ length: lastRank - firstRank + 1 }, (_, n) => firstRank + n);
    this._advance(ranks);
    const rows = ranks.map((rank) => ({ rank, steps: this.steps(rank) }));
    const ends = rows.flatMap(({ rank, steps }) => steps.map(({ data, at }) => at + (data.ranks.get(rank)?.over ?? 0)));
    if (ends.length) this.whole = Math.max(...ends) * 1.004;
    if (this.whole) {
      this._paintAxis(height);
      this._clip(0, AXIS, this.width, height - AXIS);
      const diagonal = Array.from({ length: 9 }, (_, n) => [n - 1, 7 - n]);
      const paints = { exposed: this._pattern(8, "hurt", "stripe", diagonal), waits: this._pattern(5, "peer", "dot", [[1, 1], [1, 2]]) };
      for (const { rank, steps } of rows) this._paintRank(rank, steps, paints);
      this.context.restore();
    }
    if (!ends.length) this._write(this.drawn === null ? "loading …" : `No spans are kept of step ${this.drawn}.`, this.gutter + 12, 40);
  }

  /** Make a pattern of a square tile, with dots two pixels wide. */
  _pattern(size, back, colour, dots) {
    const tile = el("canvas", { width: size, height: size });
    const brush = tile.getContext("2d");
    brush.fillStyle = this.colours[back];
    brush.fillRect(0, 0, size, size);
    brush.fillStyle = this.colours[colour];
    for (const [x, y] of dots) brush.fillRect(x, y, 2, 1);
    return this.context.createPattern(tile, "repeat");
  }

  /** Clip drawing to a box, until `context.restore`. */
  _clip(...box) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(...box);
    this.context.clip();
  }

  x(time) {
    return this.gutter + (time / this.whole) * this.extent - this.box.scrollLeft;
  }

  time(x) {
    return ((x - this.gutter + this.box.scrollLeft) / this.extent) * this.whole;
  }

  _paintAxis(height) {
    const [from, to] = [this.time(this.gutter), this.time(this.width)];
    for (const value of ticks(from / 1e9, to / 1e9, (this.width - this.gutter) / 110)) {
      const x = Math.round(this.x(value * 1e9));
      this._box("line", x, AXIS - 5, 1, height);
      this._write(nanoseconds(value * 1e9), Math.min(x, this.width - 24), 8, "quiet", "center");
    }
    const shown = this.drawn ?? this.step;
    this._write(this.count > 1 ? `steps ${this._first(shown)} to ${shown}` : `step ${shown}`, 8, 8);
  }

  _paintRank(rank, steps, paints) {
    const { row, lane, width } = this;
    const top = AXIS + rank * row - this.scroll;
    this._box(rank % 2 ? "card" : "row", 0, top, this.gutter, row);
    this._paintGutter(rank, steps, top);
    this._clip(this.gutter, top, width - this.gutter, row);
    for (const { data, at } of steps) {
      const columns = data.ranks.get(rank);
      if (!columns) continue;
      for (const [, left, right] of this._inView(columns.exposed, at)) this._box("wash", left, top + 3, Math.max(1, right - left), 3 * lane);
      this._paintWaits(columns.exposed, at, top, "hurt", paints.exposed);
      this._paintWaits(columns.waits, at, top, "peer", paints.waits);
      columns.lanes.forEach((spans, number) => this._paintLane(data, columns, spans, at, top + 3 + number * lane));
      for (const [index, left, right] of this._inView(columns.blocks, at)) {
        const paired = columns.blocks.kind[index] === 2;
        this._box(paired ? "paired" : "block", left, top + 0.5, Math.max(1, right - left - 1), paired ? 2 : 1);
      }
      if (this.count > 1) this._box("quiet", Math.round(this.x(at)), top, 1, row);
    }
    this.context.restore();
  }

  _paintGutter(rank, steps, top) {
    const { lane, gutter } = this;
    const place = this.run.state?.cluster.ranks[rank]?.place;
    const numbers = steps.at(-1)?.data.ranks.get(rank)?.numbers;
    const slow = this.run.ranks?.stragglers.some((straggler) => straggler.rank === rank);
    this._write(`${slow ? "⚠ " : ""}rank ${rank}`, 8, top + 11, slow ? "hurt" : "ink");
    if (numbers?.communication_ns) this._write(`${percent(numbers.hidden_ns / numbers.communication_ns)} hidden`, 8, top + 25);
    if (lane < 12) return;
    if (place?.pp !== undefined) this._write(`stage ${place.pp}`, 8, top + 39);
    LANES.forEach((name, number) => this._write(gutter < 150 ? name.split("-")[0] : name, gutter - 8, top + 3 + (number + 0.5) * lane, "quiet", "right"));
    this._write("waits", gutter - 8, top + 4 + 3 * lane + STRIP / 2, "hurt", "right");
  }

  /** Yield the intervals in view, in order of their begin, as [index, left, right]; one of all that share a pixel. */
  *_inView({ start, end }, at, indices = start.keys()) {
    const [from, to] = [this.time(this.gutter), this.time(this.width)];
    const [zero, scale] = [this.x(0), this.extent / this.whole];
    let covered = -Infinity; // pixels up to here are drawn
    for (const index of indices) {
      if (end[index] + at < from || start[index] + at > to) continue;
      const left = zero + (start[index] + at) * scale;
      const right = zero + (end[index] + at) * scale;
      if (right - left < 1 && Math.floor(left) <= covered) continue;
      covered = right - left < 1 ? Math.floor(left) : Math.floor(right) - 1;
      yield [index, left, right];
    }
  }

  _paintLane(data, { spans }, lane, at, top) {
    const height = this.lane - 1;
    for (const [span, left, right] of this._inView(spans, at, lane)) {
      const colour = STRANDS[spans.strand[span]][spans.direction[span]];
      const x = right - left < 1 ? Math.floor(left) : Math.max(left, this.gutter - 2);
      const wide = right - left < 1 ? 1 : Math.min(right, this.width) - x;
      this._box(colour, x, top, wide > 3 ? wide - 0.6 : wide, height);
      const ink = colour.endsWith("backward") ? "#ffffff" : "#101820";
      if (this.lane >= 12 && wide > 26) this._write(fitted(data.labels[spans.label[span]].operator, wide), x + 3, top + height / 2 + 0.5, ink);
      if (this.picked?.span === span && this.picked.columns.spans === spans) {
        Object.assign(this.context, { strokeStyle: this.colours.ink, lineWidth: 2 });
        this.context.strokeRect(x + 1, top + 1, Math.max(2, wide - 2), height - 2);
      }
    }
  }

  _paintWaits(intervals, at, top, plain, pattern) {
    for (const [, left, right] of this._inView(intervals, at)) {
      const wide = Math.max(1, right - left);
      this._box(wide < 4 ? plain : pattern, left, top + 3 + 3 * this.lane, wide, STRIP);
    }
  }

  /** Return what lies at a point of the canvas. */
  hit(x, y) {
    if (this.step === null || !this.whole || y < AXIS) return null;
    const rank = Math.floor((y - AXIS + this.scroll) / this.row);
    if (rank >= this.rankCount) return null;
    const steps = this.steps(rank);
    if (x < this.gutter) return { rank, steps };
    const lane = Math.floor((y - AXIS + this.scroll - rank * this.row - 3) / this.lane);
    const time = this.time(x);
    const slack = (this.time(x + 1) - time) * 0.75;
    for (const { data, at } of steps) {
      const columns = data.ranks.get(rank);
      if (!columns) continue;
      const span = spanAt(columns.spans, time - at, slack, columns.lanes[lane] ?? []);
      if (span !== null) return { rank, data, columns, span, at };
      for (const kind of ["exposed", "waits"]) {
        const index = spanAt(columns[kind], time - at, slack);
        if (index !== null) return { rank, data, kind, index };
      }
    }
    return null;
  }

  /** Return lines about what was hit. */
  describe(hit) {
    if (hit.kind) return describeInterval(hit);
    if (hit.span !== undefined) return describeSpan(hit);
    const { node, place = {} } = this.run.state?.cluster.ranks[hit.rank] ?? {};
    const where = Object.entries(place).map(([axis, at]) => `${axis} ${at}`).join(", ");
    const { numbers = {}, dropped, damage } = hit.steps.at(-1)?.data.ranks.get(hit.rank) ?? {};
    const told = describeNumbers((name) => numbers[`${name}_ns`] && numbers[`${name}_ns`] / 1e9);
    return [`rank ${hit.rank}`, `node: ${node}`, `place: ${where}`, ...told, dropped && `spans dropped: ${dropped}`, damage && `damaged: ${damage}`].filter(Boolean);
  }

  /** Pick the operator before or after the picked one, on the same rank and lane. */
  pick(by) {
    const rank = this.picked?.rank ?? Math.ceil(this.scroll / this.row);
    const { data, at, span: before } = this.picked ?? this.steps(rank).at(-1) ?? {};
    const columns = data?.ranks.get(rank);
    if (!columns) return;
    const { start, end, label } = columns.spans;
    const lane = columns.lanes[before === undefined ? 0 : data.labels[label[before]].lane];
    const from = this.time(this.gutter);
    const next = before === undefined ? lane.findIndex((span) => end[span] + at >= from) : lane.indexOf(before) + by;
    const span = lane[next];
    if (span === undefined) return;
    this.picked = { rank, data, columns, at, span };
    const [left, right] = [this.x(start[span] + at), this.x(end[span] + at)];
    if (left < this.gutter || right > this.width) this.box.scrollLeft += left - (this.gutter + this.width) / 2;
    const { x, y } = this.canvas.getBoundingClientRect();
    tell(this.describe(this.picked), x + this.x(end[span] + at), y + AXIS + (rank + 1) * this.row - this.scroll);
    this.redraw();
  }

  /** Zoom in (a factor above 1) or out; what lies at `x` stays there. */
  zoom(factor, x = (this.gutter + this.width) / 2) {
    const time = this.time(x);
    this.scale = Math.max(1, Math.min(WIDEST / this.width, this.scale * factor));
    this._fit();
    this.box.scrollLeft += this.x(time) - x;
    this.redraw();
  }

  _wheel(event) {
    if (!this.whole || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    this.zoom(Math.exp(-Math.sign(event.deltaY) * Math.min(60, Math.abs(event.deltaY)) * 0.006), event.clientX - this.box.getBoundingClientRect().x);
  }
}
