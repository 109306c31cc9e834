// Wires the page: data in, drawing in animation frames, keys.

import { Charts, expertCharts, hasExperts, runCharts } from "./charts.js";
import { Run } from "./data.js";
import { byId } from "./dom.js";
import { drawExperts, drawLog, drawPlan } from "./plan.js";
import { drawRanks } from "./ranks.js";
import { drawHeader, drawSummary } from "./summary.js";
import { Timeline } from "./timeline.js";

const run = new Run();
const dirty = new Set();

/** Call some drawing functions in the next frame. */
function redraw(...views) {
  if (!dirty.size) requestAnimationFrame(frame);
  for (const view of views) dirty.add(view);
}

function frame() {
  const views = [...dirty];
  dirty.clear();
  for (const view of views) view();
  if (views.includes(charts)) braid.drawnStep = run.columns.step.at(-1) ?? 0;
}

const header = () => drawHeader(run);
const summary = () => drawSummary(run);
const plan = () => drawPlan(run);
const log = () => drawLog(run);
const charts = () => curves.draw();
const mixture = () => hasExperts(run) && expertCurves.draw();
const experts = () => drawExperts(run);
const ranks = () => drawRanks(run, (rank) => {
  timeline.reveal(rank);
  byId("timeline").scrollIntoView({ block: "center" });
});
const spans = () => {
  timeline.draw();
  byId("step-shown").textContent = timeline.drawn ?? timeline.step ?? "–";
};

const VIEWS = {
  connection: [header],
  state: [header, summary, plan, ranks, spans, charts, experts, mixture],
  metrics: [header, summary, charts, experts, mixture],
  events: [header, summary, charts, log],
  ranks: [ranks, summary, spans],
  trace: [spans],
  spans: [spans],
};

const curves = new Charts(byId("charts"), run, runCharts, () => redraw(charts));
const expertCurves = new Charts(byId("expert-charts"), run, expertCharts, () => redraw(mixture));
const timeline = new Timeline(byId("timeline"), run, {
  redraw: () => redraw(spans),
  stepChanged: () => (byId("follow").checked = timeline.chosen === null),
});
const braid = { run, timeline, drawnStep: 0 };
window.braid = braid;

run.addEventListener("change", ({ detail }) => redraw(...detail.flatMap((name) => VIEWS[name] ?? [])));
new ResizeObserver(() => redraw(spans)).observe(byId("timeline"));
setInterval(() => redraw(header), 1000);

const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => timeline.recolour());

const actions = {
  "step-back": () => timeline.choose((timeline.step ?? 1) - 1),
  "step-on": () => timeline.choose((timeline.step ?? 0) + 1),
  "zoom-in": () => timeline.zoom(1.6),
  "zoom-out": () => timeline.zoom(1 / 1.6),
  fit: () => timeline.show(),
  theme: () => {
    const { style } = document.documentElement;
    style.colorScheme = (style.colorScheme || (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
    timeline.recolour();
  },
  ask: () => byId("help").showModal(),
};
for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
byId("follow").addEventListener("change", (event) => timeline.choose(event.target.checked ? null : timeline.step));
byId("step-count").addEventListener("change", (event) => timeline.show(Number(event.target.value)));

const KEYS = {
  "[": actions["step-back"], "]": actions["step-on"], "+": actions["zoom-in"], "=": actions["zoom-in"], "-": actions["zoom-out"],
  0: actions.fit, t: actions.theme, "?": actions.ask, ",": () => timeline.pick(-1), ".": () => timeline.pick(1),
  f: () => timeline.choose(timeline.chosen === null ? timeline.step : null),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT)$/.test(event.target.tagName) || byId("help").open) return;
  if (!(event.key in KEYS)) return;
  KEYS[event.key]();
  event.preventDefault();
});

for (const swatch of document.querySelectorAll(".legend i")) swatch.style.background = `var(--${swatch.className})`;
run.start();
