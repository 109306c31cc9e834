// Finds and describes spans of a step. Times are nanoseconds from the step's begin.

import { amount, bytes, lost, nanoseconds, percent, seconds } from "./dom.js";

export const LANES = ["compute", "intra-node", "inter-node"];
const DIRECTIONS = ["", "forward", "backward"];

/** Find the shortest of some spans (indices in order of their begin) at a time, else one within a pixel of it. */
export function spanAt({ start, end }, spans, time, slack) {
  let best = null;
  for (const span of spans) {
    if (start[span] > time + slack) break;
    if (end[span] < time - slack) continue;
    const score = Math.max(0, start[span] - time, time - end[span]) * 1e6 + (end[span] - start[span]);
    if (best === null || score < best.score) best = { span, score };
  }
  return best === null ? null : best.span;
}

/** Return the index of the interval at a time; null if there is none. */
export function intervalAt({ start, end }, time, slack) {
  const place = start.findIndex((begin, n) => begin - slack <= time && time <= end[n] + slack);
  return place < 0 ? null : place;
}

/** Describe an interval of a `kind`: "exposed" transfers, or "waits" for peers. */
export function describeInterval({ rank, data, kind, place }) {
  const { start, end, label, peer } = data.ranks.get(rank)[kind];
  const length = nanoseconds(end[place] - start[place]);
  if (kind === "exposed") return [`rank ${rank} waits for a transfer`, `${length} in which it is under way and nothing is computed`];
  const { operator, layer } = data.labels[label[place]];
  return [`rank ${rank} waits for rank ${peer[place]} (${operator}${layer >= 0 ? `, layer ${layer}` : ""})`, `${length} in which nothing runs here, and that rank has not begun the collective`];
}

/** Return the nanoseconds of a span during which its rank waits. */
function exposedIn({ start, end }, from, to) {
  return start.reduce((sum, begin, n) => sum + Math.max(0, Math.min(end[n], to) - Math.max(begin, from)), 0);
}

export function describeSpan({ rank, data, span }) {
  const own = data.ranks.get(rank);
  const [start, end, label, strand, direction, batch, chunk] = ["start", "end", "label", "strand", "direction", "micro_batch", "chunk"].map((name) => own.spans[name][span]);
  const facts = data.labels[label];
  const length = end - start;
  const where = [
    `rank ${rank}`, LANES[facts.lane], data.strands[strand] && `strand ${data.strands[strand]}`, DIRECTIONS[direction],
    batch >= 0 && `micro-batch ${batch}`, chunk >= 0 && `chunk ${chunk}`, facts.layer >= 0 && `layer ${facts.layer}`,
  ];
  const rows = [facts.operator, where.filter(Boolean).join(" · "), ["measured", nanoseconds(length)]];
  const beside = (other) => `${nanoseconds(other)} (measured: ${percent(Math.abs(length / other - 1))} ${length >= other ? "longer" : "shorter"})`;
  if (facts.predicted_ns) rows.push(["predicted", beside(facts.predicted_ns)]);
  if (facts.solo_ns) rows.push(["alone", beside(facts.solo_ns)]);
  if (facts.shapes) rows.push(["shapes", facts.shapes]);
  if (facts.lane > 0) {
    const waits = exposedIn(own.exposed, start, end);
    rows.push(["hidden", nanoseconds(length - waits)], ["exposed", nanoseconds(waits)]);
  }
  if (facts.bytes) rows.push(["sent", `${bytes(facts.bytes)}, ${amount(facts.bytes / (length / 1e9), "B/s")}`]);
  if (facts.flops) rows.push(["arithmetic", `${amount(facts.flops, "FLOP")}, ${amount(facts.flops / (length / 1e9), "FLOP/s")}`]);
  rows.push(["begins at", nanoseconds(start)]);
  return rows;
}

const NUMBERS = [["computes", "compute"], ["communication", "communication"], ["hidden", "hidden"], ["exposed: waits for transfers", "exposed"], ["waits for peers", "waiting"], ["slowdown", "slowdown"], ["launch gap", "launch_gap"], ["bubble", "bubble"]];

/** Return rows of the known overlap numbers; `find` returns a number by name, in seconds. */
export function namedNumbers(find) {
  const known = NUMBERS.map(([title, name]) => [title, find(name), name]).filter(([, value]) => typeof value === "number");
  return known.map(([title, value, name]) => [title, (name === "slowdown" ? lost : seconds)(value)]);
}

export function numberRows(own) {
  if (!own) return [];
  const rows = namedNumbers((name) => own.numbers[`${name}_ns`] === null ? null : own.numbers[`${name}_ns`] / 1e9);
  if (own.dropped) rows.push(["spans dropped", String(own.dropped)]);
  if (own.damage) rows.push(["damaged", own.damage]);
  return rows;
}
