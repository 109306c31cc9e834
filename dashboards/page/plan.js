// Shows the plan: layout, pairing as two strands with their bonds, overlap effectiveness, the cluster.

import { byId, bytes, el, hover, nanoseconds, percent, svg, table } from "./dom.js";
import { theme } from "./theme.js";

const PASSES = { F: "forward pass", B: "backward pass", I: "input gradients", W: "weight gradients", L: "end of a backward pass" };
const AXES = { dp: "data parallel", tp: "tensor parallel", pp: "pipeline stages", cp: "context parallel", ep: "expert parallel" };

export function drawPlan(run) {
  const { state } = run;
  const box = byId("plan");
  if (!state) return;
  const parts = [facts(state)];
  for (const [place, pair] of (state.schedule?.pairs ?? []).entries()) {
    const picture = strands(pair);
    if (!place) parts.push(el("h3", { text: `Together: ${pair.sides.join(" beside ")}` }), el("p", { class: "help", text: PAIRING }), picture);
    else parts.push(el("details", {}, el("summary", { text: `Together: ${pair.sides.join(" beside ")}` }), picture));
  }
  if (state.schedule && !state.schedule.pairs.length) parts.push(el("p", { class: "quiet", text: `Schedule ${state.schedule.name} pairs no passes: one strand.` }));
  const config = el("pre", { text: JSON.stringify(state.config, null, 1) });
  parts.push(el("details", {}, el("summary", { text: "Configuration" }), el("div", { class: "scroll" }, config)));
  box.replaceChildren(...parts);
}

function facts(state) {
  const { layout, schedule, model } = state;
  const tiles = [];
  for (const [axis, degree] of Object.entries(layout ?? {})) if (degree > 1) tiles.push([degree, AXES[axis]]);
  if (layout && !tiles.length) tiles.push(["1", "rank"]);
  if (schedule) {
    tiles.push([schedule.name, "schedule"], [schedule.strands.length, schedule.strands.length > 1 ? "strands" : "strand"], [schedule.micro_batches, "micro-batches a step"], [schedule.chunks, schedule.chunks > 1 ? "chunks of the model" : "chunk of the model"]);
    if (schedule.unit_layers) tiles.push([schedule.unit_layers, "layers ordered as one"]);
    const cut = schedule.partitions.length;
    tiles.push([cut || "whole", cut ? "partitions of collectives" : "collectives"]);
  }
  if (model) tiles.push([`${model.layers} × ${model.hidden}`, "layers × width"], [model.sequence, "tokens a sample"]);
  return el("div", { class: "facts" }, ...tiles.map(([value, name]) => el("div", {}, el("b", { text: value }), el("span", { text: name }))));
}

const PAIRING = "In order of issue. Boxes compute, rails outside carry transfers from start to wait; a bond ties a transfer of one pass to the computation of the other that hides it. A dashed frame: an end that the layer or the block before has left (L in the schedule).";

/** Draw operators as boxes in a row, rails from start to wait, bonds from a rail to the other pass's boxes. */
function arrange(actions) {
  const known = actions.filter((one) => one.verb === "compute" && one.ns).map((one) => one.ns);
  const usual = known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : 1;
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
    } else if (action.verb === "start") {
      const rail = { ...action, x, end: null };
      open.set(key, rail);
      rails.push(rail);
      x += 5;
    } else if (action.verb === "wait") {
      if (open.has(key)) open.get(key).end = x;
      open.delete(key);
      x += 5;
    } else {
      barriers.push(x);
      x += 6;
    }
  }
  for (const rail of open.values()) rail.end = x;
  return { boxes, rails, barriers, wide: x + 14 };
}

