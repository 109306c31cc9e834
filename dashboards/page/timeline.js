// The timeline: three lanes per rank, drawn on a canvas. Only rows in view are drawn, and of spans that share a
// pixel one rectangle; so the number of ranks and of operators hardly matters.

import { RANKS_AT_ONCE } from "./data.js";
import { hideTip, nanoseconds, percent, showTip, stroke, surface, ticks, write } from "./dom.js";
import { describeInterval, describeSpan, intervalAt, LANES, numberRows, SHORT_LANES, spanAt, spoken } from "./spans.js";
import { dotted, stripes, theme } from "./theme.js";

const [AXIS, STRIP] = [22, 7];
const SIZES = [3, 5, 8, 12, 16, 22, 30];

/** Return the first rank of every server answer that contains some of these ranks. */
function chunksOf(first, last) {
  const found = [];
  for (let rank = Math.floor(first / RANKS_AT_ONCE) * RANKS_AT_ONCE; rank <= last; rank += RANKS_AT_ONCE) found.push(rank);
  return found;
}

export class Timeline {
  constructor(canvas, run, { redraw, read, stepChanged }) {
    Object.assign(this, { canvas, run, redraw, read, stepChanged });
    this.chosen = null; // a step; null: follow the newest
    this.drawn = null; // the newest completely loaded step, drawn until the next one is loaded
    this.count = 1;
    this.view = null; // [from, to] in nanoseconds; null: everything
    this.scroll = 0;
    this.size = null; // height of a lane, as index into SIZES; null: according to the number of ranks
    this.picked = null;
    this._listen();
  }

  get step() {
    return this.chosen ?? this.run.traced.at(-1) ?? null;
  }

  /** Width reserved for names; smaller in a narrow window. */
  get gutter() {
    return this.narrow ? 120 : 176;
  }

  get narrow() {
    return this.canvas.clientWidth < 600;
  }

  /** Go to a step; a number past the newest step means to follow the newest. */
  choose(step) {
    const [first, last] = [this.run.traced[0], this.run.traced.at(-1)];
    if (last === undefined) return;
    this.chosen = step === null || step > last ? null : Math.max(first, step);
    this.picked = null;
    this.stepChanged();
    this.redraw();
  }

  /** Show `count` steps, by default as many as before, from begin to end. */
  show(count = this.count) {
    Object.assign(this, { count, view: null });
    this.redraw();
  }

  get rankCount() {
    return Math.max(1, this.run.state?.cluster.ranks.length || 0, this.run.ranks?.line?.seconds?.length || 0);
  }

  get lane() {
    const count = this.rankCount;
    return SIZES[this.size ?? (count <= 2 ? 5 : count <= 4 ? 4 : count <= 16 ? 3 : 2)];
  }

  get row() {
    return 3 * this.lane + STRIP + (this.lane >= 8 ? 10 : 4);
  }

  get height() {
    const most = Math.max(260, Math.min(620, window.innerHeight * 0.62));
    return AXIS + Math.min(most, this.rankCount * this.row + 4);
  }

  resize(by) {
    const now = this.size ?? SIZES.indexOf(this.lane);
    this.size = Math.max(0, Math.min(SIZES.length - 1, now + by));
    this._scrollTo(this.scroll);
    this.redraw();
  }

  reveal(rank) {
    this._scrollTo(rank * this.row - 20);
    this.redraw();
  }

  _scrollTo(place) {
    this.scroll = Math.max(0, Math.min(this.rankCount * this.row + 4 - (this.height - AXIS), place));
  }

  /** Return the first step in view if a given step is the last. */
  _first(step) {
    return Math.max(this.run.traced[0], step - this.count + 1);
  }

  /** Return whether the columns of all ranks in view are loaded for a step; request missing ones. */
  _isWhole(step, ranks) {
    let whole = true;
    for (let one = this._first(step); one <= step; one += 1) {
      for (const rank of ranks) whole = Boolean(this.run.step(one, rank)) && whole;
    }
    return whole;
  }

  /** Select the newest completely loaded step; try later ones first, as steps may arrive faster than columns. */
  _advance(ranks) {
    if (this._isWhole(this.step, ranks)) this.drawn = this.step;
    else if (this.chosen === null && this.drawn !== null) {
      const newer = this.run.heldSteps().filter((step) => step > this.drawn && step < this.step);
      this.drawn = newer.findLast((step) => this._isWhole(step, ranks)) ?? this.drawn;
    }
    if (this.drawn !== null && (this.drawn > this.step || this.drawn < this.run.traced[0])) this.drawn = null;
  }

