// Wires the page: data in, drawing in animation frames, keys.

import { byId } from "./dom.js";
import { Charts } from "./charts.js";
import { Run } from "./data.js";
import { drawExpertLegends, expertCharts, Experts, hasExperts } from "./experts.js";
import { drawCluster, drawHeat, drawLog, drawPlan } from "./plan.js";
import { drawStragglers, Ranks } from "./ranks.js";
import { drawHeader, drawSummary } from "./summary.js";
import { legend, theme, toggleTheme } from "./theme.js";
import { Timeline } from "./timeline.js";

const run = new Run();
const dirty = new Set();
let waiting = false;

/** Draw some parts of the page in the next frame. */
function redraw(...parts) {
  for (const part of parts) dirty.add(part);
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(frame);
}

const timeline = new Timeline(byId("timeline"), run, {
  redraw: () => redraw("timeline"),
  read: (text) => byId("timeline-read").replaceChildren(text),
  stepChanged: () => {
    byId("follow").checked = timeline.chosen === null;
    ranks.choose(timeline.chosen);
    redraw("controls");
  },
});
const reveal = (rank) => {
  timeline.reveal(rank);
  byId("timeline").scrollIntoView({ block: "center" });
};
const ranks = new Ranks(byId("ranks"), run, { chosen: reveal, redraw: () => redraw("ranks") });
const charts = new Charts(byId("charts"), run, () => redraw("charts"));
const experts = new Experts(byId("experts"), run);
const ofExperts = new Charts(byId("expert-charts"), run, () => redraw("experts"), expertCharts);

const shown = new Map();

/** Return whether a part's data differ from those drawn last: redrawing hundreds of elements costs time. */
function anew(part, content) {
  const text = JSON.stringify(content);
  const differs = shown.get(part) !== text;
  shown.set(part, text);
  return differs;
}

const PARTS = {
  header: () => drawHeader(run),
  summary: () => drawSummary(run),
  controls: () => byId("step-shown").replaceChildren(timeline.drawn ?? timeline.step ?? "–"),
  timeline: () => timeline.draw(),
  ranks: () => {
    ranks.draw();
    drawStragglers(run);
  },
  charts: () => charts.draw(),
  experts: () => {
    experts.draw();
    if (!hasExperts(run)) return;
    ofExperts.draw();
    drawExpertLegends(run);
  },
  plan: () => {
    drawPlan(run);
    drawHeat(run);
  },
  cluster: () => anew("cluster", [run.state?.version, run.ranks?.stragglers, run.ranks?.line?.peak_bytes, run.columns.generation?.at(-1)]) && drawCluster(run, reveal),
  log: () => anew("log", run.events) && drawLog(run),
  legends: drawLegends,
};
const OF = {
  connection: ["header"],
  state: ["header", "summary", "plan", "cluster", "timeline", "charts", "experts"],
  metrics: ["header", "summary", "charts", "experts", "log"],
  ranks: ["ranks", "cluster", "summary", "timeline"],
  trace: ["timeline", "controls"],
  spans: ["timeline", "controls"],
};

const braid = { run, timeline, charts, experts, drawnStep: 0 };
window.braid = braid;

function frame() {
  waiting = false;
  const parts = [...dirty];
  dirty.clear();
  for (const part of parts) PARTS[part]();
  if (parts.includes("charts")) braid.drawnStep = run.columns.step.at(-1) ?? 0;
}

function drawLegends() {
  const { strands, hurt, hidden, compute, slow, idle, quiet, block, paired, peer } = theme.colours;
  const parts = [["computes", compute], ["computes slower, because of overlap", slow], ["waits for transfers", "stripes"], ["waits for peers", "dotted"], ["nothing runs", idle]];
  legend(byId("budget-legend"), [...parts, ["communication, hidden", hidden]]);
  legend(byId("timeline-legend"), [
    ["alpha forward", strands[1][1]], ["alpha backward", strands[1][2]], ["beta forward", strands[2][1]], ["beta backward", strands[2][2]],
    ["neither strand (gradients, update)", strands[0][0]], ["waits for a transfer (exposed)", "stripes"], ["waits for a peer", "dotted"], ["line above: a block", block], ["paired block", paired],
  ]);
  legend(byId("ranks-legend"), parts);
  legend(byId("charts-legend"), [["waits (exposed)", hurt], ["hidden", hidden], ["waits for peers", peer], ["slowdown, by overlap", theme.colours.lines[2]], ["launch gaps", theme.colours.lines[0]], ["bubbles, validation", theme.colours.lines[1]], ["↻ restart   ⇔ resize   ✕ failure   ▾ checkpoint", quiet]]);
}

run.addEventListener("change", ({ detail }) => redraw(...OF[detail]));
new ResizeObserver(() => redraw("summary", "timeline", "ranks", "charts", "experts")).observe(document.querySelector("main"));
setInterval(() => redraw("header"), 1000);

const actions = {
  "step-back": () => timeline.choose((timeline.step ?? 1) - 1),
  "step-on": () => timeline.choose((timeline.step ?? 0) + 1),
  "zoom-in": () => timeline.zoom(0.6),
  "zoom-out": () => timeline.zoom(1 / 0.6),
  fit: () => timeline.show(),
  taller: () => timeline.resize(1),
  flatter: () => timeline.resize(-1),
  theme: () => {
    toggleTheme();
    redraw(...Object.keys(PARTS));
  },
  ask: () => byId("help").showModal(),
  "help-close": () => byId("help").close(),
};
for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
byId("follow").addEventListener("change", (event) => timeline.choose(event.target.checked ? null : timeline.step));
byId("step-count").addEventListener("change", (event) => timeline.show(Number(event.target.value)));

const KEYS = {
  "[": "step-back", "]": "step-on", "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", 0: "fit", h: "taller", l: "flatter", t: "theme", "?": "ask",
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName) || byId("help").open) return;
  if (event.key === ",") timeline.pick(-1);
  else if (event.key === ".") timeline.pick(1);
  else if (event.key === "f") timeline.choose(timeline.chosen === null ? timeline.step : null);
  else if (event.key in KEYS) actions[KEYS[event.key]]();
  else return;
  event.preventDefault();
});

drawLegends();
run.start();
