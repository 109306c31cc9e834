// Line charts over the steps, in SVG: one crosshair for all, whose step the captions tell; marks where the run changed.

import { amount, bytes, el, percent, seconds, svg, ticks } from "./dom.js";
import { namesIn } from "./summary.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [430, 160, 54, 10, 16, 18];
const MARKS = { restarted: "↻", resized: "⇔", failed: "✕", straggler: "⚠", guard: "!", waiting: "…", draining: "⏏", saved: "▾", "save-failed": "▿", rescued: "✚" };
const COLOURS = ["blue", "amber", "violet", "hidden", "peer"];

const fixed = (value) => (Number.isFinite(value) ? value.toFixed(3) : "–");
const precise = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(3))) : "–");
const share = (value) => percent(value, 1);

/** Return lines for the names in a section of the records. */
const inSection = (run, section, style) =>
  namesIn(run, section).map((name, n) => [name, run.columns[`${section}.${name}`], COLOURS[n % 5], style]);

/** Return the charts of a run: title, formatter of a value, lines [name, values, colour in style.css, style]. */
export function runCharts(run) {
  const { columns } = run;
  const predicted = run.state?.predicted ?? {};
  const wall = columns.step.map((_, n) => columns.wall_seconds?.[n] || columns.seconds?.[n]);
  const slowdown = columns.slowdown_seconds?.map((value) => (value === null ? null : Math.max(0, value)));
  const constant = (name) => (Number.isFinite(predicted[name]) ? columns.step.map(() => predicted[name]) : null);
  const sets = inSection(run, "validation_losses", "dots");
  return [
    { title: "Communication per step", write: seconds, zero: true, lines: [
      ["all; green: hidden", columns.communication_seconds, "hidden", "area"], ["waits (exposed)", columns.exposed_seconds, "hurt", "area"],
      ["predicted to wait", constant("exposed_seconds"), "hurt", "dash"]] },
    { title: "Share of communication hidden", write: share, zero: true, top: 1, lines: [["hidden", columns.hidden_fraction, "hidden"], ["predicted", constant("hidden_fraction"), "hidden", "dash"]], none: "no transfers, or telemetry.spans is off" },
    { title: "Time of a step", write: seconds, zero: true, lines: [
      ["measured", columns.seconds, "blue"], ["with what lies between steps", wall, "amber", "dot"],
      ["predicted", constant("step_seconds"), "blue", "dash"], ["one strand, predicted", constant("serial_seconds"), "quiet", "dot"]] },
    { title: "What overlap costs, and idle time", write: seconds, zero: true, lines: [
      ["slowdown", slowdown, "violet"], ["launch gaps", columns.launch_gap_seconds, "blue"],
      ["bubbles", columns.bubble_seconds, "amber"], ["waits for peers", columns.waiting_seconds, "peer"]] },
    { title: "Exposed, by axis", write: seconds, zero: true, lines: inSection(run, "exposed_by_axis"), none: "no transfers, or telemetry.spans is off" },
    { title: "Loss, nats per token", write: fixed, lines: [["training", columns.loss, "blue"], ["validation", columns.validation_loss, "amber", "dots"]] },
    ...(sets.length ? [{ title: "Validation by set, nats per token", write: fixed, lines: sets }] : []),
    { title: "Validation, bits per byte", write: fixed, lines: [["bits per byte", columns.validation_bits_per_byte, "amber", "dots"]], none: "no validation yet, or the data set does not say what bytes its tokens stand for" },
    { title: "Tokens per second", write: amount, zero: true, lines: [["", columns.tokens_per_second, "blue"]] },
    { title: "MFU", write: share, zero: true, lines: [["", columns.mfu, "blue"]], none: "not known: set cluster.peak_tflops" },
    { title: "Memory, fullest rank", write: bytes, zero: true, lines: [["peak", columns.peak_bytes, "blue"]] },
    { title: "Learning rate", write: precise, zero: true, lines: [["", columns.lr, "blue"]] },
    { title: "Gradient norm", write: precise, zero: true, lines: [["", columns.grad_norm, "blue"]] },
  ];
}

export const hasExperts = (run) => Array.isArray(run.columns["experts.imbalance"]);

/** Return the charts of a mixture of experts. */
export function expertCharts(run) {
  const column = (name) => run.columns[`experts.${name}`];
  const times = (value) => (Number.isFinite(value) ? `${value.toFixed(value < 10 ? 2 : 1)} ×` : "–");
  const layers = (name) => [["mean over layers", column(name), "blue"], ["worst layer", column(`worst_${name}`), "amber"]];
  return [
    { title: "Fullest expert over the average", write: times, lines: [...layers("imbalance"), ["fullest rank", column("rank_imbalance"), "violet"]] },
    { title: "Entropy of the load; balanced: 100 %", write: share, lines: layers("entropy") },
    { title: "Visits dropped", write: share, zero: true, lines: layers("dropped"), none: "no capacity is set" },
    { title: "Auxiliary losses per token, not in the loss", write: precise, zero: true, lines: [["balance", column("balance_loss"), "hidden"], ["z", column("z_loss"), "violet"]], none: "the model has none" },
  ];
}