  /** Return the steps in view with the nanoseconds at which they begin; the first one is at 0. */
  steps(rank) {
    if (this.drawn === null) return [];
    const first = this._first(this.drawn);
    const origin = this.run.held(first, Math.floor(this.scroll / this.row))?.begin_ns;
    const found = [];
    for (let step = first; step <= this.drawn; step += 1) {
      const data = this.run.held(step, rank);
      if (data && !data.missing) found.push({ data, at: origin ? Number(BigInt(data.begin_ns) - BigInt(origin)) : 0 });
    }
    return found;
  }

  draw() {
    const { context, width, height } = surface(this.canvas, this.height);
    const colours = theme.colours;
    context.fillStyle = colours.card;
    context.fillRect(0, 0, width, height);
    this.width = width;
    if (this.step === null) {
      write(context, "No spans yet: they come with the first step (telemetry.spans: true).", 12, 40, colours.quiet);
      return;
    }
    this._scrollTo(this.scroll);
    const firstRank = Math.floor(this.scroll / this.row);
    const lastRank = Math.min(this.rankCount - 1, Math.floor((this.scroll + height - AXIS) / this.row));
    this._advance(chunksOf(firstRank, lastRank));
    const rows = [];
    for (let rank = firstRank; rank <= lastRank; rank += 1) rows.push({ rank, steps: this.steps(rank) });
    const ends = rows.flatMap(({ rank, steps }) => steps.map(({ data, at }) => at + (data.ranks.get(rank)?.over ?? 0)));
    if (ends.length) this.whole = [0, Math.max(...ends) * 1.004];
    if (!this.whole) return this._say(context);
    this._paintAxis(context, width, height);
    this._clip(context, 0, AXIS, width, height - AXIS);
    const paints = { exposed: stripes(context), waits: dotted(context) };
    for (const { rank, steps } of rows) this._paintRank(context, rank, steps, paints);
    context.restore();
    this._paintScrollbar(context, width, height);
    if (!ends.length) this._say(context);
  }

  /** Clip drawing to a box, until `context.restore`. */
  _clip(context, ...box) {
    context.save();
    context.beginPath();
    context.rect(...box);
    context.clip();
  }

  /** Explain why there is nothing to see. */
  _say(context) {
    write(context, this.drawn === null ? "loading …" : `No spans are kept of step ${this.drawn}.`, this.gutter + 12, 40, theme.colours.quiet);
  }

  get range() {
    return this.view ?? this.whole;
  }

  x(time) {
    const [from, to] = this.range;
    return this.gutter + ((time - from) / (to - from)) * (this.width - this.gutter - 10);
  }

  time(x) {
    const [from, to] = this.range;
    return from + ((x - this.gutter) / (this.width - this.gutter - 10)) * (to - from);
  }

  _paintAxis(context, width, height) {
    const colours = theme.colours;
    const [from, to] = this.range;
    for (const value of ticks(from / 1e9, to / 1e9, (width - this.gutter) / 110)) {
      const x = Math.round(this.x(value * 1e9)) + 0.5;
      if (x < this.gutter || x > width) continue;
      stroke(context, [x, AXIS - 5], [x, height], colours.line);
      write(context, nanoseconds(value * 1e9), Math.min(x, width - 24), 8, colours.quiet, "center");
    }
    const shown = this.drawn ?? this.step;
    write(context, this.count > 1 ? `steps ${this._first(shown)} to ${shown}` : `step ${shown}`, 8, 8, colours.quiet);
  }

  _paintRank(context, rank, steps, paints) {
    const colours = theme.colours;
    const { row } = this;
    const top = AXIS + rank * row - this.scroll;
    context.fillStyle = rank % 2 ? colours.card : colours.row;
    context.globalAlpha = 0.7;
    context.fillRect(0, top, this.width, row);
    context.globalAlpha = 1;
    this._paintGutter(context, rank, steps, top);
    this._clip(context, this.gutter, top, this.width - this.gutter, row);
    for (const { data, at } of steps) {
      const own = data.ranks.get(rank);
      if (!own) continue;
      this._paintWaits(context, own.exposed, at, top, theme.colours.hurt, paints.exposed, theme.colours.wash);
      this._paintWaits(context, own.waits, at, top, theme.colours.peer, paints.waits);
      own.lanes.forEach((lane, number) => this._paintLane(context, data, own, lane, at, top + 3 + number * this.lane));
      if (this.lane >= 8) this._paintBlocks(context, own.blocks, at, top);
      if (this.count > 1) {
        context.fillStyle = colours.quiet;
        context.fillRect(Math.round(this.x(at)), top, 1, row);
      }
    }
    context.restore();
  }

