// Line charts over the steps: one canvas each, one crosshair for all, marks where the run changed.

import { bytes, amount, el, hideTip, percent, seconds, showTip, stroke, surface, ticks, write } from "./dom.js";
import { axesOf, namesIn } from "./summary.js";
import { theme } from "./theme.js";

const [LEFT, BOTTOM, TOP, HEIGHT] = [54, 18, 12, 150];

export const MARKS = { restarted: "↻", resized: "⇔", failed: "✕", straggler: "⚠", guard: "!", waiting: "…", draining: "⏏", saved: "▾", "save-failed": "▿", rescued: "✚", started: "", finished: "" };

const DASHES = { dash: [6, 4], dot: [2, 3], long: [10, 3], "dash-dot": [8, 3, 2, 3] };
const STYLES = [undefined, "long", "dash-dot"]; // line styles for lines of a chart, beside their colours

/** Specifications of the charts: name, formatter of a value, lines of [name, values, colour, style]. */
export function specifications(run) {
  const { columns } = run;
  const colours = theme.colours;
  const predicted = run.state?.predicted ?? {};
  const hidden = columns.step.map((_, n) => minus(columns.communication_seconds?.[n], columns.exposed_seconds?.[n]));
  const wall = columns.step.map((_, n) => columns.wall_seconds?.[n] || columns.seconds?.[n]);
  const sets = namesIn(run, "validation_losses");
  const rate = columns.step.map((_, n) => (wall[n] > 0 ? columns.tokens?.[n] / wall[n] : null));
  const constant = (value) => (typeof value === "number" ? columns.step.map(() => value) : null);
  return [
    { name: "Communication per step", write: seconds, zero: true, lines: [["waits (exposed)", columns.exposed_seconds, colours.hurt, "area"], ["hidden", hidden, colours.hidden, "area"], ["predicted to wait", constant(predicted.exposed_seconds), colours.hurt, "dash"]] },
    { name: "Share of communication hidden", write: (v) => percent(v, 1), zero: true, top: 1, lines: [["hidden", columns.hidden_fraction, colours.hidden], ["predicted", constant(predicted.hidden_fraction), colours.hidden, "dash"]], none: "no transfers, or telemetry.spans is off" },
    { name: "Time of a step", write: seconds, zero: true, lines: [["measured", columns.seconds, colours.lines[0]], ["with what lies between steps", wall, colours.lines[1], "dot"], ["predicted", constant(predicted.step_seconds), colours.lines[0], "dash"], ["one strand, predicted", constant(predicted.serial_seconds), colours.quiet, "dot"]] },
    { name: "What overlap costs, and idle time", write: seconds, zero: true, lines: [["slowdown", columns.slowdown_seconds?.map((one) => (one === null ? null : Math.max(0, one))), colours.lines[2]], ["launch gaps", columns.launch_gap_seconds, colours.lines[0]], ["bubbles", columns.bubble_seconds, colours.lines[1], "long"], ["waits for peers", columns.waiting_seconds, colours.peer]] },
    { name: "Exposed, by axis", write: seconds, zero: true, lines: axesOf(run).map((axis, n) => [axis, columns[`exposed_by_axis.${axis}`], colours.lines[n % colours.lines.length], n ? STYLES[n % STYLES.length] : undefined]), none: "no transfers, or telemetry.spans is off" },
    { name: "Loss", write: (v) => (v === null ? "–" : v.toFixed(3)), lines: [["loss, nats per token", columns.loss, colours.lines[0]], ["validation, nats per token", columns.validation_loss, colours.lines[1], "dots"]] },
    ...(sets.length ? [{ name: "Validation by set, nats per token", write: (v) => (v === null ? "–" : v.toFixed(3)), lines: sets.map((set, n) => [set, columns[`validation_losses.${set}`], colours.lines[n % colours.lines.length], "dots"]) }] : []),
    { name: "Validation, bits per byte", write: (v) => (v === null ? "–" : v.toFixed(3)), lines: [["bits per byte", columns.validation_bits_per_byte, colours.lines[1], "dots"]], none: "no validation yet, or the data set does not say what bytes its tokens stand for" },
    { name: "Tokens per second", write: (v) => amount(v), zero: true, lines: [["tokens/s", rate, colours.lines[0]]] },
    { name: "MFU", write: (v) => percent(v, 1), zero: true, lines: [["MFU", columns.mfu, colours.lines[0]]], none: "not known: set cluster.peak_tflops" },
    { name: "Memory, fullest rank", write: bytes, zero: true, lines: [["peak", columns.peak_bytes, colours.lines[0]]] },
    { name: "Learning rate", write: rateText, zero: true, lines: [["learning rate", columns.lr, colours.lines[0]]] },
    { name: "Gradient norm", write: (v) => amount(v), zero: true, lines: [["gradient norm", columns.grad_norm, colours.lines[0]]] },
  ];
}

