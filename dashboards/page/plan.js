// Shows decisions and events: layout, pairing as two strands with their bonds, overlap effectiveness, load of experts, log.

import { hasExperts } from "./charts.js";
import { byId, el, fitted, heat, nanoseconds, percent, plural, svg } from "./dom.js";

const PASSES = { F: "forward pass", B: "backward pass", I: "input gradients", W: "weight gradients", L: "end of a backward pass" };
const AXES = { dp: "data parallel", tp: "tensor parallel", pp: "pipeline stages", cp: "context parallel", ep: "expert parallel" };
const [ABOVE, BOX, APART, RAIL] = [26, 24, 92, 11]; // heights in pixels; APART: from the upper boxes to the lower ones

export function drawPlan({ state }) {
  if (!state) return;
  const { schedule, config } = state;
  byId("facts").replaceChildren(...factsOf(state).map(([value, name]) => el("div", {}, el("b", { text: value }), el("span", { text: name }))));
  const pairs = (schedule?.pairs ?? []).map((pair, n) => {
    const heading = el("summary", { text: `Together: ${pair.sides.join(" beside ")}` });
    return el("details", n ? {} : { open: "" }, heading, strands(pair));
  });
  byId("pairing").hidden = !pairs.length;
  byId("pairs").replaceChildren(...pairs);
  if (schedule && !pairs.length) byId("pairs").textContent = `Schedule ${schedule.name} pairs no passes: one strand.`;
  byId("config").textContent = JSON.stringify(config, null, 1);
  drawEffectiveness(state.effectiveness);
}

function factsOf({ layout, schedule, model }) {
  const facts = Object.entries(layout ?? {}).filter(([, degree]) => degree > 1).map(([axis, degree]) => [degree, AXES[axis]]);
  if (layout && !facts.length) facts.push([1, "rank"]);
  if (schedule) {
    const { name, strands: names, micro_batches: batches, chunks, unit_layers: layers, partitions } = schedule;
    facts.push([name, "schedule"], [names.length, "strands"], [batches, "micro-batches a step"], [chunks, "chunks of the model"]);
    if (layers) facts.push([layers, "layers ordered as one"]);
    facts.push(partitions.length ? [partitions.length, "partitions of collectives"] : ["whole", "collectives"]);
  }
  if (model) facts.push([`${model.layers} × ${model.hidden}`, "layers × width"], [model.sequence, "tokens a sample"]);
  return facts;
}

/** Place operators as boxes in a row, and transfers as rails from start to wait. */
function arrange(actions) {
  const known = actions.filter(({ verb, ns }) => verb === "compute" && ns).map(({ ns }) => ns);
  const usual = known.reduce((sum, ns) => sum + ns, 0) / known.length || 1;
  const boxes = [];
  const rails = [];
  const barriers = [];
  const open = new Map();
  let x = 14;
  for (const action of actions) {
    const key = `${action.turn}:${action.operator}`;
    if (action.verb === "compute") {
      const wide = Math.max(20, Math.min(190, 52 * ((action.ns ?? usual) / usual)));
      boxes.push({ ...action, x, wide });
      x += wide + 3;
    } else if (action.verb === "barrier") {
      barriers.push(x);
      x += 6;
    } else {
      if (action.verb === "start") open.set(key, rails[rails.push({ ...action, x, end: null }) - 1]);
      else if (open.has(key)) open.get(key).end = x;
      x += 5;
    }
  }
  for (const rail of rails) rail.end ??= x;
  return { boxes, rails, barriers, wide: x + 14 };
}

/** Draw the first pass above, the passes beside it below; a bond leads from a rail to the other pass's boxes. */
function strands({ sides, actions }) {
  const { boxes, rails, barriers, wide } = arrange(actions);
  const [upper, lower] = [stack(rails.filter(({ turn }) => !turn)), stack(rails.filter(({ turn }) => turn))];
  const top = ABOVE + upper * RAIL;
  const bottom = top + APART;
  const height = bottom + BOX + lower * RAIL + ABOVE;
  const drawn = barriers.map((x) => svg("path", { class: "cursor dash", d: `M${x} ${top - 8}V${bottom + 32}` }));
  for (const rail of rails) {
    const y = rail.turn ? bottom + 34 + rail.lane * RAIL : top - 10 - rail.lane * RAIL;
    const beside = boxes.filter((box) => box.x + box.wide > rail.x && box.x < rail.end);
    const tied = beside.filter((box) => !box.turn !== !rail.turn);
    const end = rail.turn ? top + BOX : bottom;
    if (tied.length) drawn.push(svg("path", { class: "bond", d: tied.map((box) => `M${box.x + box.wide / 2} ${y}V${end}`).join("") }));
    const about = `${told(rail)}\nruns on ${rail.stream}\n${beside.length ? "hidden by what it is tied to" : "nothing is computed beside it: it waits"}`;
    drawn.push(svg("rect", { "data-tip": about, class: `${beside.length ? "hidden" : "exposed"} ${rail.side}`, x: rail.x, y: y - 4, width: Math.max(4, rail.end - rail.x), height: 8, rx: 4 }));
  }
  for (const box of boxes) {
    const y = box.turn ? bottom : top;
    const shape = svg("rect", { class: `${box.turn ? "beta" : "alpha"} ${box.side}`, x: box.x, y, width: box.wide, height: BOX, rx: 5 });
    const name = svg("text", { class: "on-strand", x: box.x + 4, y: y + 16, text: fitted(box.operator.split("/").at(-1), box.wide) });
    drawn.push(svg("g", { "data-tip": told(box) }, shape, name));
  }
  const [first, ...others] = sides.map((side) => PASSES[side[0]]);
  const names = [svg("text", { x: 6, y: 13, text: first }), svg("text", { x: 6, y: height - 8, text: others.join(" and ") })];
  const label = `${boxes.length} computations and ${rails.length} transfers of ${sides.length} passes; scroll sideways`;
  return el("div", { class: "strands", tabindex: 0, role: "img", "aria-label": label }, svg("svg", { width: wide + 80, height }, ...names, ...drawn));
}