  _paintGutter(context, rank, steps, top) {
    const colours = theme.colours;
    const { lane } = this;
    const middle = top + (3 * lane) / 2 + 3;
    const place = this.run.state?.cluster.ranks[rank];
    const numbers = steps.at(-1)?.data.ranks.get(rank)?.numbers;
    const slow = this.run.ranks?.stragglers.some((one) => one.rank === rank);
    write(context, `${slow ? "⚠ " : ""}rank ${rank}`, 8, lane >= 8 ? top + 11 : middle, slow ? colours.hurt : colours.ink);
    if (lane < 8) return;
    if (numbers?.communication_ns) write(context, `${percent(numbers.hidden_ns / numbers.communication_ns)} hidden`, 8, top + 25, colours.quiet);
    if (lane >= 12 && place?.place.pp !== undefined) write(context, `stage ${place.place.pp}`, 8, top + 39, colours.quiet);
    const font = context.font;
    if (lane < 14) context.font = font.replace("11px", lane < 12 ? "8px" : "10px");
    const names = this.narrow ? SHORT_LANES : LANES;
    names.forEach((name, number) => write(context, name, this.gutter - 8, top + 3 + (number + 0.5) * lane, colours.quiet, "right"));
    if (lane >= 12) write(context, "waits", this.gutter - 8, top + 3 + 3 * lane + STRIP / 2 + 1, colours.hurt, "right");
    context.font = font;
  }

  /** Yield the intervals in view, in order of their begin, as [index, left, right]; one of all that share a pixel. */
  *_inView({ start, end }, at, places = start.keys()) {
    const [from, to] = this.range;
    const scale = (this.width - this.gutter - 10) / (to - from);
    let covered = -Infinity; // pixels up to here are drawn
    for (const place of places) {
      if (end[place] + at < from || start[place] + at > to) continue;
      const left = this.gutter + (start[place] + at - from) * scale;
      const right = this.gutter + (end[place] + at - from) * scale;
      if (right - left < 1 && Math.floor(left) <= covered) continue;
      covered = right - left < 1 ? Math.floor(left) : Math.floor(right) - 1;
      yield [place, left, right];
    }
  }

  _paintLane(context, data, { spans }, lane, at, top) {
    const height = this.lane - 1;
    for (const [span, left, right] of this._inView(spans, at, lane)) {
      const [strand, direction] = [spans.strand[span], spans.direction[span]];
      const x = right - left < 1 ? Math.floor(left) : Math.max(left, this.gutter - 2);
      const wide = right - left < 1 ? 1 : Math.min(right, this.width) - x;
      context.fillStyle = theme.colours.strands[strand][direction];
      context.fillRect(x, top, wide > 3 ? wide - 0.6 : wide, height);
      if (this.lane >= 12 && wide > 26) this._name(context, data.labels[spans.label[span]].operator, strand, direction, x, top, wide, height);
      if (this.picked?.span === span && this.picked.own.spans === spans) {
        context.strokeStyle = theme.colours.select;
        context.lineWidth = 2;
        context.strokeRect(x + 1, top + 1, Math.max(2, wide - 2), height - 2);
        context.lineWidth = 1;
      }
    }
  }

  _name(context, name, strand, direction, x, top, wide, height) {
    const most = Math.floor((wide - 6) / 6);
    if (most < 3) return;
    const ink = direction === 2 ? "#ffffff" : strand === 2 ? "#201500" : "#001a2b";
    write(context, name.length > most ? `${name.slice(0, most - 1)}…` : name, x + 3, top + height / 2 + 0.5, ink);
  }

  _paintWaits(context, intervals, at, top, plain, pattern, wash) {
    for (const [, left, right] of this._inView(intervals, at)) {
      const wide = Math.max(1, right - left);
      if (wash) {
        context.fillStyle = wash;
        context.fillRect(left, top + 3, wide, 3 * this.lane);
      }
      context.fillStyle = wide < 4 ? plain : pattern;
      context.fillRect(left, top + 3 + 3 * this.lane, wide, STRIP);
    }
  }

  _paintBlocks(context, blocks, at, top) {
    for (const [place, left, right] of this._inView(blocks, at)) {
      const paired = blocks.kind[place] === 2;
      context.fillStyle = paired ? theme.colours.paired : theme.colours.block;
      context.fillRect(left, top + 0.5, Math.max(1, right - left - 1), paired ? 2 : 1);
    }
  }

  _paintScrollbar(context, width, height) {
    const all = this.rankCount * this.row + 4;
    const seen = height - AXIS;
    if (all <= seen + 1) return;
    context.fillStyle = theme.colours.line;
    context.fillRect(width - 8, AXIS, 8, seen);
    context.fillStyle = theme.colours.quiet;
    context.fillRect(width - 7, AXIS + (this.scroll / all) * seen, 6, Math.max(16, (seen / all) * seen));
  }