const rateText = (value) => (typeof value === "number" ? value.toPrecision(3).replace(/\.?0+(?=e|$)/, "") : "–");
const minus = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : null);

export class Charts {
  /** `specify`: returns the specifications of a run's charts. */
  constructor(box, run, redraw, specify = specifications) {
    Object.assign(this, { box, run, redraw, specify });
    this.cursor = null; // index of a step
    this.figures = [];
  }

  draw() {
    const found = this.specify(this.run);
    if (this.figures.length !== found.length) this._build(found);
    found.forEach((chart, place) => this._draw(chart, this.figures[place]));
  }

  _build(found) {
    this.box.replaceChildren();
    this.figures = found.map((chart, place) => {
      const now = el("output");
      const canvas = el("canvas", { role: "img", tabindex: 0, "aria-label": `${chart.name} over the steps; arrow keys read values` });
      const figure = el("figure", {}, el("figcaption", {}, el("b", { text: chart.name }), now), canvas);
      canvas.addEventListener("pointermove", (event) => this._hover(canvas, event, place));
      canvas.addEventListener("pointerleave", () => this._leave());
      canvas.addEventListener("keydown", (event) => this._key(event, place));
      this.box.append(figure);
      return { canvas, now };
    });
  }

  _leave() {
    this.cursor = null;
    hideTip();
    this.redraw();
  }

  _hover(canvas, event, place) {
    const steps = this.run.columns.step;
    if (!steps.length) return;
    const wide = canvas.clientWidth - LEFT - 8;
    const wanted = steps[0] + ((event.offsetX - LEFT) / wide) * (steps.at(-1) - steps[0]);
    this.cursor = steps.reduce((best, step, n) => (Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? n : best), 0);
    const step = steps[this.cursor];
    const marks = this.run.events.filter((one) => one.step === step && MARKS[one.kind] !== undefined).map((one) => [one.kind, one.text ?? ""]);
    showTip(event.clientX, event.clientY, [`step ${step}`, ...this._told(place), ...marks]);
    this.redraw();
  }

  /** Return names and values of a chart's lines at the cursor. */
  _told(place) {
    const chart = this.specify(this.run)[place];
    return chart.lines.filter(([, values]) => typeof values?.[this.cursor] === "number").map(([name, values]) => [name, chart.write(values[this.cursor])]);
  }

