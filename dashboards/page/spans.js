// Finds and describes spans of a step. Times are nanoseconds from the step's begin.

import { amount, bytes, lost, nanoseconds, percent, seconds } from "./dom.js";

export const LANES = ["compute", "intra-node", "inter-node"];
const DIRECTIONS = ["", "forward", "backward"];

/** Find the shortest of some spans (indices in order of their begin) at a time, else one within a pixel of it; null if
 * there is none. */
export function spanAt({ start, end }, time, slack, spans = start.keys()) {
  let best = null;
  for (const span of spans) {
    if (start[span] > time + slack) break;
    if (end[span] < time - slack) continue;
    const score = Math.max(0, start[span] - time, time - end[span]) * 1e6 + (end[span] - start[span]);
    if (best === null || score < best.score) best = { span, score };
  }
  return best === null ? null : best.span;
}

/** Describe an interval of a `kind`: "exposed" transfers, or "waits" for peers. */
export function describeInterval({ rank, data, kind, index }) {
  const { start, end, label, peer } = data.ranks.get(rank)[kind];
  const length = nanoseconds(end[index] - start[index]);
  if (kind === "exposed") return [`rank ${rank} waits for a transfer`, `${length} in which it is under way and nothing is computed`];
  const { operator, layer } = data.labels[label[index]];
  return [`rank ${rank} waits for rank ${peer[index]} (${operator}${layer >= 0 ? `, layer ${layer}` : ""})`, `${length} in which nothing runs here, and that rank has not begun the collective`];
}

/** Return the nanoseconds of a span during which its rank waits. */
function exposedIn({ start, end }, from, to) {
  return start.reduce((sum, begin, n) => sum + Math.max(0, Math.min(end[n], to) - Math.max(begin, from)), 0);
}

export function describeSpan({ rank, data, span }) {
  const columns = data.ranks.get(rank);
  const [start, end, label, strand, direction, batch, chunk] = ["start", "end", "label", "strand", "direction", "micro_batch", "chunk"].map((name) => columns.spans[name][span]);
  const facts = data.labels[label];
  const length = end - start;
  const where = [
    `rank ${rank}`, LANES[facts.lane], data.strands[strand] && `strand ${data.strands[strand]}`, DIRECTIONS[direction],
    batch >= 0 && `micro-batch ${batch}`, chunk >= 0 && `chunk ${chunk}`, facts.layer >= 0 && `layer ${facts.layer}`,
  ];
  const lines = [facts.operator, where.filter(Boolean).join(" · "), `measured: ${nanoseconds(length)}`];
  const beside = (other) => `${nanoseconds(other)} (measured: ${percent(Math.abs(length / other - 1))} ${length >= other ? "longer" : "shorter"})`;
  const rate = (count, unit) => amount(count / (length / 1e9), `${unit}/s`);
  if (facts.predicted_ns) lines.push(`predicted: ${beside(facts.predicted_ns)}`);
  if (facts.solo_ns) lines.push(`alone: ${beside(facts.solo_ns)}`);
  if (facts.shapes) lines.push(`shapes: ${facts.shapes}`);
  if (facts.lane > 0) {
    const waits = exposedIn(columns.exposed, start, end);
    lines.push(`hidden: ${nanoseconds(length - waits)}`, `exposed: ${nanoseconds(waits)}`);
  }
  if (facts.bytes) lines.push(`sent: ${bytes(facts.bytes)}, ${rate(facts.bytes, "B")}`);
  if (facts.flops) lines.push(`arithmetic: ${amount(facts.flops, "FLOP")}, ${rate(facts.flops, "FLOP")}`);
  return [...lines, `begins at ${nanoseconds(start)}`];
}

const NUMBERS = { compute: "computes", communication: "communication", hidden: "hidden", exposed: "exposed: waits for transfers", waiting: "waits for peers", slowdown: "slowdown", launch_gap: "launch gap", bubble: "bubble" };

/** Return lines about the known overlap numbers; `find` returns a number by name, in seconds. */
export function describeNumbers(find) {
  const known = Object.entries(NUMBERS).map(([name, title]) => [name, title, find(name)]).filter(([, , value]) => Number.isFinite(value));
  return known.map(([name, title, value]) => `${title}: ${(name === "slowdown" ? lost : seconds)(value)}`);
}
