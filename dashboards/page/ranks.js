// Shows how each rank spent its time of one step, in a column per rank. 256 columns fit a laptop's screen.

import { byId, bytes, hover, seconds, surface, ticks, write } from "./dom.js";
import { namedNumbers } from "./spans.js";
import { parts } from "./summary.js";
import { dotted, stripes, theme } from "./theme.js";

const [LEFT, HEIGHT, BOTTOM] = [54, 190, 20];

/** Return the parts that add up to a rank's step, in the order of `paints`. */
function partsOf(line, rank) {
  const [step, compute, exposed, slowdown, waiting] = ["", "compute_", "exposed_", "slowdown_", "waiting_"].map((name) => line[`${name}seconds`]?.[rank] ?? 0);
  const found = parts({ step, compute, exposed, slowdown, waiting });
  return [found.computes, found.slow, found.waits, found.peers, found.idle];
}

export class Ranks {
  constructor(canvas, run, { chosen, redraw }) {
    Object.assign(this, { canvas, run, chosen, redraw });
    this.line = null; // record of a chosen step; null: the newest step is shown
    hover(canvas, (x) => this._tell(x));
    canvas.addEventListener("click", (event) => {
      const rank = this._rank(event.offsetX);
      if (rank !== null) this.chosen(rank);
    });
  }

  /** Show a chosen step, or the newest one (null). */
  async choose(step) {
    this.line = step === null ? null : (await this.run.ranksOf(step)).line;
    this.redraw();
  }

  get shown() {
    return this.line ?? this.run.ranks?.line ?? null;
  }

  _rank(x) {
    const count = this.shown?.seconds?.length ?? 0;
    const rank = Math.floor((x - LEFT) / this.each);
    return x >= LEFT && rank >= 0 && rank < count ? rank : null;
  }

  draw() {
    const line = this.shown;
    const { context, width, height } = surface(this.canvas, line ? HEIGHT : 40);
    const colours = theme.colours;
    byId("ranks-step").textContent = line ? String(line.step) : "–";
    if (!line?.seconds) return write(context, "No numbers by rank (ranks.jsonl) yet.", 12, 20, colours.quiet);
    const count = line.seconds.length;
    const most = Math.max(...line.seconds) * 1.05 || 1;
    const y = (value) => height - BOTTOM - (value / most) * (height - BOTTOM - 8);
    this.each = Math.min(150, (width - LEFT - 8) / count);
    for (const value of ticks(0, most, 4)) {
      write(context, seconds(value), LEFT - 5, y(value), colours.quiet, "right");
      context.fillRect(LEFT, Math.round(y(value)), width - LEFT, 0.5);
    }
    const paints = [colours.compute, colours.slow, stripes(context), dotted(context), colours.idle];
    const gap = this.each > 6 ? 2 : this.each > 3 ? 0.6 : 0;
    paints.forEach((paint, kind) => {
      context.fillStyle = paint;
      for (let rank = 0; rank < count; rank += 1) {
        const own = partsOf(line, rank);
        const below = own.slice(0, kind).reduce((sum, one) => sum + one, 0);
        const [top, bottom] = [y(below + own[kind]), y(below)];
        if (bottom - top > 0.2) context.fillRect(LEFT + rank * this.each, top, Math.max(0.8, this.each - gap), bottom - top);
      }
    });
    this._labels(context, count, height);
  }

  _labels(context, count, height) {
    const colours = theme.colours;
    const slow = new Map((this.run.ranks?.stragglers ?? []).map((one) => [one.rank, one]));
    const every = Math.max(1, [1, 2, 4, 8, 16, 32, 64].find((one) => one * this.each > 24) ?? 128);
    for (let rank = 0; rank < count; rank += 1) {
      const x = LEFT + (rank + 0.5) * this.each;
      if (slow.has(rank)) write(context, "⚠", x, 6, colours.hurt, "center");
      else if (rank % every) continue;
      write(context, rank, x, height - 9, slow.has(rank) ? colours.hurt : colours.quiet, "center");
    }
  }

  _tell(x) {
    const line = this.shown;
    const rank = line ? this._rank(x) : null;
    if (rank === null) return null;
    const rows = [["step", seconds(line.seconds[rank])], ...namedNumbers((name) => line[`${name}_seconds`]?.[rank])];
    for (const [peer, operator, waited] of line.waits_for?.[rank] ?? []) rows.push([`for rank ${peer} (${operator})`, seconds(waited)]);
    const place = this.run.state?.cluster.ranks[rank];
    if (place) rows.push(["node", place.node]);
    if (typeof line.peak_bytes?.[rank] === "number") rows.push(["memory", bytes(line.peak_bytes[rank])]);
    return [`rank ${rank}, step ${line.step}`, ...rows];
  }
}

/** Say in one sentence which ranks delay the others; the rule is in `scheduling/trace/stragglers.py`. */
export function drawStragglers(run) {
  const { stragglers: slow = [], stages = [], rule } = run.ranks ?? {};
  const named = slow.slice(0, 12).map((one) => `rank ${one.rank} (stage ${one.stage}, ${one.times.toFixed(2)} ×)`).join(", ");
  const none = rule && `No stragglers: no rank has computed more than ${rule.times} times as long as the others of its stage throughout the last ${rule.steps} steps.`;
  const text = slow.length ? `Stragglers over the last ${rule.steps} steps: ${named}.` : stages.length > 1 ? none : "";
  byId("stragglers").textContent = [text, waitedMost(run.ranks?.line)].filter(Boolean).join(" ");
}

/** Describe the longest wait for a peer in a step, over all ranks. */
function waitedMost(line) {
  const all = (line?.waits_for ?? []).flatMap((waits, rank) => waits.map(([peer, operator, waited]) => ({ rank, peer, operator, waited })));
  if (!all.length) return "";
  const most = all.reduce((a, b) => (b.waited > a.waited ? b : a));
  return `The longest wait for a peer in step ${line.step}: rank ${most.rank} waits ${seconds(most.waited)} for rank ${most.peer} (${most.operator}).`;
}