/** Draw the first pass above, the passes beside it below. */
function strands({ sides, actions }) {
  const colours = theme.colours;
  const { boxes, rails, barriers, wide } = arrange(actions);
  const lanes = { above: stack(rails.filter((rail) => !rail.turn)), below: stack(rails.filter((rail) => rail.turn)) };
  const [first, ...others] = sides.map((side) => PASSES[side[0]]);
  const above = 26 + lanes.above * 11;
  const top = above;
  const bottom = top + 92;
  const height = bottom + 24 + lanes.below * 11 + 26;
  const picture = svg("svg", { width: Math.max(wide + 80, 300), height, role: "img", "aria-label": `${boxes.length} computations and ${rails.length} transfers of ${sides.length} passes` });
  picture.append(label(6, 13, first, colours.strands[1][theme.dark ? 1 : 2], 600), label(6, height - 8, others.join(" and "), colours.strands[2][theme.dark ? 1 : 2], 600));
  for (const x of barriers) picture.append(svg("line", { x1: x, x2: x, y1: top - 8, y2: bottom + 32, stroke: colours.quiet, "stroke-dasharray": "3 3" }));
  for (const rail of rails) {
    const upper = !rail.turn;
    const y = upper ? top - 10 - rail.lane * 11 : bottom + 34 + rail.lane * 11;
    const beside = boxes.filter((box) => box.x + box.wide > rail.x && box.x < rail.end);
    for (const box of beside) {
      if (!box.turn === upper) continue;
      const middle = box.x + box.wide / 2;
      picture.append(svg("path", { d: `M${middle} ${upper ? y + 4 : y - 4} L${middle} ${upper ? bottom : top + 24}`, stroke: colours.hidden, "stroke-width": 2, "stroke-opacity": 0.55, fill: "none" }));
    }
    const alone = !beside.length;
    const shape = svg("rect", { x: rail.x, y: y - 4, width: Math.max(4, rail.end - rail.x), height: 8, rx: 4, fill: alone ? colours.hurt : colours.hidden, ...endFrame(rail) });
    picture.append(named(shape, [rail.operator, ["runs on", rail.stream ?? ""], ["alone", nanoseconds(rail.ns)], alone ? "nothing is computed beside it: it waits" : "hidden by what it is tied to", ...endNote(rail)]));
  }
  for (const box of boxes) {
    const upper = !box.turn;
    const fill = upper ? colours.strands[1][0] : colours.strands[2][0];
    const y = upper ? top : bottom;
    const group = svg("g", {});
    group.append(svg("rect", { x: box.x, y, width: box.wide, height: 24, rx: 5, fill, ...endFrame(box) }));
    const most = Math.floor((box.wide - 6) / 6);
    const name = box.operator.split("/").at(-1);
    if (most > 2) group.append(label(box.x + 4, y + 16, name.length > most ? `${name.slice(0, most - 1)}…` : name, upper ? "#001a2b" : "#201500"));
    picture.append(named(group, [box.operator, ["pass", PASSES[box.side]], ["alone", nanoseconds(box.ns)], ...endNote(box)]));
  }
  return el("div", { class: "strands", tabindex: 0, role: "group", "aria-label": "Pairing; scroll sideways" }, picture);
}

const endFrame = ({ side }) => (side === "L" ? { stroke: theme.colours.ink, "stroke-width": 1.5, "stroke-dasharray": "3 2" } : {});
const endNote = ({ side }) => (side === "L" ? ["an end that the layer or the block before has left"] : []);

/** Assign overlapping rails to separate lanes; return the number of lanes. */
function stack(rails) {
  const ends = [];
  for (const rail of rails) {
    let lane = ends.findIndex((end) => end <= rail.x);
    if (lane < 0) lane = ends.length;
    ends[lane] = rail.end + 2;
    rail.lane = lane;
  }
  return Math.max(1, ends.length);
}

const label = (x, y, text, fill, weight = 400) => svg("text", { x, y, fill, text, "font-size": 11, "font-weight": weight });

function named(shape, rows) {
  hover(shape, () => rows);
  return shape;
}