  /** Return what lies at a point of the canvas. */
  hit(x, y) {
    if (this.step === null || !this.whole || y < AXIS) return null;
    const rank = Math.floor((y - AXIS + this.scroll) / this.row);
    if (rank < 0 || rank >= this.rankCount) return null;
    const steps = this.steps(rank);
    if (x < this.gutter) return { rank, steps };
    const lane = Math.floor((y - AXIS + this.scroll - rank * this.row - 3) / this.lane);
    const time = this.time(x);
    const slack = (this.time(x + 1) - time) * 0.75;
    for (const { data, at } of steps) {
      const own = data.ranks.get(rank);
      if (!own) continue;
      const span = spanAt(own.spans, own.lanes[lane] ?? [], time - at, slack);
      if (span !== null) return { rank, data, own, span, at };
      for (const kind of ["exposed", "waits"]) {
        const place = intervalAt(own[kind], time - at, slack);
        if (place !== null) return { rank, data, kind, place };
      }
    }
    return null;
  }

  /** Return title and rows about what was hit, for the tip and for screen readers. */
  describe(found) {
    if (found.kind) return describeInterval(found);
    if (found.span !== undefined) return describeSpan(found);
    const rows = [`rank ${found.rank}`];
    const place = this.run.state?.cluster.ranks[found.rank];
    if (place) rows.push(["node", place.node], ["place", Object.entries(place.place).map(([axis, at]) => `${axis} ${at}`).join(", ")]);
    for (const { data } of found.steps.slice(-1)) rows.push(...numberRows(data.ranks.get(found.rank)));
    return rows;
  }

  /** Pick the operator before or after the picked one, on the same rank and lane. */
  pick(by) {
    const rank = this.picked?.rank ?? Math.ceil(this.scroll / this.row);
    const steps = this.steps(rank);
    if (!steps.length) return;
    const { data, at, span: before } = this.picked ?? steps.at(-1);
    const own = data.ranks.get(rank);
    if (!own) return;
    const lane = own.lanes[before === undefined ? 0 : data.labels[own.spans.label[before]].lane];
    const next = before === undefined ? lane.findIndex((one) => own.spans.end[one] + at >= this.range[0]) : lane.indexOf(before) + by;
    const span = lane[next];
    if (span === undefined) return;
    this.picked = { rank, data, own, at, span };
    const [begin, end] = [own.spans.start[span] + at, own.spans.end[span] + at];
    const [from, to] = this.range;
    if (begin < from || end > to) this._look(begin - (to - from) / 2, begin + (to - from) / 2);
    this.read(spoken(this.describe(this.picked)));
    this.redraw();
  }

  zoom(factor, around = (this.range[0] + this.range[1]) / 2) {
    if (!this.whole) return;
    const [from, to] = this.range;
    this._look(around - (around - from) * factor, around + (to - around) * factor);
  }

  pan(share) {
    if (!this.whole) return;
    const [from, to] = this.range;
    this._look(from + share * (to - from), to + share * (to - from));
  }

  _look(from, to) {
    const [low, high] = this.whole;
    const wide = Math.max(200, Math.min(high - low, to - from));
    const begin = Math.max(low, Math.min(high - wide, from + (to - from - wide) / 2));
    this.view = wide >= high - low ? null : [begin, begin + wide];
    this.redraw();
  }

  _listen() {
    const { canvas } = this;
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held && this.whole) {
        const [dx, dy] = [event.clientX - held.x, event.clientY - held.y];
        if (!held.moved && Math.hypot(dx, dy) < 4) return;
        Object.assign(held, { x: event.clientX, y: event.clientY, moved: true });
        canvas.classList.add("held");
        hideTip();
        this._scrollTo(this.scroll - dy);
        this.pan(-dx / (this.width - this.gutter - 10));
        this.redraw();
        return;
      }
      const found = this.hit(event.offsetX, event.offsetY);
      if (found) showTip(event.clientX, event.clientY, this.describe(found));
      else hideTip();
    });
    canvas.addEventListener("pointerup", (event) => {
      canvas.classList.remove("held");
      if (held && !held.moved) {
        const found = this.hit(event.offsetX, event.offsetY);
        this.picked = found?.span !== undefined ? found : null;
        this.read(found ? spoken(this.describe(found)) : "");
        this.redraw();
      }
      held = null;
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.time(event.offsetX)));
    canvas.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this._key(event));
  }

  _wheel(event) {
    if (!this.whole) return;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(Math.sign(event.deltaY) * Math.min(60, Math.abs(event.deltaY)) * 0.006), this.time(event.offsetX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / 900);
    } else {
      const before = this.scroll;
      this._scrollTo(this.scroll + event.deltaY);
      if (this.scroll !== before) event.preventDefault();
      this.redraw();
    }
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = this.height - AXIS - this.row;
    const scroll = { ArrowUp: -this.row, ArrowDown: this.row, PageUp: -page, PageDown: page }[event.key];
    const pan = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key];
    if (!scroll && !pan) return;
    if (pan) this.pan(pan);
    this._scrollTo(this.scroll + (scroll ?? 0));
    this.redraw();
    event.preventDefault();
  }
}
