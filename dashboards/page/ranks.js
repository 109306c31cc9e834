// The nodes, and on each node a column for every rank: how the rank spent its time of the newest step.

import { byId, bytes, el, filledBox, plural, seconds } from "./dom.js";
import { describeNumbers } from "./spans.js";
import { partsOf } from "./summary.js";

/** Draw the cluster; a click on a rank calls `reveal` with its number. */
export function drawRanks(run, reveal) {
  const { state } = run;
  if (!state) return;
  const { line, stragglers = [] } = run.ranks ?? {};
  const slow = new Map(stragglers.map((straggler) => [straggler.rank, straggler]));
  const longest = Math.max(...(line?.seconds ?? []), 1e-9);
  const nodes = Map.groupBy(state.cluster.ranks.map((row, rank) => ({ ...row, rank })), ({ node }) => node);
  const cards = [...nodes].map(([name, rows]) => {
    const address = [...new Set(rows.map((row) => row.address).filter((text) => text && text !== name))].slice(0, 2).join(", ");
    const most = Math.max(...rows.map(({ rank }) => line?.peak_bytes?.[rank] ?? 0));
    const about = [address, plural(rows.length, "rank"), most && `fullest ${bytes(most)}`].filter(Boolean).join(" · ");
    const columns = rows.map((row) => column(row, line, slow.get(row.rank), longest, () => reveal(row.rank)));
    return el("div", { class: "node" }, el("b", { text: name }), el("small", { class: "quiet", text: about }), el("div", { class: "columns" }, ...columns));
  });
  const generation = run.columns.generation?.at(-1);
  const facts = [plural(nodes.size, "node"), plural(state.cluster.ranks.length, "rank"), generation && `generation ${generation}`, state.cluster.launcher && `started by ${state.cluster.launcher}`, line && `full height: ${seconds(longest)}`];
  byId("ranks-step").textContent = line?.step ?? "–";
  byId("cluster").textContent = nodes.size ? facts.filter(Boolean).join(" · ") : "Not written down (cluster.json).";
  byId("nodes").className = state.cluster.ranks.length > 64 ? "many" : "";
  byId("nodes").replaceChildren(...cards);
  byId("longest-wait").textContent = waitedMost(line);
}

function column({ rank, place, process }, line, slow, longest, onclick) {
  const of = (name) => line?.[`${name}seconds`]?.[rank];
  const where = [...Object.entries(place).map(([axis, at]) => `${axis} ${at}`), process && `process ${process}`].filter(Boolean).join(", ");
  const lines = [`rank ${rank}: ${where}`, ...describeNumbers((name) => of(`${name}_`))];
  if (line) lines.push(`step: ${seconds(of(""))}`, `memory: ${bytes(line.peak_bytes?.[rank])}`);
  for (const [peer, operator, waited] of line?.waits_for?.[rank] ?? []) lines.push(`for rank ${peer} (${operator}): ${seconds(waited)}`);
  if (slow) lines.push(`${slow.times.toFixed(2)} × the compute time of its stage's others`);
  const [step, compute, exposed, slowdown, waiting] = ["", "compute_", "exposed_", "slowdown_", "waiting_"].map((name) => of(name) ?? 0);
  const parts = partsOf({ step, compute, exposed, slowdown, waiting });
  const boxes = parts.filter(([, value]) => value > 0).map(([look, value]) => filledBox(look, { height: `${(value / longest) * 100}%` }));
  return el("button", { type: "button", class: slow ? "rank slow" : "rank", "data-tip": lines.join("\n"), onclick }, el("span", {}, ...boxes), slow ? `⚠ ${rank}` : rank);
}

/** Describe the longest wait for a peer in a step, over all ranks. */
function waitedMost(line) {
  const all = (line?.waits_for ?? []).flatMap((waits, rank) => waits.map(([peer, operator, waited]) => ({ rank, peer, operator, waited })));
  if (!all.length) return "";
  const most = all.reduce((a, b) => (b.waited > a.waited ? b : a));
  return `The longest wait for a peer in step ${line.step}: rank ${most.rank} waits ${seconds(most.waited)} for rank ${most.peer} (${most.operator}).`;
}