/** Return a colour from amber (worse) over the card's colour (no gain) to blue (free), for any colour vision. */
export function heatColour(value) {
  const share = Math.max(-1, Math.min(1, value));
  const [middle, end] = [theme.dark ? [35, 44, 54] : [245, 246, 248], share >= 0 ? [0, 96, 168] : [190, 90, 0]];
  const mix = middle.map((from, n) => Math.round(from + (end[n] - from) * Math.abs(share)));
  return [`rgb(${mix.join(",")})`, Math.abs(share) > 0.5 || theme.dark ? "#ffffff" : "#16202b"];
}

export function drawHeat(run) {
  const found = run.state?.effectiveness;
  byId("heat-section").hidden = !found;
  if (!found) return;
  const head = [el("th"), ...found.columns.map((column) => {
    const also = column.alike.length ? ` and ${column.alike.length} alike` : "";
    return el("th", { scope: "col", title: [column.name, ...column.alike].join(", ") }, column.name + also, el("small", { text: nanoseconds(column.ns) }));
  })];
  const rows = found.rows.map((row, place) => {
    const cells = found.values[place].map((value) => {
      const cell = el("td", { text: value.toFixed(2) });
      [cell.style.backgroundColor, cell.style.color] = heatColour(value);
      return cell;
    });
    return el("tr", {}, el("th", { scope: "row", text: `${row.name} (${nanoseconds(row.ns)})` }), ...cells);
  });
  byId("heat").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)), el("p", { class: "quiet", text: `Costs: ${found.source}` }));
}

export function drawCluster(run, chosen) {
  const { state } = run;
  if (!state) return;
  const slow = new Map((run.ranks?.stragglers ?? []).map((one) => [one.rank, one]));
  const peaks = run.ranks?.line?.peak_bytes ?? [];
  const generation = run.columns.generation?.at(-1);
  const nodes = Map.groupBy(state.cluster.ranks.map((row, rank) => ({ ...row, rank })), (row) => row.node);
  const cards = [...nodes].map(([name, rows]) => {
    const most = Math.max(...rows.map(({ rank }) => peaks[rank] ?? 0));
    const address = [...new Set(rows.map((row) => row.address).filter((one) => one && one !== name))].slice(0, 2).join(", ");
    return el("div", { class: "node" }, el("b", { text: name }), el("div", { class: "quiet", text: [address, `${rows.length} rank${rows.length > 1 ? "s" : ""}`, most ? `fullest ${bytes(most)}` : ""].filter(Boolean).join(" · ") }),
      el("div", { class: "chips" }, ...rows.map((row) => chip(row, slow.get(row.rank), peaks[row.rank], chosen))));
  });
  const text = [`${nodes.size} node${nodes.size === 1 ? "" : "s"}, ${state.cluster.ranks.length} ranks`, generation && `generation ${generation}`, state.cluster.launcher && `started by ${state.cluster.launcher}`];
  byId("cluster").replaceChildren(el("p", { class: "quiet", text: state.cluster.ranks.length ? text.filter(Boolean).join(" · ") : "Not written down (cluster.json)." }), el("div", { class: "nodes" }, ...cards));
}

function chip(row, slow, peak, chosen) {
  const place = Object.entries(row.place).map(([axis, at]) => `${axis} ${at}`).join(", ");
  const facts = [place, row.process && `process ${row.process}`, peak && `memory ${bytes(peak)}`, slow && `${percent(slow.times - 1)} slower than its stage`].filter(Boolean).join("; ");
  return el("button", { type: "button", class: slow ? "chip slow" : "chip", title: facts, "aria-label": `rank ${row.rank}: ${facts}`, text: slow ? `⚠ ${row.rank}` : row.rank, onclick: () => chosen(row.rank) });
}

export function drawLog(run) {
  const rows = run.events.slice(-200).reverse().map((event) => [new Date(event.time * 1000).toLocaleString(), event.step, event.generation, event.kind, event.text ?? ""].map((one) => one ?? ""));
  byId("log").replaceChildren(...table(["time", "step", "generation", "what", ""], rows).children);
}