const told = ({ operator, side, ns }) => `${operator}\n${PASSES[side]}${side === "L" ? " that the layer or the block before has left" : ""}\nalone: ${nanoseconds(ns)}`;

/** Assign overlapping rails to separate lanes; return the number of lanes. */
function stack(rails) {
  const ends = [];
  for (const rail of rails) {
    const free = ends.findIndex((end) => end <= rail.x);
    rail.lane = free < 0 ? ends.length : free;
    ends[rail.lane] = rail.end + 2;
  }
  return Math.max(1, ends.length);
}

const heading = (text, more, scope = "col") => el("th", { scope, ...more }, text);

function drawEffectiveness(table) {
  byId("heat-section").hidden = !table;
  if (!table) return;
  const head = table.columns.map(({ name, alike, ns }) => heading(`${name}${alike.length ? ` and ${alike.length} alike` : ""} (${nanoseconds(ns)})`, { title: [name, ...alike].join(", ") }));
  const rows = table.rows.map(({ name, ns }, n) => {
    const cells = table.values[n].map((value) => el("td", { text: value.toFixed(2), style: heat(value) }));
    return el("tr", {}, heading(`${name} (${nanoseconds(ns)})`, {}, "row"), ...cells);
  });
  byId("heat").replaceChildren(el("tr", {}, el("th"), ...head), ...rows);
  byId("heat-source").textContent = `Costs: ${table.source}`;
}

const times = (value) => (Number.isFinite(value) ? `${value.toFixed(value < 10 ? 2 : 1)} ×` : "–");

let drawnVisits = null;

export function drawExperts(run) {
  byId("experts-section").hidden = !hasExperts(run);
  if (!hasExperts(run) || !run.visits) return;
  if (drawnVisits !== run.visits) drawVisits(run); // a map may have thousands of cells
  drawnVisits = run.visits;
  const now = (name) => run.columns[`experts.${name}`]?.at(-1) ?? null;
  const facts = [`the fullest expert has ${times(now("imbalance"))} the average, in the worst layer ${times(now("worst_imbalance"))}`, `entropy ${percent(now("entropy"), 1)} of a balanced load's`];
  if (now("rank_imbalance") !== null) facts.push(`the fullest rank has ${times(now("rank_imbalance"))} the average`);
  if (now("dropped") !== null) facts.push(`${percent(now("dropped"), 1)} of visits dropped`);
  byId("experts-read").textContent = `Step ${run.columns.step.at(-1)}: ${facts.join("; ")}; ${plural(now("unvisited") || "no", "expert")} without a visit.`;
}

/** Draw the visits of every expert, over the average of its layer. */
function drawVisits(run) {
  const { visits, layers, step } = run.visits;
  const count = Math.max(...visits.map((row) => row.length));
  const ep = run.state?.config?.parallel?.ep;
  const each = count % ep === 0 ? count / ep : count; // experts of a rank
  const every = [1, 2, 4, 8, 16, 32].find((size) => count / size <= 32) ?? 64;
  const numbers = Array.from({ length: Math.ceil(count / every) }, (_, n) => heading(n * every, { colspan: every }));
  const rows = visits.map((row, n) => {
    const all = row.reduce((sum, value) => sum + value, 0);
    const over = row.map((value) => (value / all) * row.length || 0);
    const cells = row.map((value, expert) => {
      const title = `layer ${layers[n]}, expert ${expert}, step ${step}\n${value.toLocaleString("en")} visits\n${percent(value / all, 2)} of the layer's\n${times(over[expert])} the average${each < count ? `\nrank ${Math.floor(expert / each)} of ep` : ""}`;
      const look = expert && expert % each === 0 ? "border" : "";
      return el("td", { "data-tip": title, class: look, text: every === 1 && value ? over[expert].toFixed(2) : "", style: value ? heat(-Math.log2(over[expert]) / 2) : { background: "var(--stripes)" } });
    });
    return el("tr", {}, heading(layers[n], {}, "row"), ...cells, el("th", { text: times(Math.max(...over)) }));
  });
  byId("experts").replaceChildren(el("tr", {}, heading("layer"), ...numbers, heading("fullest")), ...rows);
  byId("experts-step").textContent = step;
}

export function drawLog({ events }) {
  const rows = events.slice(-200).reverse().map(({ time, step, generation, kind, text }) => {
    const cells = [new Date(time * 1000).toLocaleString(), step, generation, kind, text].map((cell) => el("td", { text: cell ?? "" }));
    return el("tr", {}, ...cells);
  });
  byId("log").replaceChildren(...rows);
}