  _key(event, place) {
    const count = this.run.columns.step.length;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !count) return;
    event.preventDefault();
    this.cursor = Math.max(0, Math.min(count - 1, (this.cursor ?? count) + by));
    const values = this._told(place).map((row) => row.join(" ")).join(", ");
    this.figures[place].canvas.setAttribute("aria-label", `${this.specify(this.run)[place].name}, step ${this.run.columns.step[this.cursor]}: ${values}`);
    this.redraw();
  }

  _draw(chart, { canvas, now }) {
    const colours = theme.colours;
    const { context, width, height } = surface(canvas, HEIGHT);
    const steps = this.run.columns.step;
    const lines = chart.lines.filter(([, values]) => values?.some((value) => typeof value === "number"));
    now.textContent = lines.length ? chart.write(newest(lines[0][1], this.cursor)) : "";
    if (!steps.length || !lines.some(([, , , style]) => style !== "dash" && style !== "dot")) {
      write(context, steps.length && chart.none ? chart.none : "nothing yet", 12, height / 2, colours.quiet);
      return;
    }
    const frame = this._frame(chart, lines, width, height);
    this._axes(context, chart, frame, width, height);
    this._marks(context, frame, height);
    const floor = new Float64Array(steps.length);
    for (const [, values, colour, style] of lines) {
      if (style === "area") area(context, frame, steps, values, floor, colour);
      else if (style === "dots") dots(context, frame, steps, values, colour);
      else line(context, frame, steps, values, colour, style);
    }
    if (this.cursor !== null && this.cursor < steps.length) {
      context.fillStyle = colours.quiet;
      context.fillRect(Math.round(frame.x(steps[this.cursor])), TOP, 1, height - TOP - BOTTOM);
    }
  }

  _frame(chart, lines, width, height) {
    const steps = this.run.columns.step;
    let [low, high] = [Infinity, -Infinity];
    const stacked = lines.filter(([, , , style]) => style === "area").map(([, values]) => values);
    for (const [, values, , style] of lines) {
      values.forEach((value, place) => {
        if (typeof value !== "number") return;
        const top = style === "area" ? stacked.reduce((sum, one) => sum + (one[place] ?? 0), 0) : value;
        low = Math.min(low, value);
        high = Math.max(high, top);
      });
    }
    if (chart.zero) low = Math.min(0, low);
    if (chart.top !== undefined) high = chart.top;
    if (high - low < 1e-12) high = low + (Math.abs(low) * 0.1 || 1);
    if (chart.top === undefined) high += (high - low) * 0.06;
    if (!chart.zero) low -= (high - low) * 0.06;
    const [first, last] = [steps[0], Math.max(steps.at(-1), steps[0] + 1)];
    return {
      low, high, first, last,
      x: (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - 8),
      y: (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - BOTTOM - TOP),
    };
  }

  _axes(context, chart, frame, width, height) {
    const colours = theme.colours;
    for (const value of ticks(frame.low, frame.high, 4)) {
      const y = Math.round(frame.y(value)) + 0.5;
      stroke(context, [LEFT, y], [width - 8, y], colours.line);
      write(context, chart.write(value), LEFT - 5, y, colours.quiet, "right");
    }
    const whole = ticks(frame.first, frame.last, Math.max(2, width / 90)).filter((step) => Number.isInteger(step));
    for (const step of whole) write(context, step, Math.min(width - 14, frame.x(step)), height - 7, colours.quiet, "center");
  }

  _marks(context, frame, height) {
    const colours = theme.colours;
    let taken = -Infinity; // right edge of the previous mark: simultaneous marks are drawn side by side
    for (const event of this.run.events) {
      const sign = MARKS[event.kind];
      if (!sign || typeof event.step !== "number" || event.step < frame.first || event.step > frame.last) continue;
      const x = Math.round(frame.x(event.step)) + 0.5;
      const colour = event.kind === "failed" ? colours.hurt : colours.quiet;
      taken = Math.abs(x - taken) < 11 ? taken + 11 : x;
      write(context, sign, taken, TOP - 6, colour, "center");
      if (event.kind === "saved") continue;
      context.setLineDash([2, 3]);
      stroke(context, [x, TOP], [x, height - BOTTOM], colour);
      context.setLineDash([]);
    }
  }
}

function newest(values, cursor) {
  if (cursor !== null && typeof values[cursor] === "number") return values[cursor];
  return values.findLast((value) => typeof value === "number") ?? null;
}

/** Draw a line with gaps where there is no number, through the lowest and highest value of every pixel. */
function line(context, frame, steps, values, colour, style) {
  Object.assign(context, { strokeStyle: colour, fillStyle: colour, lineWidth: 1.8 });
  context.setLineDash(DASHES[style] ?? []);
  context.beginPath();
  let [open, held, last] = [false, null, null];
  const put = () => {
    if (!held) return;
    const [x, low, high] = held;
    context[open ? "lineTo" : "moveTo"](x, low);
    if (high !== low) context.lineTo(x, high);
    [open, held] = [true, null];
  };
  values.forEach((value, n) => {
    if (typeof value !== "number") {
      put();
      open = false;
      return;
    }
    const [x, y] = last = [frame.x(steps[n]), frame.y(value)];
    if (held && Math.floor(x) === Math.floor(held[0])) held = [held[0], Math.min(held[1], y), Math.max(held[2], y)];
    else {
      put();
      held = [x, y, y];
    }
  });
  put();
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
  if (last && !style) {
    context.beginPath();
    context.arc(...last, 2.4, 0, 7);
    context.fill();
  }
}

function dots(context, frame, steps, values, colour) {
  values.forEach((value, n) => typeof value === "number" && write(context, "◆", frame.x(steps[n]), frame.y(value), colour, "center"));
}

/** Draw a band stacked on `floor`, and raise `floor` by the band's values. */
function area(context, frame, steps, values, floor, colour) {
  const tops = steps.map((_, n) => floor[n] + (values[n] ?? 0));
  context.fillStyle = colour;
  context.globalAlpha = 0.75;
  context.beginPath();
  steps.forEach((step, n) => context.lineTo(frame.x(step), frame.y(tops[n])));
  for (let n = steps.length - 1; n >= 0; n -= 1) context.lineTo(frame.x(steps[n]), frame.y(floor[n]));
  context.fill();
  context.globalAlpha = 1;
  floor.set(tops);
  if (steps.length === 1) context.fillRect(frame.x(steps[0]), frame.y(tops[0]), 3, frame.y(0) - frame.y(tops[0]));
}