export class Charts {
  constructor(box, run, specify, redraw) {
    Object.assign(this, { box, run, specify });
    this.cursor = null; // index of a step
    const move = (cursor) => {
      this.cursor = cursor;
      redraw();
    };
    box.addEventListener("pointermove", (event) => {
      const { left, width } = event.target.closest("svg")?.getBoundingClientRect() ?? {};
      const { step } = this.run.columns;
      if (!width || !step.length) return;
      const x = (((event.clientX - left) / width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
      const wanted = step[0] + x * (step.at(-1) - step[0]);
      move(step.reduce((best, at, n) => (Math.abs(at - wanted) < Math.abs(step[best] - wanted) ? n : best), 0));
    });
    box.addEventListener("pointerleave", () => move(null));
    box.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const last = this.run.columns.step.length - 1;
      if (!by || last < 0) return;
      event.preventDefault();
      move(Math.max(0, Math.min(last, (this.cursor ?? last + 1) + by)));
    });
  }

  draw() {
    this.box.replaceChildren(...this.specify(this.run).map((chart) => draw(chart, this.run, this.cursor)));
  }
}

/** Return a chart with its caption, which tells the values at the cursor or the newest ones. */
function draw(chart, run, cursor) {
  const { step } = run.columns;
  const lines = chart.lines.filter(([, values]) => values?.some(Number.isFinite));
  const told = lines.map(([name, values, colour, style = ""]) => {
    const value = values[cursor] ?? values.findLast(Number.isFinite);
    return el("span", {}, el("i", { class: style, style: { borderColor: `var(--${colour})` } }), name, el("output", { text: chart.write(value) }));
  });
  const caption = el("figcaption", {}, el("b", { text: chart.title }), ...told);
  if (!lines.some(([, , , style]) => style !== "dash" && style !== "dot")) {
    return el("figure", {}, caption, el("p", { class: "quiet", text: (step.length && chart.none) || "nothing yet" }));
  }
  const frame = frameOf(chart, lines, step);
  const drawn = [...axes(chart, frame), ...marks(run.events, frame)];
  for (const [, values, colour, style = ""] of lines) drawn.push(svg("path", { class: style, d: pathOf(values, step, frame, style), style: { stroke: `var(--${colour})`, color: `var(--${colour})` } }));
  if (cursor !== null && cursor < step.length) drawn.push(svg("path", { class: "cursor", d: `M${frame.x(step[cursor])} ${TOP}V${HEIGHT - BOTTOM}` }));
  return el("figure", {}, caption, svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title }, ...drawn));
}

/** Return the ranges of a chart's axes, and functions from a step and a value to pixels. */
function frameOf(chart, lines, step) {
  let [low, high] = [chart.zero ? 0 : Infinity, -Infinity];
  for (const value of lines.flatMap(([, values]) => values.filter(Number.isFinite))) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const margin = (high - low) * 0.06 || Math.abs(low) * 0.1 || 1;
  high = chart.top ?? high + margin;
  if (!chart.zero) low -= margin;
  const [first, last] = [step[0], Math.max(step.at(-1), step[0] + 1)];
  return {
    low, high, first, last,
    x: (at) => LEFT + ((at - first) / (last - first)) * (WIDTH - LEFT - RIGHT),
    y: (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP),
  };
}

function axes(chart, { low, high, first, last, x, y }) {
  const levels = ticks(low, high, 4);
  const steps = ticks(first, last, 4).filter(Number.isInteger);
  return [
    svg("path", { class: "grid", d: levels.map((value) => `M${LEFT} ${y(value)}H${WIDTH - RIGHT}`).join("") }),
    ...levels.map((value) => svg("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end", text: chart.write(value) })),
    ...steps.map((at) => svg("text", { x: x(at), y: HEIGHT - 4, "text-anchor": "middle", text: at })),
  ];
}

/** Mark the steps at which something happened to the run; marks of one place stand side by side. */
function* marks(events, { first, last, x }) {
  let taken = -Infinity;
  for (const { kind, step, text = "" } of events) {
    if (!(kind in MARKS) || !(step >= first && step <= last)) continue;
    taken = Math.abs(x(step) - taken) < 11 ? taken + 11 : x(step);
    const sign = svg("text", { x: taken, y: TOP - 4, "text-anchor": "middle", text: MARKS[kind] });
    sign.append(svg("title", { text: `${kind} at step ${step} ${text}` }));
    yield sign;
    if (kind !== "saved") yield svg("path", { class: "cursor dot", d: `M${x(step)} ${TOP}V${HEIGHT - BOTTOM}` });
  }
}

/** Return the path of a line, with gaps where there is no number; of the points of one pixel those suffice that lie
 * above or below the former ones. */
function pathOf(values, step, { x, y, low }, style) {
  let path = "";
  let [open, begin, pixel, least, most] = [false, 0, null, 0, 0];
  const close = () => (open && style === "area" ? `V${y(low)}H${begin}Z` : "");
  values.forEach((value, n) => {
    if (!Number.isFinite(value)) {
      path += close();
      open = false;
      return;
    }
    const [left, top] = [x(step[n]), y(value)];
    if (open && Math.floor(left) === pixel && top >= least && top <= most) return;
    [least, most] = open && Math.floor(left) === pixel ? [Math.min(least, top), Math.max(most, top)] : [top, top];
    pixel = Math.floor(left);
    if (!open) begin = left.toFixed(1);
    path += `${open && style !== "dots" ? "L" : "M"}${left.toFixed(1)} ${top.toFixed(1)}${style === "dots" ? "h0" : ""}`;
    open = true;
  });
  return path + close();
}
